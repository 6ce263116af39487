"""What a detector sees of a run, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from trimtab.insight.alarms.history import History, Shift
from trimtab.insight.alarms.thresholds import Thresholds


@dataclass(frozen=True)
class Finding:
    """Something that does not look right: in words, and the numbers behind them by metric."""

    message: str
    evidence: dict[str, Any]


@dataclass(frozen=True)
class View:
    """A run so far: its metrics, the thresholds, and what its recipe says.

    `entropy_target` is what the objective steers for, `rewards` are those of a wrong and of a right answer.
    """

    history: History = field(default_factory=History)
    limits: Thresholds = field(default_factory=Thresholds)
    entropy_target: float | None = None
    rewards: tuple[float, float] = (0.0, 1.0)

    def shift(self, metric: str) -> Shift | None:
        """A metric now against the run's start."""
        return self.history.shift(metric, self.limits.start, self.limits.recent)

    def now(self, metric: str) -> float | None:
        """The median of a metric over the last few steps; None until there are as many."""
        values = self.history.last(metric, self.limits.recent)
        return median(values) if values else None

    def level(self, metric: str, **more: float) -> dict[str, Any]:
        """The evidence of a level: a metric over the last few steps."""
        steps = self.history.steps(metric)[-self.limits.recent :]
        return {metric: {"now": self.now(metric), "steps": [steps[0], steps[-1]], **more}}

    def held_out(self) -> tuple[float, float] | None:
        """Held-out accuracy at the start, and now, which is the middle of the last two; None before there are two."""
        values = self.history.values("eval/accuracy")
        return (values[0], median(values[-2:])) if len(values) > 1 else None

    def scaled(self, reward: float) -> float:
        """A reward as if it were an accuracy: 0 where all are wrong, 1 where all are right."""
        wrong, right = self.rewards
        return (reward - wrong) / (right - wrong)

    def gain(self) -> float:
        """The rise of accuracy since the start: the held-out one where it is known, else by the verifier."""
        held_out, right = self.held_out(), self.shift(self.accuracy)
        if held_out is not None:
            return held_out[1] - held_out[0]
        return 0.0 if right is None else right.now - right.start

    @property
    def accuracy(self) -> str:
        """The metric that tells how often the verifier is content: accuracy where there is one, else the reward."""
        return "reward/accuracy" if self.history.values("reward/accuracy") else "reward/mean"


Detector = Callable[[View], Finding | None]


def percent(share: float) -> str:
    """A share for people."""
    return f"{100 * share:.3g} %"
