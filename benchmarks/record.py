"""Measure what the flight recorder costs and how fast its records are replayed.

Bytes per token and the added step time on addition (blocks of steps with and without recording in one run, medians),
and tokens per second through four objectives on a synthetic record of realistic size. `--out` writes the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from result_file import CPU, about, save
from trimtab.insight.replay import replay
from trimtab.record import (
    Manifest,
    Records,
    RecordSettings,
    RecordWriter,
    StepData,
    StepInfo,
    UpdateInfo,
    Vocabulary,
    open_run,
)
from trimtab.record.layout import step_folder
from trimtab.trainer.config import load
from trimtab.trainer.train.loop import train_step
from trimtab.trainer.train.reporting import Reporter
from trimtab.trainer.train.run import Run
from trimtab.trainer.train.run_folder import RunFolder

OBJECTIVES = ("grpo", "stapo", "stare", "sspo")
BLOCK, BLOCKS = 20, 10  # steps with recording, then as many without, and so on


class Silent(Reporter):
    """A reporter that only prints warnings."""

    def message(self, text: str) -> None:
        """Print what is wrong."""
        print(text)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step: wall time, CPU time of the training thread, CPU time of all threads."""

    wall: float
    training: float
    all: float


def size_of_steps(records: Records) -> int:
    """Return the bytes of the files of all recorded steps."""
    folders = [step_folder(records.folder, n) for n in records.steps]
    return sum(file.stat().st_size for folder in folders for file in folder.iterdir())


def demo(folder: Path) -> dict[str, Any]:
    """Run some steps of addition: bytes per token, and the time that recording adds to a step."""
    settings = [f"run.steps={BLOCK * BLOCKS * 2}", "run.eval_every=0", "run.checkpoint_every=0"]
    run = Run(load("addition", settings), RunFolder(folder), Silent())
    trainer = run.prepare()
    recorder, spent = trainer.recorder, {True: list[StepTime](), False: list[StepTime]()}
    assert recorder is not None
    for step in run.steps():
        on = step // BLOCK % 2 == 0
        if step % BLOCK == 0:
            recorder.flush()
        trainer.recorder = recorder if on else None
        trainer.set_learning_rate(step)
        before = time.perf_counter(), time.thread_time(), time.process_time()
        result = train_step(trainer, run.progress)
        after = time.perf_counter(), time.thread_time(), time.process_time()
        spent[on].append(StepTime(*(b - a for a, b in zip(before, after, strict=True))))
        run.finish_step(result)
    recorder.close()
    records = open_run(folder)
    size = size_of_steps(records)
    tokens = sum(step.info.tokens for step in records)
    return {
        "steps_recorded": len(records),
        "tokens_per_step": round(tokens / len(records)),
        "bytes_per_token": round(size / tokens, 2),
        "step_ms_with": round(1e3 * _median(spent[True], "wall"), 2),
        "step_ms_without": round(1e3 * _median(spent[False], "wall"), 2),
        "overhead_share": _added(spent, "wall"),
        "training_thread_cpu_share": _added(spent, "training"),
        "all_threads_cpu_share": _added(spent, "all"),
    }


def _median(spent: Sequence[StepTime], what: str) -> float:
    return float(median(getattr(one, what) for one in spent))


def _added(spent: Mapping[bool, Sequence[StepTime]], what: str) -> float:
    return round(_median(spent[True], what) / _median(spent[False], what) - 1, 4)


def made_step(step: int, responses: int, length: int, updates: int, seed: int) -> StepData:
    """Make a step like that of a model with 150 thousand token ids: mostly low surprisal, sometimes high."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(length // 2, length * 3 // 2, responses)
    n = int(lengths.sum())
    surprisal = rng.gamma(0.25, 1.2, n).astype(np.float32)
    entropy = (0.9 * surprisal + rng.gamma(0.2, 1.0, n)).astype(np.float32)
    old, p = -surprisal, np.exp(-surprisal)
    reward = rng.integers(0, 2, responses).astype(np.float32)
    centered = reward - reward.reshape(-1, 8).mean(1).repeat(8)
    jitter = rng.normal(0, 0.02, n).astype(np.float32)
    segment = np.concatenate([np.arange(k) // 12 for k in lengths]).astype(np.int32)
    bounds = np.linspace(0, responses, updates + 1).astype(int)
    spans = list(pairwise(bounds.tolist()))
    infos = [
        UpdateInfo(k, int(b - a), int(lengths[a:b].sum()), micro_batches=[int(b - a)]) for k, (a, b) in enumerate(spans)
    ]
    one = np.ones(n, np.float32)
    tokens = {
        "response": np.repeat(np.arange(responses, dtype=np.int32), lengths),
        "token": rng.zipf(1.3, n).clip(max=150_000).astype(np.int32),
        "old_logp": old,
        "new_logp": old + jitter,
        "sampler_logp": old + jitter / 16,
        "entropy": entropy,
        "sum_p2": (p * p + (1 - p) ** 2 / 2).astype(np.float32),
        "sum_p2_logp": (-p * p * surprisal).astype(np.float32),
        "advantage": centered.repeat(lengths),
        "weight": one,
        "scale": one / n,
        "clip_low": one * np.float32(0.2),
        "clip_high": one * np.float32(0.28),
        "clipped": np.abs(jitter) > 0.06,
        "reason": np.zeros(n, np.int16),
        "segment": segment,
    }
    table = {
        "step": [step] * responses, "response": list(range(responses)), "tokens": lengths.astype(np.int32),
        "update": [k for k, (a, b) in enumerate(spans) for _ in range(a, b)],
        "group": [n // 8 for n in range(responses)], "sample": [n % 8 for n in range(responses)], "reward": reward,
        "verdict": ["correct" if r else "wrong" for r in reward], "extracted": [str(n % 100) for n in range(responses)],
        "finished": [True] * responses, "prompt": [f"What is {n // 8} and {n // 8}? " * 10 for n in range(responses)],
        "answer": [str(n // 8) for n in range(responses)], "source": ["made"] * responses,
    }  # fmt: skip
    info = StepInfo(step, responses, n, responses, infos, float(entropy.mean()))
    return StepData(info, tokens, table)


def made_run(folder: Path, steps: int, responses: int, length: int, updates: int) -> None:
    """Write a run folder that holds synthetic records alone."""
    manifest = Manifest({"name": "dapo"}, "group_normalized", RecordSettings())
    vocabulary = Vocabulary([b"a"] * 150_001, [False] * 150_001)
    writer = RecordWriter(folder / "tokens", manifest, vocabulary, print)
    writer.start(0)
    for step in range(1, steps + 1):
        writer.write(step, lambda step=step: made_step(step, responses, length, updates, step))  # type: ignore[misc]
    writer.close()


def replaying(folder: Path, steps: int, rounds: int) -> dict[str, Any]:
    """Replay all objectives together on steps of two updates, a quarter of a million tokens each."""
    made_run(folder, steps, responses=512, length=1024, updates=2)
    records = open_run(folder)
    tokens = sum(step.info.tokens for step in records)
    size = size_of_steps(records)
    replay(folder, OBJECTIVES, last=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, cpu = [], []
    for _ in range(rounds):
        began = time.perf_counter(), time.process_time()
        replay(folder, OBJECTIVES)
        seconds.append(time.perf_counter() - began[0])
        cpu.append(time.process_time() - began[1])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "objectives": list(OBJECTIVES),
        "tokens": tokens,
        "bytes_per_token": round(size / tokens, 2),
        "seconds": [round(s, 3) for s in seconds],
        "tokens_per_second": round(tokens / median(seconds)),
        "tokens_per_second_best": round(tokens / min(seconds)),
        "tokens_per_cpu_second": round(tokens / median(cpu)),
        "peak_memory_grown_mb": round(grown / 1e3, 1),
    }


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=8, help="synthetic steps to replay")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["demo", "replay"])
    options = parser.parse_args()
    what = "the flight recorder: its size, its cost on addition, and replay under four objectives"
    result = about(what, CPU, "pyarrow") | {"machine": f"CPU, {os.cpu_count()} cores, one thread of torch"}
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "demo":
            result["replay"] = replaying(Path(folder) / "made", options.steps, options.rounds)
        if options.only != "replay":
            result["demo"] = demo(Path(folder) / "demo")
    print(json.dumps(result, indent=1))
    if options.out:
        save(result, options.out)


if __name__ == "__main__":
    main()
