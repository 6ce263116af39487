"""The metrics of a run as curves, from one record after the other, in compact arrays."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from trimtab.insight.report.embed import NumpyArray
from trimtab.record import is_finite_number

MOST_METRICS = 400  # names; a run of trimtab has some thirty
POINTS = 2_000  # of one curve on a page; more than a screen has columns


@dataclass(frozen=True)
class MetricCurve:
    """One metric over the steps at which it was measured."""

    steps: NumpyArray
    values: NumpyArray


@dataclass
class _Growing:
    """Steps and values as they come, and the curve of them as it was last made."""

    # Compact arrays: 400 metrics of 10,000 steps as Python floats would take 200 MB.
    steps: array[int] = field(default_factory=lambda: array("i"))
    values: array[float] = field(default_factory=lambda: array("d"))
    ordered: bool = True
    curve: MetricCurve | None = None


@dataclass(eq=False)
class CurveStore(Mapping[str, MetricCurve]):
    """A mapping of names to curves. Of a metric that a step has twice, the last value counts.

    With `most_values`, a store with more values keeps of the longest curves only what an eye would see: the lowest and
    the highest value of every stretch. `thinned` says whether it has.
    """

    most_values: int = 0
    left_out: set[str] = field(default_factory=set)  # names beyond MOST_METRICS
    thinned: bool = False
    count: int = 0  # values
    _found: dict[str, _Growing] = field(default_factory=dict)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the finite numbers of a record, which has a step."""
        step = record["step"]
        for name, value in record.items():
            if name == "step" or not is_finite_number(value):
                continue
            growing = self._found.get(name)
            if growing is None:
                if len(self._found) >= MOST_METRICS:
                    self.left_out |= {name[:80]} if len(self.left_out) < MOST_METRICS else set()
                    continue
                growing = self._found[name] = _Growing()
            if growing.steps and growing.steps[-1] >= step:
                growing.ordered = False
            growing.steps.append(step)
            growing.values.append(float(value))
            growing.curve = None
            self.count += 1
        if self.most_values and self.count > self.most_values:
            self._thin()

    def _thin(self) -> None:
        self.thinned = True
        for name, growing in self._found.items():
            curve = self[name]
            kept = downsample(curve.values, max(len(curve.values) // 2, POINTS))
            steps, values = curve.steps[kept].astype("i4"), curve.values[kept].astype("f8")
            growing.steps, growing.values = array("i", steps.tobytes()), array("d", values.tobytes())
            growing.ordered, growing.curve = True, None
        self.count = sum(len(growing.steps) for growing in self._found.values())

    def __getitem__(self, name: str) -> MetricCurve:
        growing = self._found[name]
        if growing.curve is None:
            growing.curve = _sorted_curve(growing)
        return growing.curve

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def _sorted_curve(growing: _Growing) -> MetricCurve:
    # Copies: an array whose memory is shared cannot grow.
    numbers = np.array(growing.steps, dtype=np.int32)
    values = np.array(growing.values, dtype=np.float64).astype(np.float32)
    if growing.ordered:
        return MetricCurve(numbers, values)
    # A resumed run logs some steps again: the last value of a step counts.
    _, last = np.unique(numbers[::-1], return_index=True)
    kept = len(numbers) - 1 - last
    return MetricCurve(numbers[kept], values[kept])


def downsample(values: NumpyArray, points: int = POINTS) -> NumpyArray:
    """Return the indices to keep: first, last, and the minimum and maximum of every bucket, in order."""
    count = len(values)
    if count <= points:
        return np.arange(count)
    # Minimum and maximum of every bucket: a spike at one step in a million is still drawn.
    buckets = max((points - 2) // 2, 1)
    edges = np.linspace(0, count, buckets + 1).astype(np.int64)
    kept = {0, count - 1}
    for first, last in pairwise(edges.tolist()):
        bucket = values[first:last]
        kept |= {first + int(bucket.argmin()), first + int(bucket.argmax())}
    return np.array(sorted(kept))
