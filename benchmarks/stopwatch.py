"""What the benchmarks of a whole step share: a stopwatch for phases, and the arithmetic of their figures."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

REST = "everything else"


def settle(device: torch.device) -> None:
    """Wait until the GPU has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """How long a call takes, the GPU's work included."""
    settle(device)
    start = time.perf_counter()
    run()
    settle(device)
    return time.perf_counter() - start


def forget(device: torch.device) -> None:
    """Give back the memory of what is no longer used."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass
class Stopwatch:
    """Seconds by phase. A phase within another stops the outer one's clock, so every second counts once.

    It waits for the GPU at every change of phase; while it is not `on` it does nothing at all.
    """

    device: torch.device
    on: bool = True
    seconds: dict[str, float] = field(default_factory=dict)
    cpu: bool = False  # CPU seconds of this process, not of the clock
    _open: list[str] = field(default_factory=list)
    _since: float = 0.0

    def start(self, name: str) -> None:
        """Enter a phase."""
        if self.on:
            self._count()
            self._open.append(name)

    def stop(self) -> None:
        """Leave the phase entered last."""
        if self.on and self._open:
            self._count()
            self._open.pop()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase around a block."""
        self.start(name)
        try:
            yield
        finally:
            self.stop()

    def around(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The function as a phase."""

        def timed(*args: Any, **options: Any) -> Any:
            with self.phase(name):
                return function(*args, **options)

        return timed

    def _count(self) -> None:
        settle(self.device)
        now = time.process_time() if self.cpu else time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now


def shares(seconds: Mapping[str, float], steps: int, order: Sequence[str]) -> dict[str, dict[str, float]]:
    """Where the time of a step goes: milliseconds and share of every phase, the phases in order."""
    whole = sum(seconds.values())
    return {
        name: {
            "ms": round(1e3 * seconds.get(name, 0.0) / steps, 2),
            "share": round(seconds.get(name, 0.0) / whole, 4) if whole else 0.0,
        }
        for name in (*order, *(name for name in seconds if name not in order))
    }


def per_step(seconds: Sequence[float], tokens: Sequence[int]) -> dict[str, Any]:
    """The figures of timed steps: medians, and how far the steps lie apart."""
    rates = [1e3 * s / t for s, t in zip(seconds, tokens, strict=True)]
    return {
        "steps": len(seconds),
        "seconds": round(median(seconds), 4),
        "spread": round(spread(seconds), 4),
        "tokens": round(median(tokens)),
        "seconds_per_1000_tokens": round(median(rates), 6),
        "tokens_per_second": round(1e3 / median(rates)),
        "all_seconds": [round(s, 4) for s in seconds],
    }


def times_faster(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float]:
    """How many times the peer's time is ours: by the step, and by the token where steps differ in length."""
    keys = {"step": "seconds", "token": "seconds_per_1000_tokens"}
    return {name: round(theirs[key] / ours[key], 2) for name, key in keys.items()}


def spread(values: Sequence[float]) -> float:
    """Median distance from the median, as a share of it."""
    middle = median(values)
    return median([abs(value - middle) for value in values]) / middle
