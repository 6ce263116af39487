"""Made-up metrics: a healthy run with noise, and the curves that a test replaces."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from trimtab.insight.alarms import AlarmMonitor, DetectorInput, Thresholds, replay_metrics
from trimtab.trainer.train.alarm_actions import Alarm

Curve = float | Callable[[int], float] | None

HEALTHY: dict[str, Curve] = {
    "policy/entropy": lambda step: 0.65 * 0.998**step,
    "reward/accuracy": lambda step: min(0.7, 0.2 + 0.002 * step),
    "reward/mean": lambda step: min(0.7, 0.2 + 0.002 * step),
    "response/length_mean": 400.0,
    "response/truncated_share": 0.02,
    "response/repetition_share": 0.03,
    "groups/mixed_share": 0.7,
    "sampler/mismatch_mean": 0.004,
    "tokens/count": 100_000.0,
    "tokens/spurious_share": 0.001,
    "tokens/top_gradient_share": 0.03,
    "update/approx_kl": 0.002,
    "update/clip_share": 0.004,
    "update/ratio_max": 3.0,
    "update/ratio_mean": 1.0,
}
NOISE = 0.05  # of each value


def made_run(steps: int = 120, seed: int = 0, noise: float = NOISE, **changes: Curve) -> list[dict[str, float]]:
    """Return the records of a healthy run with some curves replaced (`__` for the slash); None leaves a metric out."""
    rng = random.Random(seed)
    curves = {**HEALTHY, **{name.replace("__", "/"): curve for name, curve in changes.items()}}
    records = [{"step": 0.0, "eval/accuracy": 0.4}]
    for step in range(1, steps + 1):
        record = {"step": float(step)}
        for name, curve in curves.items():
            if curve is not None and (name != "eval/accuracy" or step % 10 == 0):
                value = curve(step) if callable(curve) else curve
                record[name] = value * (1 + noise * rng.gauss(0, 1))
        if step % 10 == 0 and "eval/accuracy" not in curves:
            record["eval/accuracy"] = min(0.8, 0.4 + 0.002 * step) + noise * rng.gauss(0, 0.2)
        records.append(record)
    return records


def after(step: int, value: Curve, before: Curve) -> Curve:
    """Return a curve that changes at a step."""

    def curve(now: int) -> float:
        chosen = value if now > step else before
        return chosen(now) if callable(chosen) else chosen

    return curve


def first_rings(records: Iterable[dict[str, float]], **settings: Any) -> dict[str, int]:
    """Return the first step at which each alarm rings."""
    return {alarm.alarm: alarm.step for alarm in reversed(alarms_of(records, **settings))}


def alarms_of(
    records: Iterable[dict[str, float]],
    target: float | None = None,
    rewards: tuple[float, float] = (0.0, 1.0),
    **limits: Any,
) -> list[Alarm]:
    """Return every alarm that rings; further settings are thresholds."""
    run = DetectorInput(limits=Thresholds(**limits), entropy_target=target, rewards=rewards)
    return replay_metrics(records, AlarmMonitor(run))
