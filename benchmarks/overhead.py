"""What STAPO, STARE, SSPO and the flight recorder add to a step of plain GRPO, as shares of the whole step.

Objectives: each round samples once; then every objective takes the whole step on those same responses (graded, scored,
planned, updated at learning rate 0), in an order that rotates. What one adds is the median over rounds of its distance
to GRPO in the same round. GRPO is there twice: the distance between the two is the noise.
Recorder: blocks of whole steps, sampling included, with and without it, over the same prompts and seeds. It writes
while the next step runs, so the first step of a block, during which nothing is written, does not count.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from result_file import about, save
from stopwatch import seconds_of, settle, spread
from trimtab.data import PromptTokens, Response, Sampler, SamplingOptions, Turns
from trimtab.record import Recorder
from trimtab.trainer.config import Config, build_objective, load
from trimtab.trainer.model import pick_device
from trimtab.trainer.train.loop import train_step
from trimtab.trainer.train.recording import start_recording
from trimtab.trainer.train.trainer import RunProgress, Trainer, build_trainer, gc_pause, set_threads

BASE, AGAIN = "grpo", "grpo again"
RECIPES = {"stapo": "stapo-qwen3-1.7b", "stare": "stare-short-7b", "sspo": "sspo-qwen2.5-math-1.5b"}
COMMON = ["objective.name=grpo", "update.per_step=1", "reward.no_answer=-0.5"]  # so that rewards differ within groups
FULL = ["rollout.max_new_tokens=256", "task.digits=1", "task.terms=2", *COMMON]
SMALL = ["rollout.prompts=8", "rollout.samples=4", "rollout.max_new_tokens=8", "run.device=cpu", *COMMON]


@dataclass
class KeepingSampler:
    """A sampler that keeps its last responses and how long they took."""

    sampler: Sampler
    device: torch.device
    responses: list[list[Response]] = field(default_factory=list)
    seconds: float = 0.0

    def sample(
        self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions, turns: Turns | None = None
    ) -> list[list[Response]]:
        """Sample as the wrapped sampler does."""
        start = time.perf_counter()
        self.responses = self.sampler.sample(prompts, step, options, turns)
        settle(self.device)
        self.seconds = time.perf_counter() - start
        return self.responses


@dataclass(frozen=True)
class ReplayingSampler:
    """A sampler that returns responses sampled before."""

    responses: list[list[Response]]

    def sample(
        self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions, turns: Turns | None = None
    ) -> list[list[Response]]:
        """Return the same responses again."""
        return self.responses


def frozen_trainer(config: Config) -> Trainer:
    """Return a trainer with learning rate 0: its updates take their time and change no weight."""
    trainer = build_trainer(config)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.0
    return trainer


def objective_tables() -> dict[str, dict[str, Any]]:
    """Return the objectives as configured in their recipes, GRPO twice."""
    ours = {name: dict(load(recipe).objective) for name, recipe in RECIPES.items()}
    return {BASE: {"name": "grpo"}, AGAIN: {"name": "grpo"}, **ours}


def objectives(trainer: Trainer, rounds: int, settle: Callable[[], None]) -> dict[str, Any]:
    """Measure what every objective adds, over rounds that each sample anew."""
    tables = objective_tables()
    built = {name: build_objective(table) for name, table in tables.items()}
    names, device, progress = list(built), trainer.policy.device, RunProgress()
    keeping = KeepingSampler(trainer.sampler, device)
    spent: dict[str, list[float]] = {name: [] for name in names}
    whole, sampling, mixed, tokens = list[float](), list[float](), list[float](), list[float]()
    for number in range(rounds + 1):  # the first does not count: kernels are compiled
        trainer.sampler, trainer.objective, before = keeping, built[BASE], copy(progress)  # type: ignore[assignment]
        taken, metrics = timed_step(trainer, progress)
        trainer.sampler = ReplayingSampler(keeping.responses)  # type: ignore[assignment]
        for name in rotated(names, number):
            trainer.objective = built[name]
            seconds, _ = timed_step(trainer, copy(before))
            spent[name] += [seconds] if number else []
        settle()
        if number:
            whole.append(taken)
            sampling.append(keeping.seconds)
            mixed.append(metrics["groups/mixed_share"])
            tokens.append(metrics["tokens/count"])
    trainer.sampler, trainer.objective = keeping.sampler, built[BASE]
    return {
        "rounds": rounds,
        "whole_step_seconds": round(median(whole), 4),
        "whole_step_spread": round(spread(whole), 4),
        "sampling_seconds": round(median(sampling), 4),
        "tokens": round(median(tokens)),
        "groups_mixed_share": round(median(mixed), 3),
        "options": tables,
        "added": added(spent, median(whole)),
    }


def added(spent: Mapping[str, Sequence[float]], whole: float) -> dict[str, dict[str, Any]]:
    """Return what each adds to GRPO in the same round: median, spread, and share of the whole step."""
    result = {}
    for name, seconds in spent.items():
        apart = [mine - base for mine, base in zip(seconds, spent[BASE], strict=True)]
        middle = median(apart)
        result[name] = {
            "ms_without_sampling": round(1e3 * median(seconds), 2),
            "ms_added": round(1e3 * middle, 2),
            "ms_added_spread": round(1e3 * median([abs(value - middle) for value in apart]), 2),
            "share_of_step": round(middle / whole, 5),
        }
    return result


def rotated(names: Sequence[str], by: int) -> list[str]:
    """Rotate the names, so that each comes first in turn."""
    by %= len(names)
    return [*names[by:], *names[:by]]


def timed_step(trainer: Trainer, progress: RunProgress) -> tuple[float, dict[str, float]]:
    """Run one step; return its seconds and metrics."""
    metrics: dict[str, float] = {}
    seconds = seconds_of(lambda: metrics.update(train_step(trainer, progress).metrics), trainer.policy.device)
    return seconds, metrics


def recorder(trainer: Trainer, blocks: int, length: int) -> dict[str, Any]:
    """Measure what recording adds to a whole step."""
    with tempfile.TemporaryDirectory() as folder:
        recording = start_recording(trainer, Path(folder), 0, warn=print, kept=())
        assert recording is not None
        progress, on, off, flushed = RunProgress(), list[float](), list[float](), list[float]()
        for number in range(blocks + 1):  # the first does not count
            before = copy(progress)
            for now in (recording, None) if number % 2 else (None, recording):
                progress = copy(before)
                seconds, settled = block(trainer, now, progress, length)
                if number:
                    (off if now is None else on).extend(seconds[1:])
                    flushed += [] if now is None else [settled]
        recording.close()
        written = [file.stat().st_size for file in Path(folder).rglob("tokens.parquet")]
    return {
        "blocks": blocks,
        "steps_written": len(written),
        "kilobytes_per_step": round(median(written) / 1e3, 1),
        **recorded(on, off, flushed),
    }


def recorded(on: Sequence[float], off: Sequence[float], flushed: Sequence[float]) -> dict[str, Any]:
    """Return the recorder's figures from pairs of steps with and without it."""
    apart = [with_it - without for with_it, without in zip(on, off, strict=True)]
    whole, middle = median(off), median(apart)
    return {
        "seconds_with": [round(value, 4) for value in on],
        "seconds_without": [round(value, 4) for value in off],
        "steps": len(on),
        "step_seconds": round(whole, 4),
        "step_spread": round(spread(off), 4),
        "ms_added": round(1e3 * middle, 2),
        "ms_added_spread": round(1e3 * median([abs(value - middle) for value in apart]), 2),
        "share_of_step": round(middle / whole, 5),
        "seconds_to_finish_writing": round(median(flushed), 4),
    }


def block(
    trainer: Trainer, recording: Recorder | None, progress: RunProgress, length: int
) -> tuple[list[float], float]:
    """Run consecutive steps; return the seconds of each, and those to write the rest after the last."""
    trainer.recorder = recording
    seconds = [timed_step(trainer, progress)[0] for _ in range(length)]
    start = time.perf_counter()
    if recording is not None:
        recording.flush()
    trainer.recorder = None
    return seconds, time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="the demo model on a CPU, to try the script")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--blocks", type=int, default=6, help="blocks of steps with, and as many without the recorder")
    parser.add_argument("--length", type=int, default=4, help="steps of a block")
    parser.add_argument("--set", action="append", default=[], help="overrides of recipe keys")
    args = parser.parse_args(arguments)
    config = load("addition", [*SMALL, *args.set]) if args.small else load("smollm2", [*FULL, *args.set])
    set_threads(config)
    many, limit = config.rollout.prompts * config.rollout.samples, config.rollout.max_new_tokens
    result = about(
        f"added to a step of plain GRPO, model {config.model.path}, {many} responses of up to {limit} tokens; medians",
        pick_device(config.run.device),
    )
    result["config"] = config.model_dump(include={"task", "model", "rollout", "update", "reward"})
    trainer = frozen_trainer(config)
    with gc_pause() as settle:  # as in a run
        result["objectives"] = objectives(trainer, args.rounds, settle)
        save(result, args.out)
        print(result["objectives"])
        result["recorder"] = recorder(trainer, args.blocks, args.length)
    save(result, args.out)
    print(result["recorder"])


if __name__ == "__main__":
    main()
