"""When a run has collapsed: the one definition that stress tests, alarms and reports use.

A run has collapsed if one of these holds from some step to the last one, for at least `HOLD_STEPS` steps:

- `lost`: held-out accuracy is below half of its best so far;
- `stuck`: most answers are wrong, and no groups with different rewards are left although there were some;
- `emptied`: the entropy is below a tenth of that at the start, and accuracy below three quarters of its best;
- `nonfinite`: no update is finite.

A run that falls and comes back has not collapsed. One that ends `low`, below half of its best accuracy, has fallen; it
may be too short to tell whether that lasts. Without evaluations the accuracy is that of the training responses.
Where the task's rule gives numbers, their mean stands for the accuracy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

COLLAPSE_METRICS = (
    "eval/accuracy", "reward/accuracy", "eval/score", "reward/score", "policy/entropy", "groups/mixed_share",
    "update/skipped", "update/ratio_mean",
)  # fmt: skip
HOLD_STEPS = 10  # accuracy on a few hundred problems falls and returns within a few steps
RECENT = 5  # steps whose median is the value now: one odd step decides nothing
LEFT = 2.0  # factor between the first value and those after it, from which only the first is the start
LOST = 0.5  # of the best accuracy
MIN_BEST = 0.1  # a best accuracy below this is not a level to fall from
EMPTIED, FALLING = 0.1, 0.75  # of the entropy at the start, of the best accuracy
SIGNAL, NO_SIGNAL = 0.1, 0.02  # share of groups whose rewards differ: some, none
LOW = "low"  # the kind of a fall that lasted too short a time to be a collapse
MOSTLY_WRONG = 0.5  # accuracy: a policy that is right more often may have solved what it can

COLLAPSE_DEFINITION = (
    f"A run has collapsed if one of these holds from some step to its end, for {HOLD_STEPS} steps or more: held-out "
    f"accuracy is below {LOST:.0%} of its best; or entropy is below {EMPTIED:.0%} of that at the start and accuracy "
    f"below {FALLING:.0%} of its best; or most answers are wrong and rewards no longer differ within any group, so "
    "that there is nothing to learn from; or no update is finite. A run that falls and comes back has not collapsed."
)


def start_values(values: Sequence[float], count: int, may_rise: bool = True) -> list[float]:
    """Return the values at the start of a run: the first `count`, or only the first if the next ones leave it at once.

    The list is empty until there are enough. Without `may_rise` only a fall leaves the start: a reward that rises is
    learning.
    """
    # The first step is sampled before any update. In a run that breaks in its first updates, it is all there is of the
    # policy that it began with.
    first, rest = values[:1], values[1 : 1 + RECENT]
    if len(rest) == RECENT:
        usual = median(rest)
        fell = max(rest) < first[0] and first[0] > LEFT * usual
        rose = min(rest) > first[0] and usual > LEFT * first[0]
        if fell or (rose and may_rise):
            return list(first)
    return list(values[:count]) if len(values) >= count else []


@dataclass(frozen=True)
class Collapse:
    """The step from which a run has collapsed (or is `low`), the criterion, and a sentence."""

    step: int
    kind: str
    message: str

    @property
    def words(self) -> str:
        """What happened, when and by which figures."""
        if self.kind == LOW:
            return f"fell at step {self.step:,} to below {LOST:.0%} of its best, and ended there: {self.message}"
        return f"collapsed at step {self.step:,}: {self.message}"


@dataclass
class _Streak:
    """Since when a criterion has held, and over how many values of accuracy."""

    step: int
    message: str
    evaluations: int = 0


@dataclass
class CollapseDetector:
    """Follows the metrics of a run, record by record, in a memory that does not grow."""

    best: float = 0.0
    accuracy: float | None = None
    evaluated: bool = False
    had_signal: bool = False
    first: dict[str, list[float]] = field(default_factory=dict)
    recent: dict[str, deque[float]] = field(default_factory=dict)
    streaks: dict[str, _Streak] = field(default_factory=dict)
    found: Collapse | None = None
    word: str = "accuracy"

    def add(self, record: Mapping[str, float]) -> Collapse | None:
        """Add the metrics of a step, and return whether the run has collapsed as of now."""
        graded = [area for area in ("eval", "reward") if f"{area}/score" in record]
        scores = {f"{area}/accuracy": record[f"{area}/score"] for area in graded}
        record, self.word = {**record, **scores}, "score" if scores else self.word
        for name in ("reward/accuracy", "policy/entropy", "groups/mixed_share"):
            if math.isfinite(record.get(name, math.nan)):
                self.recent.setdefault(name, deque(maxlen=RECENT)).append(record[name])
                first = self.first.setdefault(name, [])
                if len(first) <= RECENT:
                    first.append(record[name])
        new_accuracy = self._update_accuracy(record)
        step = int(record["step"])
        found = self._criteria(record)
        self.streaks = {kind: self.streaks.get(kind) or _Streak(step, "") for kind in found}
        for kind, streak in self.streaks.items():
            streak.message = found[kind]
            streak.evaluations += new_accuracy
        self.found = self._collapse(step)
        return self.found

    def _update_accuracy(self, record: Mapping[str, float]) -> bool:
        """Take the newest accuracy; return whether there is one in this record."""
        held_out = record.get("eval/accuracy")
        if held_out is not None and math.isfinite(held_out):
            # The best so far may be one of the training responses, sampled at another temperature.
            self.best, self.evaluated = self.best if self.evaluated else 0.0, True
            self.accuracy = held_out
        elif not self.evaluated and len(self.recent.get("reward/accuracy", ())) == RECENT:
            self.accuracy = median(self.recent["reward/accuracy"])
            began = start_values(self.first["reward/accuracy"], RECENT, may_rise=False)
            self.best = max(self.best, median(began))
        else:
            return False
        self.best = max(self.best, self.accuracy)
        return True

    def _criteria(self, record: Mapping[str, float]) -> dict[str, str]:
        """Return the criteria that hold now, each with its message."""
        found: dict[str, str] = {}
        if record.get("update/skipped", 0.0) > 0 and "update/ratio_mean" not in record:
            found["nonfinite"] = "no update is finite"
        if self.accuracy is not None and self.best >= MIN_BEST:
            fallen = f"{self.word} is {self.accuracy:.2f}; its best was {self.best:.2f}"
            if self.accuracy < LOST * self.best:
                found["lost"] = fallen
            now, began = self._now("policy/entropy"), start_values(self.first.get("policy/entropy", ()), RECENT)
            if now is not None and now < EMPTIED * median(began) and self.accuracy < FALLING * self.best:
                found["emptied"] = f"entropy is {now:.3g}, at the start {median(began):.3g}; {fallen}"
        mixed, right = self._now("groups/mixed_share"), self._now("reward/accuracy")
        self.had_signal = self.had_signal or (mixed is not None and mixed >= SIGNAL)
        if mixed is not None and right is not None and mixed < NO_SIGNAL and right < MOSTLY_WRONG and self.had_signal:
            level = f"{right:.0%} of the answers are right" if self.word == "accuracy" else f"the score is {right:.2f}"
            found["stuck"] = f"{level}, and rewards no longer differ within groups"
        return found

    def _now(self, name: str) -> float | None:
        values = self.recent.get(name, ())
        return median(values) if len(values) == RECENT else None

    def _collapse(self, step: int) -> Collapse | None:
        lasting = [
            Collapse(streak.step, kind, streak.message)
            for kind, streak in self.streaks.items()
            # A single low evaluation that no other followed proves nothing, even if it was many steps ago.
            if step - streak.step >= HOLD_STEPS and (kind in ("stuck", "nonfinite") or streak.evaluations > 1)
        ]
        return min(lasting, key=lambda each: each.step, default=None)


def merge_curves(curves: Mapping[str, Iterable[tuple[int, float]]]) -> list[dict[str, float]]:
    """Return the records of a run from its curves, (step, value) pairs by metric."""
    rows: dict[int, dict[str, float]] = {}
    for name, curve in curves.items():
        for step, value in curve:
            rows.setdefault(step, {"step": step})[name] = value
    return [rows[step] for step in sorted(rows)]


def find_collapse(records: Iterable[Mapping[str, float]]) -> Collapse | None:
    """Return whether a run with these metrics, in the order of their steps, has collapsed by its end."""
    return _follow(records).found


def find_fall(records: Iterable[Mapping[str, float]]) -> Collapse | None:
    """Return the collapse of a run, or that it ended below half of its best accuracy, however short that lasted."""
    detector = _follow(records)
    low = detector.streaks.get("lost")
    return detector.found or (Collapse(low.step, LOW, low.message) if low else None)


def _follow(records: Iterable[Mapping[str, float]]) -> CollapseDetector:
    detector = CollapseDetector()
    for record in records:
        detector.add(record)
    return detector
