"""A run's metrics so far, and robust figures over them: medians, which one odd step cannot move."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

MAD_TO_DEVIATION = 1.4826  # of a normal distribution
LATELY = 50  # values that noise is taken over


@dataclass(frozen=True)
class Shift:
    """A metric now and at the run's start, both medians; `spread` is that of the start."""

    metric: str
    now: float
    start: float
    spread: float
    steps: tuple[int, int]
    start_steps: tuple[int, int]

    def sure(self, spreads: float) -> bool:
        """Whether now differs from the start by more than so many spreads."""
        return abs(self.now - self.start) > spreads * self.spread

    @property
    def evidence(self) -> dict[str, Any]:
        """As an alarm shows it."""
        return {
            self.metric: {
                "now": self.now,
                "steps": list(self.steps),
                "start": self.start,
                "start_steps": list(self.start_steps),
                "start_spread": self.spread,
            }
        }


@dataclass
class History:
    """Every finite value of every metric, with its step."""

    series: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)
    peaks: dict[tuple[str, int], tuple[int, float]] = field(default_factory=dict)

    def add(self, record: Mapping[str, float]) -> int:
        """Take in a record; its step."""
        step = int(record["step"])
        for name, value in record.items():
            if isinstance(value, int | float) and math.isfinite(value):
                steps, values = self.series.setdefault(name, ([], []))
                steps.append(step)
                values.append(float(value))
        return step

    def steps(self, name: str) -> list[int]:
        """At which steps a metric was there."""
        return self.series.get(name, ([], []))[0]

    def values(self, name: str) -> list[float]:
        """Every value of a metric, in order."""
        return self.series.get(name, ([], []))[1]

    def last(self, name: str, count: int) -> list[float]:
        """The newest values; none unless there are so many."""
        values = self.values(name)
        return values[-count:] if len(values) >= count else []

    def best(self, name: str, recent: int) -> float:
        """The largest median that a window of so many values has had; what was looked at before is remembered."""
        values = self.values(name)
        done, best = self.peaks.get((name, recent), (recent - 1, -math.inf))
        for end in range(done + 1, len(values) + 1):
            best = max(best, median(values[end - recent : end]))
        self.peaks[name, recent] = max(done, len(values)), best
        return best

    def noise(self, name: str) -> float:
        """How much a metric wanders from one value to the next, as a standard deviation; slow changes count little."""
        values = self.values(name)[-LATELY:]
        steps = [abs(later - earlier) for earlier, later in pairwise(values)]
        return MAD_TO_DEVIATION * median(steps) / math.sqrt(2) if steps else 0.0

    def shift(self, name: str, start: int, recent: int) -> Shift | None:
        """A metric now against its start; None until both are known."""
        steps, values = self.series.get(name, ([], []))
        if len(values) < start + recent:
            return None
        first = values[:start]
        return Shift(
            name,
            median(values[-recent:]),
            median(first),
            spread(first),
            (steps[-recent], steps[-1]),
            (steps[0], steps[start - 1]),
        )


def spread(values: list[float]) -> float:
    """The median deviation from the median, scaled to a standard deviation."""
    centre = median(values)
    return MAD_TO_DEVIATION * median([abs(value - centre) for value in values])


def slope(values: list[float]) -> float:
    """The median of the slopes between the first and the second half (Theil-Sen over half-way pairs), per step."""
    half = len(values) // 2
    return median([(later - earlier) / half for earlier, later in zip(values, values[half:], strict=False)])
