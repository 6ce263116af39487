"""The input of a detector (a run's metrics, the thresholds, facts from the recipe) and its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from trimtab.collapse import CollapseDetector, start_values
from trimtab.insight.alarms.history import History, spread
from trimtab.insight.alarms.thresholds import Thresholds
from trimtab.step_lines import is_finite_number

# Metrics of what the policy samples. Those of an update are small while the learning rate rises, which is no start to
# hold to, and groups that differ become many at once in a run that begins to learn.
SAMPLED = ("policy", "reward", "response")


@dataclass(frozen=True)
class Finding:
    """What a detector found: a message, the numbers behind it by metric, and advice if it depends on the cause."""

    message: str
    evidence: dict[str, Any]
    suggestion: str = ""


@dataclass(frozen=True)
class Shift:
    """A metric's median now and at the start of the run, whether noise can explain the change, and the evidence."""

    now: float
    start: float
    significant: bool
    evidence: dict[str, Any]


@dataclass(frozen=True)
class DetectorInput:
    """A run so far: its metrics, the thresholds, facts from its recipe, and whether it has collapsed.

    `entropy_target` is the target of the objective's entropy controller; `rewards` are those of a wrong and a right
    answer.
    """

    history: History = field(default_factory=History)
    limits: Thresholds = field(default_factory=Thresholds)
    entropy_target: float | None = None
    rewards: tuple[float, float] = (0.0, 1.0)
    collapse: CollapseDetector = field(default_factory=CollapseDetector)

    def add(self, record: Mapping[str, float]) -> int:
        """Add a record of metrics and return its step."""
        # Logs of other trainers hold text and nulls, and a single NaN would make every median after it NaN.
        numbers = {k: v for k, v in record.items() if is_finite_number(v)}
        self.collapse.add(numbers)
        return self.history.add(numbers)

    def shift(self, metric: str) -> Shift | None:
        """Compare a metric now with the start of the run; None until there are enough values for both."""
        began, recent = self.start(metric), self.limits.recent_steps
        steps, values = self.history.steps(metric), self.history.values(metric)
        if not began or len(values) < len(began) + recent:
            return None
        now, start, noise = median(values[-recent:]), median(began), spread(began)
        evidence = {"now": now, "steps": [steps[-recent], steps[-1]], "start": start}
        evidence |= {"start_steps": [steps[0], steps[len(began) - 1]], "start_spread": noise}
        return Shift(now, start, abs(now - start) > self.limits.min_spreads * noise, {metric: evidence})

    def start(self, metric: str) -> list[float]:
        """Return the values of a metric at the start of the run; an empty list until there are enough."""
        values, count = self.history.values(metric), self.limits.start_steps
        area = metric.partition("/")[0]
        if area in SAMPLED:
            return start_values(values, count, may_rise=area != "reward")
        return values[:count] if len(values) >= count else []

    def now(self, metric: str) -> float | None:
        """Return the median of a metric over the recent steps; None until there are enough."""
        # A median, which two odd steps out of five do not move.
        values = self.history.last(metric, self.limits.recent_steps)
        return median(values) if values else None

    def level(self, metric: str, **more: float) -> dict[str, Any]:
        """Return the evidence for a metric's level over the recent steps."""
        steps = self.history.steps(metric)[-self.limits.recent_steps :]
        return {metric: {"now": self.now(metric), "steps": [steps[0], steps[-1]], **more}}

    def target(self) -> float | None:
        """Return the target of the entropy: as it is logged, since one may move, else that of the recipe."""
        logged = self.now("trim/target")
        return self.entropy_target if logged is None else logged

    def held_out(self) -> tuple[float, float] | None:
        """Return held-out accuracy at the start and now (mean of the last two evaluations); None before the second.

        Where the rule gives numbers it is their mean.
        """
        # The middle of the last two: one evaluation on a few dozen problems is noisy.
        values = self.history.values(self.held_out_metric)
        return (values[0], median(values[-2:])) if len(values) > 1 else None

    def held_out_rise(self, steps: int) -> float:
        """Return how far the newest evaluation is above the last one before these steps; 0 if there is none in them."""
        at, values = self.history.steps(self.held_out_metric), self.history.values(self.held_out_metric)
        first = self.history.steps("step")[-1] - steps
        before = [value for step, value in zip(at, values, strict=True) if step <= first]
        return values[-1] - before[-1] if before and values else 0.0

    def scaled(self, reward: float) -> float:
        """Scale a mean reward to 0 where all answers are wrong and 1 where all are right."""
        # The thresholds are those of accuracies, and a recipe may reward with -1 and 1.
        wrong, right = self.rewards
        return (reward - wrong) / (right - wrong)

    def gain(self) -> float:
        """Return the rise of accuracy since the start: held-out if measured, else by the verifier."""
        # Held-out accuracy first: the training reward is what a hacked verifier raises.
        held_out, right = self.held_out(), self.shift(self.accuracy)
        if held_out is not None:
            return held_out[1] - held_out[0]
        return 0.0 if right is None else right.now - right.start

    def has_learned(self) -> bool:
        """Return whether accuracy is so far above its start that a policy which is more certain is no surprise."""
        return self.gain() >= self.limits.learned_gain

    @property
    def accuracy(self) -> str:
        """Return the name of the training accuracy metric; `reward/score` where the rule gives numbers."""
        logged = (name for name in ("reward/score", "reward/accuracy") if self.history.values(name))
        return next(logged, "reward/mean")

    @property
    def held_out_metric(self) -> str:
        """Return the name of the held-out accuracy metric; `eval/score` where the rule gives numbers."""
        return "eval/score" if self.history.values("eval/score") else "eval/accuracy"

    @property
    def held_out_word(self) -> str:
        """Return what that metric is called in a message."""
        return self.held_out_metric.partition("/")[2]


Detector = Callable[[DetectorInput], Finding | None]


def percent(share: float) -> str:
    """Write a share as a percentage."""
    return f"{100 * share:.3g} %"
