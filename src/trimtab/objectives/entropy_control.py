"""Whether a run's entropy is held at its target, and whether first-order theory predicts how it moves.

`trim` logs at every step how its plan would change the entropy, per unit of step size. With `update.measure_every` the
trainer logs how the updates moved the entropy of the very same tokens. The slope between the two is the gain of the
update (learning rate, Adam, shared weights); their squared correlation says how much of the outcome the theory explains
for this model and learning rate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

# Not the change from one rollout to the next: their prompts differ, and a rollout that is low by chance makes trim push
# just before the next one is higher anyway. On countdown that gave R^2 of 0.1 to 0.2 where there was nothing.
MEASURED = "update/entropy_change"
METRICS = ENTROPY, PREDICTED, TARGET, _ = "policy/entropy", "trim/predicted_change", "trim/target", MEASURED
WINDOW = 100  # measurements that `trim/r2` and `trim/gain` are over
MOMENTUM = 0.9  # AdamW's first beta, by default
MIN_POINTS = 20  # a correlation over fewer is mostly chance
HELD_WITHIN = 0.2  # of the target
LAST_SHARE = 10  # the end of a run is its last tenth

Verdict = Literal["held", "below", "above", "never fell"]


@dataclass(frozen=True)
class PredictionFit:
    """The line of measured over predicted changes: slope, squared correlation, and the change where 0 is predicted."""

    gain: float
    r2: float
    drift: float
    points: int


def prediction_fit(pairs: Iterable[tuple[float, float]]) -> PredictionFit | None:
    """Fit measured against predicted changes; None with fewer than two finite pairs, or if nothing varies."""
    pairs = [pair for pair in pairs if all(map(math.isfinite, pair))]
    columns = list(zip(*pairs, strict=True))
    if not pairs or any(min(values) == max(values) for values in columns):
        return None
    x, y = map(_centred, columns)
    xx, yy, xy = _product(x, x), _product(y, y), _product(x, y)
    # Hostile logs have numbers whose squares overflow or vanish; the comparison is false for NaN.
    if not 0 < xx * yy < math.inf or not math.isfinite(xy / xx):
        return None
    gain, (mean_x, mean_y) = xy / xx, (sum(values) / len(pairs) for values in columns)
    return PredictionFit(gain, min(1.0, gain * (xy / yy)), mean_y - gain * mean_x, len(pairs))


def _centred(values: Sequence[float]) -> list[float]:
    mean = sum(values) / len(values)
    return [value - mean for value in values]


def _product(x: Sequence[float], y: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True))


@dataclass
class PairedChanges:
    """Pairs the predicted and the measured changes of a run, step by step.

    AdamW steps along a running mean of gradients, so the prediction is a running mean too.
    """

    predicted: float = 0.0

    def pair(self, record: Mapping[str, float]) -> tuple[float, float] | None:
        """Return the pair of a step; None if it has no measurement."""
        predicted, measured = (record.get(name, math.nan) for name in (PREDICTED, MEASURED))
        if not math.isfinite(predicted):
            return None
        self.predicted = MOMENTUM * self.predicted + (1 - MOMENTUM) * predicted
        return (self.predicted, measured) if math.isfinite(measured) else None


def prediction_pairs(records: Iterable[Mapping[str, float]]) -> list[tuple[float, tuple[float, float]]]:
    """Return the steps of a run that have a measurement, with their (predicted, measured) changes."""
    changes = PairedChanges()
    return [(record["step"], pair) for record in records if (pair := changes.pair(record)) is not None]


@dataclass
class FitWindow:
    """The last pairs of a run, for `trim/r2` and `trim/gain`; metrics.jsonl is enough to rebuild it."""

    changes: PairedChanges = field(default_factory=PairedChanges)
    pairs: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, record: Mapping[str, float]) -> dict[str, float]:
        """Add the metrics of a step; return the two metrics if it has a measurement and there are enough of them."""
        pair = self.changes.pair(record)
        if pair is None:
            return {}
        self.pairs.append(pair)
        fit = prediction_fit(self.pairs) if len(self.pairs) >= MIN_POINTS else None
        return {} if fit is None else {"trim/r2": fit.r2, "trim/gain": fit.gain}


@dataclass(frozen=True)
class EntropyVerdict:
    """Where the entropy was over the last tenth of a run, as a mean, and what that means."""

    verdict: Verdict
    entropy: float
    target: float

    @property
    def words(self) -> str:
        """The verdict as a sentence."""
        numbers = f"{self.entropy:.3g} over the last tenth of the run, target {self.target:.3g}"
        if self.verdict == "held":
            return f"The entropy was held: {numbers}."
        if self.verdict == "below":
            return f"The entropy was not held, it is below its target: {numbers}."
        if self.verdict == "above":
            return f"The entropy is above its target, to which it had fallen before: {numbers}."
        return f"The entropy never fell to its target, so there was nothing to hold: {numbers}."


def entropy_verdict(entropy: Sequence[float], target: Sequence[float]) -> EntropyVerdict | None:
    """Compare the entropy of every step with its target; None if no step has both."""
    pairs = [pair for pair in zip(entropy, target, strict=True) if all(map(math.isfinite, pair)) and pair[1] > 0]
    if not pairs:
        return None
    end = pairs[-max(1, len(pairs) // LAST_SHARE) :]
    now, goal = (math.fsum(values) / len(values) for values in zip(*end, strict=True))
    verdict: Verdict = "held"
    if now < (1 - HELD_WITHIN) * goal:
        verdict = "below"
    elif now > (1 + HELD_WITHIN) * goal:
        verdict = "above" if any(value <= wanted for value, wanted in pairs) else "never fell"
    return EntropyVerdict(verdict, now, goal)


def control_sentences(records: Sequence[Mapping[str, float]], target: float | None = None) -> list[str]:
    """Say whether a run's entropy was held, and how well its changes were predicted; nothing without a target.

    `target` is that of an objective which does not log one.
    """
    constant = math.nan if target is None else target
    steps = [record for record in records if ENTROPY in record]
    found = entropy_verdict([r[ENTROPY] for r in steps], [r.get(TARGET, constant) for r in steps])
    fit = prediction_fit(pair for _, pair in prediction_pairs(records))
    sentences = [] if found is None else [found.words]
    if fit is not None and fit.points >= MIN_POINTS:
        fitted = f"R^2 = {fit.r2:.2f} over {fit.points:,} measurements"
        sentences.append(f"trim's first-order prediction explains how its updates moved the entropy by {fitted}.")
    return sentences
