"""The detector over trim: the entropy is below its band although trim steers, and why it cannot hold it."""

from __future__ import annotations

from statistics import fmean

from trimtab.insight.alarms.detector_input import DetectorInput, Finding, percent
from trimtab.insight.alarms.policy_detectors import ENTROPY

CONTROL_ADVICE = {
    "leverage": "Without mixed groups no weights can steer: train on other problems, raise rollout.samples, or set "
    "rollout.dynamic_sampling = true",
    "saturated": "At the limit of its weight trim can do no more: lower update.lr, raise objective.max_weight, or set "
    "a higher objective.floor so that it begins earlier",
    "theory": "Where the prediction does not fit, updates are too large for a first-order theory: lower update.lr, or "
    "take fewer update.per_step or update.passes",
}


def control(run: DetectorInput) -> Finding | None:
    """Detect entropy that stays below its band under trim: no leverage, a weight at its limit, a wrong prediction."""
    limits, names = run.limits, (ENTROPY, "trim/target", "trim/drive")
    entropy, target, drive = (run.history.last(name, limits.control_steps) for name in names)
    level = run.now(ENTROPY)
    if not entropy or not target or not drive or level is None:
        return None
    low = [value < limits.control_below * goal for value, goal in zip(entropy, target, strict=True)]
    # Nearly all of them: single steps of a noisy entropy may touch the band.
    if fmean(low) < 0.9 or level >= limits.control_below * target[-1] or min(drive) <= 0:
        return None
    cause = _no_leverage(run) or _saturated(run) or _wrong_prediction(run)
    if cause is None:
        return None
    kind, words, metrics = cause
    where = f"entropy is {level:.3g}, below its target of {target[-1]:.3g} for {limits.control_steps} steps"
    evidence = {name: part for metric in (ENTROPY, *metrics) for name, part in run.level(metric).items()}
    return Finding(f"{where}, and {words}", {**evidence, "target": target[-1], "cause": kind}, CONTROL_ADVICE[kind])


Cause = tuple[str, str, tuple[str, ...]]


def _no_leverage(run: DetectorInput) -> Cause | None:
    leverage, mixed = run.now("trim/leverage"), run.now("groups/mixed_share")
    if mixed is not None and mixed < run.limits.control_mixed:
        words = f"trim has hardly any tokens to weigh: rewards differ in {percent(mixed)} of the groups"
        return "leverage", words, ("groups/mixed_share",)
    if leverage is not None and leverage < run.limits.control_leverage:
        return "leverage", f"trim has a leverage of {leverage:.2g}: no weights could steer it", ("trim/leverage",)
    return None


def _saturated(run: DetectorInput) -> Cause | None:
    share, weight = run.history.last("trim/saturated", run.limits.trend_steps), run.now("trim/weight")
    if not share or fmean(share) < 0.5 or weight is None:
        return None
    return "saturated", f"trim's weight is at its limit, {weight:.3g}", ("trim/saturated", "trim/weight")


def _wrong_prediction(run: DetectorInput) -> Cause | None:
    fit, gain = run.now("trim/r2"), run.now("trim/gain")
    if fit is None or gain is None or (fit >= run.limits.control_r2 and gain > 0):
        return None
    words = f"its changes do not follow trim's prediction (R^2 {fit:.2g}, gain {gain:.2g})"
    return "theory", words, ("trim/r2", "trim/gain")
