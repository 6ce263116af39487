"""A whole RL step (sample, grade, score, update), ours beside TRL's GRPOTrainer: same model, prompts, grader, machine.

Both run GRPO with one update per step in one process, from fp32 weights under bf16 autocast. First responses end where
they end (`free`), so the two differ in tokens; then every response has the same length (`fixed`), so they do not. A
stopwatch that waits for the GPU at every change of phase runs over separate steps and not over the timed ones.
TRL may come from a folder into which its wheels were unpacked (`--peers`).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from stopwatch import REST, Stopwatch, about, forget, per_step, save, settle, shares, times_faster
from trimtab.config import Config, load
from trimtab.objectives import Objective
from trimtab.policy import pick_device
from trimtab.policy.demo_model import demo_model, demo_tokenizer
from trimtab.policy.smollm2 import smollm2_folder
from trimtab.rewards import grade_many
from trimtab.rollout import PromptTokens, Response, Sampler, SamplingOptions
from trimtab.tasks import Problem, problem_index
from trimtab.train import loop, rollouts, scoring
from trimtab.train.build import build_sampler, build_task
from trimtab.train.loop import train_step
from trimtab.train.process import gc_pause, set_threads
from trimtab.train.trainer import RunProgress, Trainer, build_trainer

PHASES = ("sample", "grade", "score", "plan", "forward and backward", "optimizer", "metrics", REST)
COMMON = ["objective.name=grpo", "update.per_step=1", "record.enabled=false"]
FULL = ["rollout.max_new_tokens=256", *COMMON]
SMALL = ["rollout.prompts=8", "rollout.samples=4", "rollout.max_new_tokens=12", "run.device=cpu", *COMMON]


@dataclass(frozen=True)
class Steps:
    """How many steps: not counted, timed, and under the stopwatch; `fixed`: no response ends before its limit."""

    warmup: int
    timed: int
    watched: int
    fixed: bool

    @property
    def all(self) -> int:
        """Their sum."""
        return self.warmup + self.timed + self.watched


@dataclass
class Course:
    """What a run of several steps left behind."""

    steps: Steps
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def figures(self, watch: Stopwatch) -> dict[str, Any]:
        """The timed steps, and where the time of the watched ones went."""
        timed = slice(self.steps.warmup, self.steps.warmup + self.steps.timed)
        result = per_step(self.seconds[timed], self.tokens[timed])
        result["mean_reward"] = round(sum(self.rewards[timed]) / self.steps.timed, 4)
        if self.steps.watched:
            result["where"] = shares(watch.seconds, self.steps.watched, PHASES)
        return result


@dataclass(frozen=True)
class Watched:
    """A sampler under the stopwatch."""

    sampler: Sampler
    watch: Stopwatch

    def sample(self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions) -> list[list[Response]]:
        """What the sampler draws."""
        with self.watch.phase("sample"):
            return self.sampler.sample(prompts, step, options)


def ours(config: Config, steps: Steps) -> dict[str, Any]:
    """trimtab's steps, as `trimtab train` makes them."""
    forget(pick_device(config.run.device))
    set_threads(config)
    trainer, progress, course = build_trainer(config), RunProgress(), Course(steps)
    if steps.fixed:
        never_end(trainer)
    watch = Stopwatch(trainer.policy.device)
    with gc_pause() as tidy:
        for number in range(steps.all):
            trainer.set_learning_rate(progress.step)
            with watching(trainer, watch) if number >= steps.warmup + steps.timed else ExitStack():
                settle(trainer.policy.device)
                start = time.perf_counter()
                metrics = train_step(trainer, progress).metrics
                settle(trainer.policy.device)
            course.seconds.append(time.perf_counter() - start)
            course.tokens.append(int(metrics["tokens/count"]))
            course.rewards.append(metrics["reward/mean"])
            tidy()
    return course.figures(watch)


def never_end(trainer: Trainer) -> None:
    """Make a token that cannot be drawn the only one that ends a response."""
    policy = trainer.policy
    if policy.tokenizer.pad_token_id is None:
        policy.tokenizer.pad_token = policy.tokenizer.eos_token
    # A cached property keeps its value in vars().
    vars(policy)["eos_token_ids"] = frozenset({int(policy.causal_lm.config.vocab_size)})
    trainer.sampler = build_sampler(policy, trainer.config.rollout)


@contextmanager
def watching(trainer: Trainer, watch: Stopwatch) -> Iterator[None]:
    """A stopwatch at every phase of a step of ours."""
    places: list[tuple[Any, str, str]] = [
        (rollouts, "grade_many", "grade"),
        (scoring, "score_responses", "score"),
        (Objective, "plan", "plan"),
        (loop, "update", "forward and backward"),
        (torch.nn.utils, "clip_grad_norm_", "optimizer"),
        (trainer.optimizer, "step", "optimizer"),
        (loop, "step_metrics", "metrics"),
    ]
    with ExitStack() as stack:
        for owner, name, phase in places:
            stack.enter_context(patch.object(owner, name, watch.around(getattr(owner, name), phase)))
        stack.enter_context(patch.object(trainer, "sampler", Watched(trainer.sampler, watch)))
        stack.enter_context(watch.phase(REST))
        yield


def problems_of(config: Config, steps: int) -> list[Problem]:
    """The problems of the first steps, in the order in which our run meets them."""
    task = build_task(config, "train")
    assert task is not None
    return [task[problem_index(len(task), config.run.seed, n)] for n in range(steps * config.rollout.prompts)]


def peer_model(config: Config) -> tuple[Any, Any]:
    """The same weights and tokenizer, as transformers loads them."""
    if config.model.path == "demo":
        return demo_model(config.run.seed), demo_tokenizer()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(smollm2_folder())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model, AutoTokenizer.from_pretrained(folder)


def peer_options(config: Config, steps: Steps, rows: int) -> dict[str, Any]:
    """GRPOTrainer's settings: what ours does, nothing logged or saved, and nothing recomputed to save memory."""
    rollout, update = config.rollout, config.update
    cpu = pick_device(config.run.device).type == "cpu"
    return {
        "max_steps": steps.all,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": rollout.prompts * rollout.samples // rows,
        "num_generations": rollout.samples,
        "num_iterations": 1,
        "max_completion_length": rollout.max_new_tokens,
        "generation_kwargs": {"min_new_tokens": rollout.max_new_tokens} if steps.fixed else None,
        "temperature": rollout.temperature,
        "loss_type": "grpo",
        "beta": 0.0,
        "learning_rate": update.lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": update.betas[0],
        "adam_beta2": update.betas[1],
        "weight_decay": update.weight_decay,
        "max_grad_norm": update.max_grad_norm,
        "shuffle_dataset": False,
        "bf16": config.model.precision == "bf16",
        "use_cpu": cpu,
        "dataloader_pin_memory": not cpu,
        "gradient_checkpointing": False,
        "use_vllm": False,
        "use_liger_kernel": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": config.run.seed,
    }


def theirs(config: Config, steps: Steps, rows: int) -> dict[str, Any]:
    """TRL's steps; `rows` completions in one forward pass."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    course, watch = Course(steps), Stopwatch(pick_device(config.run.device), on=False)
    problems = problems_of(config, steps.all)
    model, tokenizer = peer_model(config)
    chat = config.model.chat and tokenizer.chat_template
    prompts = [list(p.prompt) if chat else "\n".join(message["content"] for message in p.prompt) for p in problems]
    with tempfile.TemporaryDirectory() as folder:
        options = peer_options(config, steps, rows)
        trainer = GRPOTrainer(
            model=model,
            args=GRPOConfig(output_dir=folder, **options),
            processing_class=tokenizer,
            reward_funcs=grader(config, problems, course),
            train_dataset=Dataset.from_dict({"prompt": prompts, "number": list(range(len(prompts)))}),
            callbacks=[step_clock(course, watch)],
        )
        for owner, name, phase in (
            (trainer, "training_step", "forward and backward"),
            (trainer, "_prepare_inputs", REST),
            (trainer, "_generate_single_turn", "sample"),
            (trainer, "_calculate_rewards", "grade"),
            (trainer.accelerator, "clip_grad_norm_", "optimizer"),
        ):
            setattr(owner, name, watch.around(getattr(owner, name), phase))
        trainer.train()
    return {**course.figures(watch), "options": options}


def grader(config: Config, problems: Sequence[Problem], course: Course) -> Callable[..., list[float | None]]:
    """Our grader as TRL's reward function, which also sees how many tokens there are."""

    def reward(completions: list[Any], completion_ids: list[list[int]], number: list[int], **_: Any) -> Any:
        texts = [said if isinstance(said, str) else said[0]["content"] for said in completions]
        verdicts = grade_many(zip(texts, (problems[n] for n in number), strict=True))
        rewards = [config.reward.of(verdict.kind) for verdict in verdicts]
        course.tokens.append(sum(len(ids) for ids in completion_ids))
        course.rewards.append(sum(given or 0.0 for given in rewards) / len(rewards))
        return rewards

    return reward


def step_clock(course: Course, watch: Stopwatch) -> Any:
    """A callback of the transformers trainer: a step lasts from the end of the last one to its own end."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """The clock, and the phases that have no method of their own."""

        since = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            """The first step starts."""
            self.since = time.perf_counter()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            """Gradients are ready."""
            watch.start("optimizer")

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            """Weights are new."""
            watch.stop()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """One step is over and the next one starts; the stopwatch starts with the first of its own."""
            watch.stop()
            settle(watch.device)
            now = time.perf_counter()
            course.seconds.append(now - self.since)
            print(f"TRL: {course.seconds[-1]:.1f} s, {course.tokens[-1]} tokens", flush=True)
            self.since = now
            watch.on = len(course.seconds) >= course.steps.warmup + course.steps.timed
            watch.start(REST)

    return Clock()


def try_peer(config: Config, steps: Steps, rows: Sequence[int]) -> dict[str, Any]:
    """TRL with as many rows at once as fit; a peer that cannot be run is part of the result."""
    device = pick_device(config.run.device)
    for many in rows:
        forget(device)
        try:
            return theirs(config, steps, many)
        except torch.OutOfMemoryError:
            print(f"TRL: {many} rows at once do not fit")
        except Exception as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    return {"error": f"out of memory at {rows[-1]} rows at once"}


def compare(config: Config, args: argparse.Namespace, fixed: bool) -> Iterator[dict[str, Any]]:
    """Ours, then the peer, then how they compare; what is known so far after each."""
    watched, threads = 0 if fixed else 1, torch.get_num_threads()
    result: dict[str, Any] = {"trimtab": ours(config, Steps(args.warmup, args.steps, 3 * watched, fixed))}
    torch.set_num_threads(threads)
    yield result
    if args.peer == "none":
        return
    steps = Steps(args.peer_warmup, args.peer_steps, watched, fixed)
    result["trl"] = try_peer(config, steps, args.rows)
    if "error" not in result["trl"]:
        result["times_faster"] = times_faster(result["trimtab"], result["trl"])
    yield result


def main(words: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peer", choices=["trl", "none"], default="trl")
    parser.add_argument("--peers", type=Path, help="a folder with the unpacked wheels of trl and what it needs")
    parser.add_argument("--small", action="store_true", help="the demo model on a CPU, to try the script")
    parser.add_argument("--only", choices=["free", "fixed"])
    parser.add_argument("--steps", type=int, default=9, help="timed steps of ours")
    parser.add_argument("--warmup", type=int, default=3, help="steps of ours that do not count")
    parser.add_argument("--peer-steps", type=int, default=3)
    parser.add_argument("--peer-warmup", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", help="TRL's completions in one pass; the first that fits")
    parser.add_argument("--set", action="append", default=[], help="settings over the recipe, for both")
    args = parser.parse_args(words)
    args.rows = args.rows or ([8] if args.small else [128, 64, 32])
    if args.peer == "trl":
        os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    if args.peers:
        sys.path.insert(0, str(args.peers))
    config = load("demo", [*SMALL, *args.set]) if args.small else load("smollm2", [*FULL, *args.set])
    many, limit = config.rollout.prompts * config.rollout.samples, config.rollout.max_new_tokens
    result = about(
        f"a whole step of GRPO, model {config.model.path}, {many} responses of up to {limit} tokens; medians of steps; "
        "free: responses end where they end; fixed: every response has its full length",
        pick_device(config.run.device),
        "trl",
    )
    result["config"] = config.model_dump(include={"task", "model", "rollout", "update"})
    for name in [args.only] if args.only else ["free", "fixed"]:
        for known in compare(config, args, name == "fixed"):
            result[name] = known
            save(result, args.out)
            print(name, known)


if __name__ == "__main__":
    main()
