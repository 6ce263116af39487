"""Soak test: train tiny steps for a long time, and measure from outside whether anything grows with their number.

A child `trimtab train` runs the demo's model with the recorder, alarms, evaluations and checkpoints on. Its resident
memory, descriptors, threads and children are sampled from /proc, and its step times are read from its metrics. Slopes
are per step, after a warm-up, by the median over pairs of samples half the time apart.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from result_file import about, save
from trimtab.files import read_json_lines
from trimtab.record import last_step

# Steps as small as they can be while everything is at work: 16 responses of at most 4 tokens, graded, scored, recorded.
SETTINGS = (
    "task.digits=1",
    "rollout.prompts=4",
    "rollout.samples=4",
    "rollout.max_new_tokens=4",
    "reward.overlong_buffer=4",
    "update.per_step=1",
    "update.lr=1e-7",  # the policy stays as it is, and so every step has mixed rewards to learn from
    "warm_start.steps=20",
    "warm_start.eval_every=20",
    "warm_start.cache=false",
    "run.steps=10000000",
    "run.patience=0",
    "run.eval_every=200",
    "run.eval_problems=16",
    "run.checkpoint_every=100",
    "run.report=false",
    "record.max_megabytes=20",
)
EVERY = 1.0  # seconds between samples
SHOWN = 60  # samples that the result keeps


@dataclass(frozen=True)
class Sample:
    """The process at one moment; memory in KiB."""

    seconds: float
    step: int
    resident_kib: int
    anonymous_kib: int
    descriptors: int
    threads: int
    children: int
    folder_kib: int
    cpu_seconds: float


def sample(process: int, folder: Path, began: float) -> Sample | None:
    """Look at a process and its run's folder; None if the process has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        tasks = list(Path(f"/proc/{process}/task").iterdir())
        children = [child for task in tasks for child in (task / "children").read_text().split()]
        descriptors = len(os.listdir(f"/proc/{process}/fd"))
        resident, anonymous = int(status["VmRSS"][0]), int(status["RssAnon"][0])
        ticks = (
            Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
        )  # in user mode, in the kernel
    except (OSError, KeyError):  # a process that has ended has no files, or no memory, here
        return None
    step = last_step(folder / "metrics.jsonl")
    return Sample(
        round(time.monotonic() - began, 2),
        step,
        resident,
        anonymous,
        descriptors,
        len(tasks),
        len(children),
        disk_kib(folder / "tokens"),
        sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"),
    )


def disk_kib(folder: Path) -> int:
    """Return what a folder takes on the disk, in KiB; files may go while they are counted."""
    blocks = 0
    for path, _, names in os.walk(folder):
        for name in (".", *names):
            try:
                blocks += os.lstat(os.path.join(path, name)).st_blocks
            except FileNotFoundError:
                continue
    return blocks // 2


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the rise of y per unit of x: the median over pairs half of the samples apart (a Theil-Sen estimator)."""
    half = len(x) // 2
    pairs = zip(x, x[half:], y, y[half:], strict=False)
    return median([(y2 - y1) / (x2 - x1) for x1, x2, y1, y2 in pairs if x2 > x1])


def soak(folder: Path, minutes: float, settings: Sequence[str]) -> tuple[list[Sample], list[dict[str, Any]], int]:
    """Train for so many minutes, then stop the run; return the samples, the metrics, the exit code."""
    flags = [f"--set={setting}" for setting in (*SETTINGS, *settings)]
    command = [sys.executable, "-P", "-m", "trimtab", "train", "addition", "--quiet", "--out", str(folder), *flags]
    samples: list[Sample] = []
    began = time.monotonic()
    log = folder.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        while process.poll() is None and time.monotonic() - began < 60 * minutes:
            time.sleep(EVERY)
            if (found := sample(process.pid, folder, began)) is not None:
                samples.append(found)
        if process.poll() is not None:
            raise SystemExit(f"the run ended by itself, exit code {process.returncode}\n{log.read_text()[-2000:]}")
        process.terminate()  # not SIGINT, which is ignored if this script runs in the background of a shell
        code = process.wait(timeout=300)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return samples, read_json_lines(folder / "metrics.jsonl"), code


def figures(samples: Sequence[Sample], metrics: Sequence[dict[str, Any]], warm_up: float) -> dict[str, Any]:
    """Return slopes and ranges over the samples after the warm-up, which is a share of the time."""
    late = [s for s in samples if s.step > 0 and s.seconds >= warm_up * samples[-1].seconds]
    steps = [s.step for s in late]
    timed = [record for record in metrics if "time/tokens_per_second" in record and steps[0] <= record["step"]]
    seconds = [record["tokens/count"] / record["time/tokens_per_second"] for record in timed]
    tenth = max(1, len(seconds) // 10)
    ends = late[: max(2, len(late) // 10)], late[-max(2, len(late) // 10) :]
    # Processor time, because the time of a step depends on what else the machine does.
    cpu = [(end[-1].cpu_seconds - end[0].cpu_seconds) / max(1, end[-1].step - end[0].step) for end in ends]
    growth = {name: round(1024 * slope(steps, [getattr(s, name) for s in late])) for name in MEMORY}
    ranges = {name: [min(values), max(values)] for name in FLAT if (values := [getattr(s, name) for s in late])}
    return {
        "steps": metrics[-1]["step"],
        "seconds": samples[-1].seconds,
        "steps_measured": steps[-1] - steps[0],
        "bytes_per_step": growth,
        "least_and_most": ranges,
        "step_ms": round(1e3 * median(seconds), 2),
        "step_ms_first_tenth": round(1e3 * median(seconds[:tenth]), 2),
        "step_ms_last_tenth": round(1e3 * median(seconds[-tenth:]), 2),
        "cpu_ms_per_step_first_tenth": round(1e3 * cpu[0], 2),
        "cpu_ms_per_step_last_tenth": round(1e3 * cpu[1], 2),
    }


MEMORY = ("resident_kib", "anonymous_kib")
FLAT = ("descriptors", "threads", "children", "folder_kib")


def main() -> None:
    """Soak, print the figures, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warm-up", type=float, default=0.2, help="share of the time that slopes leave out")
    parser.add_argument("--set", action="append", default=[], help="passed on to trimtab train")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # the child ends with this script
    with tempfile.TemporaryDirectory(prefix="trimtab-soak-") as folder:
        samples, metrics, code = soak(Path(folder) / "run", options.minutes, options.set)
    result = {
        **about("tiny training steps for a long time: what grows with their number", torch.device("cpu"), "pyarrow"),
        "settings": [*SETTINGS, *options.set],
        "exit_code": code,
        "figures": figures(samples, metrics, options.warm_up),
        "samples": [asdict(s) for s in samples[:: max(1, len(samples) // SHOWN)]],
    }
    for name, value in result["figures"].items():
        print(f"{name}: {value}")
    if options.out:
        save(result, options.out)


if __name__ == "__main__":
    main()
