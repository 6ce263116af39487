"""Whether a run's entropy is held at its target, and whether first-order theory predicts how it moves.

`trim` logs at every step how its plan would change the token-mean entropy, per unit of step size. The entropy of the
next rollout is the outcome. The slope between the two is the gain of the update (learning rate, Adam, shared weights);
their squared correlation says how much of the outcome the theory explains for this model and learning rate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Literal

METRICS = ENTROPY, PREDICTED, TARGET = "policy/entropy", "trim/predicted_change", "trim/target"
WINDOW = 100  # steps that `trim/r2` and `trim/gain` are over
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


def prediction_fit(predicted: Sequence[float], entropy: Sequence[float]) -> PredictionFit | None:
    """Fit the change of the entropy from every step to the next against the one predicted at that step.

    Both have a value per step, NaN where there is none; None with fewer than two pairs, or where nothing varies.
    """
    pairs = [pair for pair in prediction_pairs(predicted, entropy) if all(map(math.isfinite, pair))]
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


def prediction_pairs(predicted: Sequence[float], entropy: Sequence[float]) -> list[tuple[float, float]]:
    """Return (predicted, measured) change of every step but the last, whose outcome is not known."""
    return [(x, after - before) for x, (before, after) in zip(predicted, pairwise(entropy), strict=False)]


def prediction_series(records: Iterable[Mapping[str, float]]) -> tuple[list[float], list[float]]:
    """Return predicted change and entropy of consecutive steps, as `prediction_fit` takes them."""
    rows = list(consecutive_steps(records))
    return [predicted for _, predicted, _ in rows], [entropy for _, _, entropy in rows]


def consecutive_steps(
    records: Iterable[Mapping[str, float]], last: float = math.nan
) -> Iterator[tuple[float, float, float]]:
    """Yield (step, predicted, entropy) of records; a row of NaN stands where steps are missing."""
    for record in records:
        if record["step"] != last + 1:
            yield math.nan, math.nan, math.nan
        last = record["step"]
        yield last, record.get(PREDICTED, math.nan), record.get(ENTROPY, math.nan)


@dataclass
class FitWindow:
    """The last steps of a run, for the metrics `trim/r2` and `trim/gain`; metrics.jsonl is enough to rebuild it."""

    rows: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW + 1))

    def add(self, record: Mapping[str, float]) -> dict[str, float]:
        """Add the metrics of a step; return the two metrics once there are enough points."""
        self.rows.extend(consecutive_steps([record], self.rows[-1][0] if self.rows else math.nan))
        if PREDICTED not in record:
            return {}
        fit = prediction_fit([row[1] for row in self.rows], [row[2] for row in self.rows])
        return {} if fit is None or fit.points < MIN_POINTS else {"trim/r2": fit.r2, "trim/gain": fit.gain}


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
    """Compare the entropy of every step with its target; None where no step has both."""
    pairs = [pair for pair in zip(entropy, target, strict=True) if all(map(math.isfinite, pair)) and pair[1] > 0]
    if not pairs:
        return None
    end = pairs[-max(1, len(pairs) // LAST_SHARE) :]
    now, goal = (fmean(values) for values in zip(*end, strict=True))
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
    fit = prediction_fit(*prediction_series(records))
    sentences = [] if found is None else [found.words]
    if fit is not None and fit.points >= MIN_POINTS:
        fitted = f"R^2 = {fit.r2:.2f} over {fit.points:,} steps"
        sentences.append(f"Its changes from step to step correlate with trim's first-order prediction: {fitted}.")
    return sentences
