"""A run's metrics so far and robust statistics over them: medians, which a single outlier does not move."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

MAD_TO_DEVIATION = 1.4826  # from the median absolute deviation to the standard deviation of a normal distribution
NOISE_WINDOW = 50  # values over which noise is measured
EDGE = 100  # values kept at the start and at the end of a series: more than any window of a detector


@dataclass
class Series:
    """The values of one metric with their steps: the first and the newest; `count` counts all that there were."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    count: int = 0

    def add(self, step: int, value: float) -> None:
        """Add a value, and drop those in the middle once there are many."""
        self.steps.append(step)
        self.values.append(value)
        self.count += 1
        # Detectors compare the start of a run with now. Everything kept would be 1.4 KB of memory for every step.
        if len(self.values) > 4 * EDGE:
            del self.steps[EDGE:-EDGE], self.values[EDGE:-EDGE]


@dataclass
class History:
    """The first and the newest finite values of every metric; `peaks` caches `best`."""

    series: dict[str, Series] = field(default_factory=dict)
    peaks: dict[tuple[str, int], tuple[int, float]] = field(default_factory=dict)

    def add(self, record: Mapping[str, float]) -> int:
        """Add a record of finite metrics and return its step."""
        step = int(record["step"])
        for name, value in record.items():
            self.series.setdefault(name, Series()).add(step, float(value))
        return step

    def count(self, name: str) -> int:
        """Return how many values a metric has had."""
        return self._of(name).count

    def steps(self, name: str) -> list[int]:
        """Return the steps of `values`."""
        return self._of(name).steps

    def values(self, name: str) -> list[float]:
        """Return the values of a metric, in order; of many, at least the first and the newest `EDGE`."""
        return self._of(name).values

    def last(self, name: str, count: int) -> list[float]:
        """Return the newest `count` values; an empty list if there are fewer."""
        values = self.values(name)
        return values[-count:] if len(values) >= count else []

    def best(self, name: str, recent: int) -> float:
        """Return the largest median over any window of `recent` values; called after every step, it misses none."""
        values, count = self.values(name), self.count(name)
        # Only windows that are new since the last call are looked at, and none that spans a gap in the middle.
        done, best = self.peaks.get((name, recent), (0, -math.inf))
        first = recent if count == len(values) else EDGE + recent
        for end in range(max(first, len(values) - (count - done) + 1), len(values) + 1):
            best = max(best, median(values[end - recent : end]))
        self.peaks[name, recent] = count, best
        return best

    def noise(self, name: str) -> float:
        """Return the standard deviation of a metric's step-to-step noise."""
        values = self.values(name)[-NOISE_WINDOW:]
        # From differences of neighbours, so that a slow trend does not count as noise.
        changes = [abs(later - earlier) for earlier, later in pairwise(values)]
        return MAD_TO_DEVIATION * median(changes) / math.sqrt(2) if changes else 0.0

    def _of(self, name: str) -> Series:
        return self.series.get(name) or Series()


def spread(values: list[float]) -> float:
    """Return the median absolute deviation, scaled to a standard deviation."""
    centre = median(values)
    return MAD_TO_DEVIATION * median([abs(value - centre) for value in values])


def slope(values: list[float]) -> float:
    """Return the trend per step: the median slope over pairs half a window apart (a Theil-Sen estimator)."""
    # Pairs half a window apart: as robust as all pairs, in linear time.
    half = len(values) // 2
    return median([(later - earlier) / half for earlier, later in zip(values, values[half:], strict=False)])
