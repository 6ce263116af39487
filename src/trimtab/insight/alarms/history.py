"""A run's metrics so far and robust statistics over them: medians, which a single outlier does not move."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

MAD_TO_DEVIATION = 1.4826  # from the median absolute deviation to the standard deviation of a normal distribution
NOISE_WINDOW = 50  # values over which noise is measured


@dataclass
class History:
    """Every finite value of every metric with its step; `peaks` caches `best`."""

    series: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)
    peaks: dict[tuple[str, int], tuple[int, float]] = field(default_factory=dict)

    def add(self, record: Mapping[str, float]) -> int:
        """Add a record of metrics and return its step."""
        step = int(record["step"])
        for name, value in record.items():
            # A single NaN would make every median after it NaN.
            if isinstance(value, int | float) and math.isfinite(value):
                steps, values = self.series.setdefault(name, ([], []))
                steps.append(step)
                values.append(float(value))
        return step

    def steps(self, name: str) -> list[int]:
        """Return the steps that have a value of a metric."""
        return self.series.get(name, ([], []))[0]

    def values(self, name: str) -> list[float]:
        """Return all values of a metric, in order."""
        return self.series.get(name, ([], []))[1]

    def last(self, name: str, count: int) -> list[float]:
        """Return the newest `count` values; an empty list if there are fewer."""
        values = self.values(name)
        return values[-count:] if len(values) >= count else []

    def best(self, name: str, recent: int) -> float:
        """Return the largest median over any window of `recent` values."""
        values = self.values(name)
        # Called after every step: only windows that are new since the last call are looked at.
        done, best = self.peaks.get((name, recent), (recent - 1, -math.inf))
        for end in range(done + 1, len(values) + 1):
            best = max(best, median(values[end - recent : end]))
        self.peaks[name, recent] = max(done, len(values)), best
        return best

    def noise(self, name: str) -> float:
        """Return the standard deviation of a metric's step-to-step noise."""
        values = self.values(name)[-NOISE_WINDOW:]
        # From differences of neighbours, so that a slow trend does not count as noise.
        changes = [abs(later - earlier) for earlier, later in pairwise(values)]
        return MAD_TO_DEVIATION * median(changes) / math.sqrt(2) if changes else 0.0


def spread(values: list[float]) -> float:
    """Return the median absolute deviation, scaled to a standard deviation."""
    centre = median(values)
    return MAD_TO_DEVIATION * median([abs(value - centre) for value in values])


def slope(values: list[float]) -> float:
    """Return the trend per step: the median slope over pairs half a window apart (a Theil-Sen estimator)."""
    # Pairs half a window apart: as robust as all pairs, in linear time.
    half = len(values) // 2
    return median([(later - earlier) / half for earlier, later in zip(values, values[half:], strict=False)])
