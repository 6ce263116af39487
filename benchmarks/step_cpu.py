"""CPU seconds of a whole RL step of a tiny model, trimtab's beside TRL's: same model, prompts, grader, machine.

Python, the tokenizer and many small operations decide here, not the size of matrices. The demo model samples 256 short
responses on one thread. Rewards differ by length, so that every step has gradients; the learning rate is so small that
lengths stay. Every contender has a process of its own, and they take turns of a few steps each, so that what else the
machine does meets all of them alike.

`--before` is a checkout of an earlier version, which takes turns with the others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from result_file import about, save
from step import PHASES, Steps, peer_model, peer_options, problems_of, watching
from stopwatch import Stopwatch, shares, spread
from trimtab.data import Response
from trimtab.grading import grade_many
from trimtab.trainer.config import Config, load
from trimtab.trainer.train.loop import scheduled_step
from trimtab.trainer.train.recording import start_recording
from trimtab.trainer.train.rewards import reward_of
from trimtab.trainer.train.trainer import RunProgress, Trainer, build_trainer, gc_pause, keep_freed_memory, set_threads

SETTINGS = [
    "objective.name=grpo", "update.per_step=1", "update.warmup_steps=0", "update.lr=1e-7", "task.digits=4",
    "rollout.max_new_tokens=9", "reward.overlong_buffer=9", "run.device=cpu", "run.threads=1",
]  # fmt: skip
RECORDED, UNRECORDED = ["record.enabled=true"], ["record.enabled=false"]
SAMPLED, SHARED = ["update.old_stats=sampled"], ["update.old_stats=sampled", "update.shared_prompts=true"]
# What each contender adds to the settings.
CONTENDERS = {
    "before": UNRECORDED,
    "trl": UNRECORDED,
    "scored": UNRECORDED,
    "sampled": UNRECORDED + SAMPLED,
    "sampled, shared prompts": UNRECORDED + SHARED,
    "scored, recorded": RECORDED,
    "sampled, shared prompts, recorded": RECORDED + SHARED,
}
WATCHED = 10  # steps with timed phases, after all others
MARK = "@turn "  # before what a contender says to the parent


def ours(config: Config, turns: int, steps: int) -> dict[str, Any]:
    """Take trimtab's steps in turns; return the digest of the weights, and the phases of further steps."""
    set_threads(config)
    keep_freed_memory()
    trainer, progress, watch = build_trainer(config), RunProgress(), Stopwatch(torch.device("cpu"), cpu=True)
    with tempfile.TemporaryDirectory() as folder, gc_pause() as freeze_once:
        if config.record.enabled:
            trainer.recorder = start_recording(trainer, Path(folder), 0, warn=print, kept=())
        for _ in range(turns):
            wait()
            seconds, tokens = [], []
            for _ in range(steps):
                start = time.process_time()
                metrics = scheduled_step(trainer, progress).metrics
                freeze_once()
                seconds.append(time.process_time() - start)
                tokens.append(metrics["tokens/count"])
            say({"seconds": seconds, "tokens": tokens})
        weights = b"".join(p.detach().numpy().tobytes() for p in trainer.policy.model.parameters())
        for _ in range(WATCHED):
            with watching_backward(trainer, watch):
                scheduled_step(trainer, progress)
        if trainer.recorder is not None:
            trainer.recorder.close()
    phases = [name.replace("forward and backward", "forward") for name in PHASES]
    where = {name: share["ms"] for name, share in shares(watch.seconds, WATCHED, [*phases, "backward"]).items()}
    return {"weights_sha256": hashlib.sha256(weights).hexdigest(), "ms_by_phase": where}


@contextmanager
def watching_backward(trainer: Trainer, watch: Stopwatch) -> Iterator[None]:
    """Time the phases of a step, the backward pass by itself."""
    backward = watch.around(torch.Tensor.backward, "backward")
    with watching(trainer, watch), patch.object(torch.Tensor, "backward", backward):
        yield
    watch.seconds["forward"] = watch.seconds.get("forward", 0.0) + watch.seconds.pop("forward and backward")


def theirs(config: Config, turns: int, steps: int) -> dict[str, Any]:
    """Take TRL's steps in turns; return its settings."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(config.run.threads)
    problems, (model, tokenizer) = problems_of(config, turns * steps), peer_model(config)
    tokens: list[int] = []

    def reward(completions: list[str], completion_ids: list[list[int]], number: list[int], **_: Any) -> list[Any]:
        verdicts = grade_many(zip(completions, (problems[n] for n in number), strict=True))
        tokens.append(sum(map(len, completion_ids)))
        limit = config.rollout.max_new_tokens
        graded = zip(verdicts, completion_ids, strict=True)
        return [reward_of(verdict, Response(ids, [], True), config.reward, limit) for verdict, ids in graded]

    class Turns(TrainerCallback):
        """Measures steps, each from the end of the one before, and waits between turns."""

        seconds: list[float] = []  # noqa: RUF012
        since = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            """Wait for the first turn."""
            wait()
            self.since = time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """Store the step's seconds; after the last of a turn, wait for the next turn."""
            self.seconds.append(time.process_time() - self.since)
            if len(self.seconds) % steps == 0:
                say({"seconds": self.seconds[-steps:], "tokens": tokens[-steps:]})
                if len(self.seconds) < turns * steps:
                    wait()
            self.since = time.process_time()

    rows = config.rollout.prompts * config.rollout.samples
    with tempfile.TemporaryDirectory() as folder:
        options = peer_options(config, Steps(0, turns * steps, 0, fixed=False), rows)
        prompts = ["\n".join(message["content"] for message in problem.prompt) for problem in problems]
        GRPOTrainer(
            model=model,
            args=GRPOConfig(output_dir=folder, **options),
            processing_class=tokenizer,
            reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": prompts, "number": list(range(len(prompts)))}),
            callbacks=[Turns()],
        ).train()
    return {"options": options}


def wait() -> None:
    """Wait for one's turn."""
    if not sys.stdin.readline():
        sys.exit("the parent has ended")


def say(message: dict[str, Any]) -> None:
    """Tell the parent."""
    print(MARK + json.dumps(message), flush=True)


def measure(names: list[str], args: argparse.Namespace) -> Iterator[dict[str, dict[str, Any]]]:
    """Let contenders take turns; yield their figures after each round, and at the end what they say of themselves."""
    children = {name: start(name, args) for name in names}
    seconds: dict[str, list[list[float]]] = {name: [] for name in names}
    tokens: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(args.turns):
        for name, child in children.items():
            said = answer(child, "go\n")
            if turn:  # the first turn warms up
                seconds[name].append(said["seconds"])
                tokens[name] += said["tokens"]
        if turn:
            yield {name: figures(seconds[name], tokens[name]) for name in names}
    yield {name: figures(seconds[name], tokens[name]) | answer(child, "") for name, child in children.items()}


def start(name: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    """Start the process of a contender."""
    source = (args.before if name == "before" else Path(__file__).parents[1]) / "src"
    environment = os.environ | {
        "PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    command = [sys.executable, __file__, "--contender", name, "--turns", str(args.turns), "--steps", str(args.steps)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def answer(child: subprocess.Popen[str], request: str) -> dict[str, Any]:
    """Send a request to a contender and return what it says next."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(request)
    child.stdin.flush()
    for line in child.stdout:
        if line.startswith(MARK):
            said: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return said
    raise SystemExit(f"a contender has ended: {child.args!r}")


def figures(turns: list[list[float]], tokens: list[float]) -> dict[str, Any]:
    """Return the medians over all steps, how far they lie apart, and the median of every turn."""
    every = [seconds for turn in turns for seconds in turn]
    return {
        "cpu_seconds_per_step": round(median(every), 4),
        "least": round(min(every), 4),
        "spread": round(spread(every), 4),
        "steps": len(every),
        "tokens": round(median(tokens)),
        "by_turn": [round(median(turn), 4) for turn in turns],
    }


def compare(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return every contender's CPU seconds as a share of TRL's, by the median and by the least; and equal results."""
    result: dict[str, Any] = {}
    for key in ("cpu_seconds_per_step", "least"):
        if "trl" in found:
            result[f"{key}, share of TRL's"] = {n: round(f[key] / found["trl"][key], 3) for n, f in found.items()}
    digests = {name: each["weights_sha256"] for name, each in found.items() if "weights_sha256" in each}
    if "before" in digests:
        result["weights equal to before's, bit by bit"] = {n: d == digests["before"] for n, d in digests.items()}
    return result


def main() -> None:
    """Measure and write; with `--contender` be one of those that are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", type=int, default=9, help="turns of each contender; the first warms up")
    parser.add_argument("--steps", type=int, default=8, help="steps of a turn")
    parser.add_argument("--before", type=Path, help="a checkout of an earlier version")
    parser.add_argument("--without-trl", action="store_true")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        run: Callable[..., dict[str, Any]] = theirs if args.contender == "trl" else ours
        say(run(load("addition", [*SETTINGS, *CONTENDERS[args.contender]]), args.turns, args.steps))
        return
    left_out = {"trl"} if args.without_trl else set()
    names = [name for name in CONTENDERS if name not in left_out and (name != "before" or args.before)]
    torch.set_num_threads(1)
    config = load("addition", SETTINGS)
    result = about(
        f"CPU seconds of a step of GRPO, demo model, {config.rollout.prompts * config.rollout.samples} responses of up "
        f"to {config.rollout.max_new_tokens} tokens, one thread; contenders take turns; medians of steps",
        torch.device("cpu"),
        "trl",
    )
    result["settings"] = {name: [*SETTINGS, *CONTENDERS[name]] for name in names}
    if args.before:
        git = ["git", "-C", str(args.before), "rev-parse", "--short", "HEAD"]
        result["before"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    for found in measure(names, args):
        result |= {"contenders": found, **compare(found)}
        if args.out:
            save(result, args.out)
        print({name: each["cpu_seconds_per_step"] for name, each in found.items()}, flush=True)


if __name__ == "__main__":
    main()
