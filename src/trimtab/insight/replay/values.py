"""What a replay finds, as values that add up: over the updates of a step, and over the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce

from trimtab.objectives import Reason

CLIPPED = "clipped"
# Reasons that set a token apart. The others (no signal, corrected, widened, narrowed) hold for most tokens.
MARKED = (
    Reason.SILENCED | Reason.BOOSTED | Reason.DAMPED | Reason.MASKED | Reason.DROPPED | Reason.PENALIZED
) | Reason.RESHAPED


@dataclass(frozen=True, slots=True)
class Pull:
    """Some tokens: how many, and their gradient mass before and after the objective's treatment.

    A token's mass is the exact norm of its gradient in the logits: `|A| |1[k] - p|` before (advantage alone), with the
    objective's own coefficient in place of `A` after. Sums are per token of an update, added over updates.
    """

    tokens: int = 0
    before: float = 0.0
    after: float = 0.0

    def __add__(self, other: Pull) -> Pull:
        return Pull(self.tokens + other.tokens, self.before + other.before, self.after + other.after)


@dataclass(frozen=True, slots=True)
class Treatment:
    """What an objective does to the tokens of an update, a step or a run.

    `reasons` has an entry for each reason that occurs, and for `clipped`; a token can have several. `touched` are the
    tokens that are clipped or marked (silenced, boosted, damped, masked, dropped, penalized, reshaped).
    `entropy_change` is the predicted first-order change of the entropy per unit of step size, added over `updates`.
    """

    updates: int = 0
    tokens: int = 0
    touched: int = 0
    total: Pull = Pull()
    entropy_change: float = 0.0
    reasons: dict[str, Pull] = field(default_factory=dict)

    def __add__(self, other: Treatment) -> Treatment:
        names = {**self.reasons, **other.reasons}
        return Treatment(
            self.updates + other.updates,
            self.tokens + other.tokens,
            self.touched + other.touched,
            self.total + other.total,
            self.entropy_change + other.entropy_change,
            {name: self.reasons.get(name, Pull()) + other.reasons.get(name, Pull()) for name in names},
        )

    def share(self, reason: str) -> float:
        """The share of tokens with a reason."""
        return _ratio(self.reasons.get(reason, Pull()).tokens, self.tokens)

    def mass(self, reason: str) -> float:
        """The share of the gradient mass, before treatment, that tokens with a reason have."""
        return _ratio(self.reasons.get(reason, Pull()).before, self.total.before)

    def mass_after(self, reason: str) -> float:
        """The share of the gradient mass that they have after it."""
        return _ratio(self.reasons.get(reason, Pull()).after, self.total.after)

    @property
    def entropy_change_per_update(self) -> float:
        """The mean over updates."""
        return _ratio(self.entropy_change, self.updates)


@dataclass(frozen=True, slots=True)
class Overlap:
    """How far two objectives (by their place in the list) touch the same tokens, and for the same reasons."""

    first: int
    second: int
    both: int = 0
    either: int = 0
    agreed: int = 0

    def __add__(self, other: Overlap) -> Overlap:
        counts = self.both + other.both, self.either + other.either, self.agreed + other.agreed
        return Overlap(self.first, self.second, *counts)

    @property
    def jaccard(self) -> float:
        """Tokens touched by both, over tokens touched by either; NaN where neither touches any."""
        return _ratio(self.both, self.either)

    @property
    def agreement(self) -> float:
        """Of the tokens that both touch, the share with the same reasons."""
        return _ratio(self.agreed, self.both)


@dataclass(frozen=True, slots=True)
class StepReplay:
    """A step: what each objective does to it, in the order of the objectives.

    `exact` where all of it was recorded; `moved` where the updates' own log-probabilities were, without which nothing
    is known to be clipped; `device` is where the run was.
    """

    step: int
    tokens: int
    exact: bool
    moved: bool
    device: str
    treatments: tuple[Treatment, ...]
    overlaps: tuple[Overlap, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """A run under several objectives: step by step, and in sum. `notes` say what holds only with a grain of salt."""

    run: str
    recorded: str
    objectives: tuple[str, ...]
    steps: tuple[StepReplay, ...]
    treatments: tuple[Treatment, ...]
    overlaps: tuple[Overlap, ...]
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether every plan is the one that the objective would have made in the run."""
        return all(step.exact for step in self.steps)


def add_treatments(rows: Iterable[tuple[Treatment, ...]], count: int) -> tuple[Treatment, ...]:
    """Sums, objective by objective."""
    return reduce(lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)), rows, (Treatment(),) * count)


def add_overlaps(rows: Iterable[tuple[Overlap, ...]], count: int) -> tuple[Overlap, ...]:
    """Sums, pair by pair."""
    pairs = tuple(Overlap(first, second) for second in range(count) for first in range(second))
    return reduce(lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)), rows, pairs)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
