"""What a GPU does while something runs: the time of its kernels by kind, its clock and its power."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from shutil import which
from statistics import median
from typing import Any

import torch

GEMM = ("gemm", "nvjet", "cutlass", "splitk", "cublas")  # in the names of kernels
FIGURES = "--query-gpu=clocks.sm,power.draw,power.limit"
QUERY = ("nvidia-smi", "-i", "0", FIGURES, "--format=csv,noheader,nounits", "-lms", "50")


def kernel_times(run: Callable[[], object], kinds: Mapping[str, str]) -> dict[str, float]:
    """Return milliseconds by kind of kernel; `kinds` names the kind of kernels by a part of their name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    found: dict[str, float] = defaultdict(float)
    for event in trace.key_averages():
        kind = next((kind for part, kind in kinds.items() if part in event.key), "")
        gemm = any(part in event.key.lower() for part in GEMM)
        found[kind or ("GEMM" if gemm else event.key[:60])] += event.self_device_time_total / 1000
    return {kind: round(ms, 4) for kind, ms in sorted(found.items(), key=lambda pair: -pair[1]) if ms}


@contextmanager
def clock_and_power(into: dict[str, Any]) -> Iterator[None]:
    """Put the GPU's median clock (MHz) and power (W) meanwhile into a dictionary; nothing where there is no driver."""
    if which(QUERY[0]) is None:
        yield
        return
    process = subprocess.Popen(QUERY, stdout=subprocess.PIPE, text=True)
    try:
        yield
    finally:
        process.terminate()
        lines = process.communicate()[0].splitlines()
        # A figure that the driver does not have is "[N/A]", and the last line may be cut.
        whole = [line for line in lines if line.count(",") == 2 and "[" not in line]
        rows = [[float(cell) for cell in line.split(",")] for line in whole]
        if rows:
            names = ("clock_mhz", "power_watts", "power_limit_watts")
            into.update(zip(names, (median(column) for column in zip(*rows, strict=True)), strict=True))
