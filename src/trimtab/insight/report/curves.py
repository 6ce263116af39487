"""Curves of a size that a page can hold: thinned so that no peak is lost, and runs of one objective as a band."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from trimtab.console import LONGEST_WINDOW
from trimtab.insight.report.embed import Array, pack
from trimtab.insight.report.run_files import Curve, RunFiles

POINTS = 2_000  # of one curve; more than a screen has columns
FEWEST_POINTS = 300


def points_for(runs: int) -> int:
    """How many points a curve has when so many runs share the page."""
    return max(FEWEST_POINTS, min(POINTS, 3 * POINTS // max(runs, 1)))


def thinned(values: Array, points: int = POINTS) -> Array:
    """Which of the values to keep: the first, the last, and the least and greatest of every stretch, in order."""
    count = len(values)
    if count <= points:
        return np.arange(count)
    buckets = max((points - 2) // 2, 1)
    edges = np.linspace(0, count, buckets + 1).astype(np.int64)
    kept = {0, count - 1}
    for first, last in pairwise(edges.tolist()):
        part = values[first:last]
        kept |= {first + int(part.argmin()), first + int(part.argmax())}
    return np.array(sorted(kept))


def pack_curves(curves: dict[str, Curve], points: int) -> dict[str, Any]:
    """A run's metrics for the page."""
    return {name: _pack_curve(curve, points) for name, curve in sorted(curves.items())}


def _pack_curve(curve: Curve, points: int) -> dict[str, Any]:
    kept = thinned(curve.values, points)
    return {"steps": pack(curve.steps[kept], "i4"), "values": pack(curve.values[kept])}


def pack_groups(runs: Sequence[RunFiles], points: int) -> list[dict[str, Any]]:
    """The runs by objective: each metric's mean over seeds, and one standard deviation to either side."""
    members: dict[str, list[int]] = {}
    for number, run in enumerate(runs):
        members.setdefault(run.label, []).append(number)
    groups = []
    for label, numbers in members.items():
        names = sorted({name for number in numbers for name in runs[number].curves})
        bands = {name: [runs[n].curves[name] for n in numbers if name in runs[n].curves] for name in names}
        curves = {name: _pack_band(*band(held), points) for name, held in bands.items()}
        groups.append(
            {"label": label, "runs": numbers, "curves": curves, "ends": {n: ends(n, c) for n, c in bands.items()}}
        )
    return groups


def ends(name: str, curves: Sequence[Curve]) -> list[float]:
    """Mean and standard deviation over runs of where a metric ended: shares of tokens are of the whole run."""
    window = 1 if name.startswith("eval/") else LONGEST_WINDOW
    whole = name.endswith("_share")
    values = [float((curve.values if whole else curve.values[-window:]).mean()) for curve in curves]
    return [float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0]


def band(curves: Sequence[Curve]) -> tuple[Array, Array, Array]:
    """Steps, mean and standard deviation over the runs that have the step; the latter 0 where only one has."""
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    sums = np.zeros((3, len(steps)))
    for curve in curves:
        where, values = np.searchsorted(steps, curve.steps), curve.values.astype(np.float64)
        sums[:, where] += np.stack([np.ones_like(values), values, values**2])
    count, total, squares = sums
    mean = total / count
    variance = (squares - count * mean**2) / np.maximum(count - 1, 1)
    return steps, mean, np.sqrt(np.maximum(variance, 0) * (count > 1))


def _pack_band(steps: Array, mean: Array, spread: Array, points: int) -> dict[str, Any]:
    kept = thinned(mean, points)
    return {"steps": pack(steps[kept], "i4"), "values": pack(mean[kept]), "spread": pack(spread[kept])}
