"""A whole RL step (sample, grade, score, update), trimtab's beside TRL's: same model, prompts, grader, machine.

TRL samples with transformers, or with vLLM in the same process (`--peer trl-vllm`). The model is SmolLM2-135M, or has
random weights in the shape of Qwen3-1.7B (`--shape 1.7B`).

Both run GRPO with one update per step in one process, from fp32 weights under bf16 autocast. First responses have their
natural length (`free`), so the two differ in tokens; then all have the same length (`fixed`), so they do not. Phases
are timed in separate steps, since the stopwatch waits for the GPU at every change of phase.
TRL may come from a folder into which its wheels were unpacked (`--peers`).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from made_models import save_made_model
from result_file import about, save
from stopwatch import REST, Stopwatch, forget, per_step, settle, shares, times_faster
from trimtab.data import Problem, PromptTokens, Response, Sampler, SamplingOptions, Turns, problem_index
from trimtab.grading import grade_many
from trimtab.objectives import Objective
from trimtab.trainer.config import Config, load
from trimtab.trainer.model import pick_device
from trimtab.trainer.model.loading import demo_model, demo_tokenizer
from trimtab.trainer.model.pretrained import smollm2_folder
from trimtab.trainer.train import loop, rollouts, scoring
from trimtab.trainer.train.build import build_sampler, build_task
from trimtab.trainer.train.loop import train_step
from trimtab.trainer.train.trainer import RunProgress, Trainer, build_trainer, gc_pause, set_threads
from trl_vllm import VLLM_PEERS, bf16_copy, vllm_options

PHASES = ("sample", "grade", "score", "plan", "forward and backward", "optimizer", "metrics", REST)
COMMON = ["objective.name=grpo", "update.per_step=1", "record.enabled=false"]
FULL = ["rollout.max_new_tokens=256", *COMMON]
SMALL = ["rollout.prompts=8", "rollout.samples=4", "rollout.max_new_tokens=12", "run.device=cpu", *COMMON]


@dataclass(frozen=True)
class Steps:
    """How many steps: warm-up, timed, and with timed phases; `fixed`: no response ends before its limit."""

    warmup: int
    timed: int
    watched: int
    fixed: bool

    @property
    def all(self) -> int:
        """Their sum."""
        return self.warmup + self.timed + self.watched


@dataclass
class Measurements:
    """Seconds, tokens and mean reward of every step."""

    steps: Steps
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def figures(self, watch: Stopwatch) -> dict[str, Any]:
        """Return the figures of the timed steps, and the phases of the watched ones."""
        timed = slice(self.steps.warmup, self.steps.warmup + self.steps.timed)
        result = per_step(self.seconds[timed], self.tokens[timed])
        result["mean_reward"] = round(sum(self.rewards[timed]) / self.steps.timed, 4)
        if self.steps.watched:
            result["where"] = shares(watch.seconds, self.steps.watched, PHASES)
        return result


@dataclass(frozen=True)
class Watched:
    """A sampler that is timed."""

    sampler: Sampler
    watch: Stopwatch

    def sample(
        self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions, turns: Turns | None = None
    ) -> list[list[Response]]:
        """Sample as the wrapped sampler does."""
        with self.watch.phase("sample"):
            return self.sampler.sample(prompts, step, options, turns)


def ours(config: Config, steps: Steps) -> dict[str, Any]:
    """Measure trimtab's steps, as `trimtab train` runs them."""
    forget(pick_device(config.run.device))
    set_threads(config)
    trainer, progress, measured = build_trainer(config), RunProgress(), Measurements(steps)
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
            measured.seconds.append(time.perf_counter() - start)
            measured.tokens.append(int(metrics["tokens/count"]))
            measured.rewards.append(metrics["reward/mean"])
            tidy()
    return measured.figures(watch)


def never_end(trainer: Trainer) -> None:
    """Make a token outside the vocabulary the only end-of-text token."""
    policy = trainer.policy
    if policy.tokenizer.pad_token_id is None:
        policy.tokenizer.pad_token = policy.tokenizer.eos_token
    # A cached property keeps its value in vars().
    vars(policy)["eos_token_ids"] = frozenset({int(policy.causal_lm.config.vocab_size)})
    trainer.sampler = build_sampler(policy, trainer.config.rollout)


@contextmanager
def watching(trainer: Trainer, watch: Stopwatch) -> Iterator[None]:
    """Time every phase of a step of trimtab."""
    functions: list[tuple[Any, str, str]] = [
        (rollouts, "set_verdicts", "grade"),
        (scoring, "score_responses", "score"),
        (Objective, "plan", "plan"),
        (loop, "update", "forward and backward"),
        (torch.nn.utils, "clip_grad_norm_", "optimizer"),
        (trainer.optimizer, "step", "optimizer"),
        (loop, "step_metrics", "metrics"),
    ]
    with ExitStack() as stack:
        for owner, name, phase in functions:
            stack.enter_context(patch.object(owner, name, watch.around(getattr(owner, name), phase)))
        stack.enter_context(patch.object(trainer, "sampler", Watched(trainer.sampler, watch)))
        stack.enter_context(watch.phase(REST))
        yield


def problems_of(config: Config, steps: int) -> list[Problem]:
    """Return the problems of the first steps, in the order of trimtab's run."""
    task = build_task(config, "train")
    assert task is not None
    return [task[problem_index(len(task), config.run.seed, n)] for n in range(steps * config.rollout.prompts)]


def peer_model(config: Config) -> tuple[Any, Any]:
    """Load the same weights and tokenizer by transformers."""
    if config.model.path == "demo":
        return demo_model(config.run.seed), demo_tokenizer()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(smollm2_folder()) if config.model.path == "smollm2" else config.model.path
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
    )
    return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def peer_options(config: Config, steps: Steps, rows: int) -> dict[str, Any]:
    """Return GRPOTrainer's settings: as trimtab's, without logs and checkpoints, nothing recomputed to save memory."""
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


def theirs(config: Config, steps: Steps, rows: int, vllm: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Measure TRL's steps with `rows` completions per forward pass; `vllm` are arguments of `vllm_options`."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    measured, watch = Measurements(steps), Stopwatch(pick_device(config.run.device), on=False)
    problems = problems_of(config, steps.all)
    model, tokenizer = peer_model(config)
    chat = config.model.chat and tokenizer.chat_template
    prompts = [list(p.prompt) if chat else "\n".join(message["content"] for message in p.prompt) for p in problems]
    with tempfile.TemporaryDirectory() as folder:
        options = peer_options(config, steps, rows)
        if vllm is not None:
            options |= vllm_options(config.rollout, steps.fixed, **vllm)
            bf16_copy(model, tokenizer, Path(folder) / "bf16")
        trainer = GRPOTrainer(
            model=model,
            args=GRPOConfig(output_dir=folder, **options),
            processing_class=tokenizer,
            reward_funcs=grader(config, problems, measured),
            train_dataset=Dataset.from_dict({"prompt": prompts, "number": list(range(len(prompts)))}),
            callbacks=[step_clock(measured, watch)],
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
    gigabytes = torch.cuda.max_memory_reserved() / 1e9 if torch.cuda.is_available() else None
    return {**measured.figures(watch), "peak_gigabytes": gigabytes, "options": options}


def grader(config: Config, problems: Sequence[Problem], measured: Measurements) -> Callable[..., list[float | None]]:
    """Return trimtab's grader as TRL's reward function, which also counts tokens."""

    def reward(completions: list[Any], completion_ids: list[list[int]], number: list[int], **_: Any) -> Any:
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        verdicts = grade_many(zip(texts, (problems[n] for n in number), strict=True))
        rewards = [config.reward.of(verdict.kind) for verdict in verdicts]
        measured.tokens.append(sum(len(ids) for ids in completion_ids))
        measured.rewards.append(sum(given or 0.0 for given in rewards) / len(rewards))
        return rewards

    return reward


def step_clock(measured: Measurements, watch: Stopwatch) -> Any:
    """Return a callback that times steps, each from the end of the one before to its own end."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Times steps, and the phases that have no method to wrap."""

        since = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            """Start the first step."""
            self.since = time.perf_counter()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            """Start timing the optimizer."""
            watch.start("optimizer")

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            """Stop timing the optimizer."""
            watch.stop()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """Store the step's seconds and start the next one; time phases after the timed steps."""
            watch.stop()
            settle(watch.device)
            now = time.perf_counter()
            measured.seconds.append(now - self.since)
            print(f"TRL: {measured.seconds[-1]:.1f} s, {measured.tokens[-1]} tokens", flush=True)
            self.since = now
            watch.on = len(measured.seconds) >= measured.steps.warmup + measured.steps.timed
            watch.start(REST)

    return Clock()


def try_peer(
    config: Config, steps: Steps, rows: Sequence[int], vllm: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Measure TRL with as many rows per pass as fit; a failure is part of the result."""
    device = pick_device(config.run.device)
    for many in rows:
        forget(device)
        try:
            return theirs(config, steps, many, vllm)
        except torch.OutOfMemoryError:
            print(f"TRL: {many} rows at once do not fit")
        except Exception as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    return {"error": f"out of memory at {rows[-1]} rows at once"}


def compare(config: Config, args: argparse.Namespace, fixed: bool) -> Iterator[dict[str, Any]]:
    """Measure trimtab, then TRL; yield the result so far after each."""
    watched, threads = int(args.phases or not fixed), torch.get_num_threads()
    result: dict[str, Any] = {"trimtab": ours(config, Steps(args.warmup, args.steps, 3 * watched, fixed))}
    torch.set_num_threads(threads)
    yield result
    steps = Steps(args.peer_warmup, args.peer_steps, watched, fixed)
    for name in args.peer:
        vllm = {"memory": args.vllm_memory, "sleep": VLLM_PEERS[name]} if name in VLLM_PEERS else None
        result[name] = try_peer(config, steps, args.rows, vllm)
        if "error" not in result[name]:
            faster = times_faster(result["trimtab"], result[name])
            result["times_faster" if name == "trl" else f"times_faster than {name}"] = faster
        yield result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peer", nargs="*", choices=["trl", *VLLM_PEERS, "none"], default=["trl"])
    parser.add_argument("--shape", choices=["135M", "1.7B"], help="random weights in this shape instead of SmolLM2")
    parser.add_argument("--vllm-memory", type=float, default=0.25, help="share of the GPU's memory for vLLM")
    parser.add_argument("--phases", action="store_true", help="time the phases of steps with fixed lengths too")
    parser.add_argument("--peers", type=Path, help="a folder with the unpacked wheels of trl and what it needs")
    parser.add_argument("--small", action="store_true", help="the demo model on a CPU, to try the script")
    parser.add_argument("--only", choices=["free", "fixed"])
    parser.add_argument("--steps", type=int, default=9, help="timed steps of trimtab")
    parser.add_argument("--warmup", type=int, default=3, help="warm-up steps of trimtab")
    parser.add_argument("--peer-steps", type=int, default=3)
    parser.add_argument("--peer-warmup", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", help="TRL's completions in one pass; the first that fits")
    parser.add_argument("--set", action="append", default=[], help="overrides of recipe keys, for both")
    args = parser.parse_args(arguments)
    args.rows = args.rows or ([8] if args.small else [128, 64, 32])
    args.peer = [name for name in args.peer if name != "none"]
    if args.peer:
        os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    if args.peers:
        sys.path.insert(0, str(args.peers))
    with tempfile.TemporaryDirectory() as folder:
        made = []
        if args.shape:
            device = torch.device("cpu" if args.small else "cuda")
            made = [f"model.path={save_made_model(args.shape, Path(folder), device, args.small)}"]
            forget(device)
        recipe, settings = ("addition", SMALL) if args.small else ("smollm2", FULL)
        config = load(recipe, [*settings, *made, *args.set])
        measure(config, args)


def measure(config: Config, args: argparse.Namespace) -> None:
    """Measure and write what is known after each part."""
    many, limit = config.rollout.prompts * config.rollout.samples, config.rollout.max_new_tokens
    model = f"with random weights in the shape {args.shape}" if args.shape else config.model.path
    result = about(
        f"a whole step of GRPO, model {model}, {many} responses of up to {limit} tokens; medians of steps; "
        "free: responses end where they end; fixed: every response has its full length",
        pick_device(config.run.device),
        "trl",
        "vllm",
    )
    result["config"] = config.model_dump(include={"task", "model", "rollout", "update"})
    for name in [args.only] if args.only else ["free", "fixed"]:
        for known in compare(config, args, name == "fixed"):
            result[name] = known
            save(result, args.out)
            print(name, known)


if __name__ == "__main__":
    main()
