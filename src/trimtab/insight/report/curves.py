"""Curves for the page: metrics without losing peaks, means over the runs of an objective, and entropy control."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from trimtab.insight.replay import CriticalWeights
from trimtab.insight.report.curve_store import POINTS, MetricCurve, downsample
from trimtab.insight.report.embed import NumpyArray, encode_array
from trimtab.insight.report.run_files import RunFiles
from trimtab.objectives import Objective, entropy_control
from trimtab.record import LARGEST_METRIC, merge_curves
from trimtab.trainer.train import window_length

FEWEST_POINTS = 300
# Horizontal axes besides the step: seconds and response tokens, each the sum of metrics over the steps so far.
AXES = {"time": ("time/rollout", "time/update"), "tokens": ("tokens/count",)}


def points_per_curve(runs: int) -> int:
    """Return how many points a curve may have if so many runs share the page."""
    return max(FEWEST_POINTS, min(POINTS, 3 * POINTS // max(runs, 1)))


def curves_json(curves: Mapping[str, MetricCurve], points: int) -> dict[str, Any]:
    """Return a run's metrics for the page."""
    return {name: curve_json(points, curve.steps, curve.values) for name, curve in sorted(curves.items())}


def axes_json(curves: Sequence[Mapping[str, MetricCurve]], points: int) -> dict[str, Any]:
    """Return other horizontal axes than the step: what had been spent at the end of each, as a mean over runs."""
    axes = {}
    for axis, names in AXES.items():
        spent = [total for run in curves if (total := _cumulative([run[n] for n in names if n in run])) is not None]
        if spent and len(spent) == len(curves):  # a run without it would not be in the picture
            steps, mean, _ = mean_and_std(spent)
            # Runs of different lengths: the mean over those that go on may fall where another ends.
            axes[axis] = curve_json(points, steps, np.maximum.accumulate(mean))
    return axes


def _cumulative(curves: Sequence[MetricCurve]) -> MetricCurve | None:
    """Return the sum of curves over all steps so far, from 0 at step 0; None without any."""
    if not curves:
        return None
    steps = np.unique(np.concatenate([np.zeros(1, dtype=np.int64), *(curve.steps for curve in curves)]))
    spent = np.zeros(len(steps))
    for curve in curves:
        spent[np.searchsorted(steps, curve.steps)] += np.maximum(curve.values.astype(np.float64), 0.0)
    return MetricCurve(steps, np.minimum(spent.cumsum(), LARGEST_METRIC))  # the page holds float32


def groups_json(runs: Sequence[RunFiles], points: int) -> list[dict[str, Any]]:
    """Return the runs by objective: each metric's mean and standard deviation over seeds."""
    groups = []
    for label in dict.fromkeys(run.label for run in runs):
        members = [number for number, run in enumerate(runs) if run.label == label]
        names = sorted({name for number in members for name in runs[number].curves})
        seeds = {name: [runs[n].curves[name] for n in members if name in runs[n].curves] for name in names}
        groups.append({
            "label": label,
            "runs": members,
            "curves": {name: curve_json(points, *mean_and_std(curves)) for name, curves in seeds.items()},
            "axes": axes_json([runs[number].curves for number in members], points),
            "final_values": {name: final_value(name, curves) for name, curves in seeds.items()},
        })  # fmt: skip
    return groups


def curve_json(points: int, steps: NumpyArray, values: NumpyArray, std: NumpyArray | None = None) -> dict[str, Any]:
    """Return a curve for the page, with at most so many points."""
    kept = downsample(values, points)
    encoded = {"steps": encode_array(steps[kept], "i4"), "values": encode_array(values[kept])}
    return encoded if std is None else encoded | {"std": encode_array(std[kept])}


def final_value(name: str, curves: Sequence[MetricCurve]) -> list[float]:
    """Return mean and standard deviation over runs of a metric's last values; shares of tokens are of the whole run."""
    # Whether the policy calls its tools is something that it learns, as its reward is.
    whole = name.endswith("_share") and not name.startswith("conversation/")
    values = []
    for curve in curves:
        # An evaluation is a mean over many problems already; single training steps are noisy.
        window = 1 if name.startswith("eval/") else window_length(len(curve.values))
        values.append(float((curve.values if whole else curve.values[-window:]).mean(dtype="f8")))
    return [float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0]


def mean_and_std(curves: Sequence[MetricCurve]) -> tuple[NumpyArray, NumpyArray, NumpyArray]:
    """Return steps, mean and standard deviation over the runs that have a step; the latter is 0 if only one has."""
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    sums = np.zeros((3, len(steps)))
    for curve in curves:
        where = np.searchsorted(steps, curve.steps)
        values = curve.values.astype(np.float64)
        sums[:, where] += np.stack([np.ones_like(values), values, values**2])
    # One pass over runs of different lengths, in float64 because squares minus squared mean cancels.
    count, total, squares = sums
    mean = total / count
    variance = (squares - count * mean**2) / np.maximum(count - 1, 1)
    return steps, mean, np.sqrt(np.maximum(variance, 0) * (count > 1))


def control_json(
    run: RunFiles, recorded: Objective | None, weights: CriticalWeights, points: int
) -> dict[str, Any] | None:
    """Return the panel's data: sentences, the band around the target, and curves; None for a run without control."""
    if entropy_control.PREDICTED not in run.curves and not weights.steps:
        return None
    curves = {name: run.curves[name] for name in entropy_control.METRICS if name in run.curves}
    records = merge_curves({n: zip(c.steps.tolist(), c.values.tolist(), strict=True) for n, c in curves.items()})
    return {
        "sentences": entropy_control.control_sentences(records, recorded.entropy_target if recorded else None),
        "band": _relative_band(recorded),
        "outcome": _outcome_json(records, points),
        "critical": _critical_json(weights),
    }


def _relative_band(recorded: Objective | None) -> list[float]:
    """Return both ends of the band relative to the target: what counts as held, or from the floor to the ceiling."""
    for controller in recorded.controllers.values() if recorded else ():
        floor, ceiling = (getattr(controller, name, None) for name in ("floor", "ceiling"))
        if floor and ceiling:
            return [1.0, ceiling / floor]
    return [1 - entropy_control.HELD_WITHIN, 1 + entropy_control.HELD_WITHIN]


def _outcome_json(records: list[dict[str, float]], points: int) -> dict[str, Any] | None:
    """Return the measured changes of the entropy, what the prediction explains of them, and their fit over the run."""
    found = entropy_control.prediction_pairs(records)
    fit = entropy_control.prediction_fit(pair for _, pair in found)
    if fit is None or fit.points < entropy_control.MIN_POINTS:
        return None
    steps, expected, measured = np.array([(step, *pair) for step, pair in found]).T
    curves = {
        "explained": curve_json(points, steps, fit.gain * expected + fit.drift),
        "measured": curve_json(points, steps, measured),
    }
    return {"fit": asdict(fit), **curves}


def _critical_json(weights: CriticalWeights) -> dict[str, Any] | None:
    """Return STARE's critical weight and the weight in use at recorded steps."""
    if not weights.steps:
        return None
    curves = {"steps": encode_array(weights.steps, "i4"), "critical": encode_array(weights.critical)}
    return curves | {"in_use": encode_array(weights.in_use)}
