"""The results of a replay as values that add up over the updates of a step and the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from trimtab.objectives import Reason

CLIPPED = "clipped"
# Reasons for which a token counts as touched; the others (no signal, corrected, widened, narrowed) hold for most.
TOUCHING_REASONS = Reason.SILENCED | Reason.BOOSTED | Reason.DAMPED | Reason.MASKED | Reason.DROPPED
TOUCHING_REASONS |= Reason.PENALIZED | Reason.RESHAPED


@dataclass(frozen=True, slots=True)
class GradientMass:
    """A number of tokens, their gradient mass before and after the objective's rules, and the sum of their weights.

    A token's mass is the exact norm of its gradient in the logits: `|A| |1[k] - p|` before (advantage alone), with the
    objective's own coefficient in place of `A` after. Sums are per token of an update, added over updates.
    """

    tokens: int = 0
    before: float = 0.0
    after: float = 0.0
    weight: float = 0.0

    def __add__(self, other: GradientMass) -> GradientMass:
        masses = self.before + other.before, self.after + other.after
        return GradientMass(self.tokens + other.tokens, *masses, self.weight + other.weight)


@dataclass(frozen=True, slots=True)
class ObjectiveStats:
    """What an objective does to the tokens of an update, a step or a run.

    `reasons` has an entry for each reason that occurs, and for `clipped`; a token can have several. `touched` are the
    tokens that are clipped, silenced, boosted, damped, masked, dropped, penalized or reshaped.
    `entropy_change` is the predicted first-order change of the entropy per unit of step size, added over `updates`.
    """

    updates: int = 0
    tokens: int = 0
    touched: int = 0
    total: GradientMass = GradientMass()
    entropy_change: float = 0.0
    reasons: dict[str, GradientMass] = field(default_factory=dict)

    def __add__(self, other: ObjectiveStats) -> ObjectiveStats:
        # A reason may occur in one of the two only.
        names, none = {**self.reasons, **other.reasons}, GradientMass()
        return ObjectiveStats(
            self.updates + other.updates,
            self.tokens + other.tokens,
            self.touched + other.touched,
            self.total + other.total,
            self.entropy_change + other.entropy_change,
            {name: self.reasons.get(name, none) + other.reasons.get(name, none) for name in names},
        )

    def share(self, reason: str) -> float:
        """Return the share of tokens with a reason."""
        return _ratio(self.reasons.get(reason, GradientMass()).tokens, self.tokens)

    def mass(self, reason: str) -> float:
        """Return the share of the gradient mass, before the objective's rules, of tokens with a reason."""
        return _ratio(self.reasons.get(reason, GradientMass()).before, self.total.before)

    def mass_after(self, reason: str) -> float:
        """Return the same share after the objective's rules."""
        return _ratio(self.reasons.get(reason, GradientMass()).after, self.total.after)

    def weight(self, reason: str) -> float:
        """Return the mean weight of the tokens with a reason."""
        found = self.reasons.get(reason, GradientMass())
        return _ratio(found.weight, found.tokens)

    @property
    def entropy_change_per_update(self) -> float:
        """Return the predicted entropy change, mean over updates."""
        return _ratio(self.entropy_change, self.updates)


@dataclass(frozen=True, slots=True)
class TokenOverlap:
    """How many tokens two objectives (by index) both touch, either touches, and both touch for the same reasons."""

    first: int
    second: int
    both: int = 0
    either: int = 0
    agreed: int = 0

    def __add__(self, other: TokenOverlap) -> TokenOverlap:
        counts = self.both + other.both, self.either + other.either, self.agreed + other.agreed
        return TokenOverlap(self.first, self.second, *counts)

    @property
    def jaccard(self) -> float:
        """Return tokens touched by both over tokens touched by either; NaN if neither touches any."""
        return _ratio(self.both, self.either)

    @property
    def agreement(self) -> float:
        """Return, of the tokens that both touch, the share with the same reasons."""
        return _ratio(self.agreed, self.both)


Stats = tuple[ObjectiveStats, ...]  # of each objective
Overlaps = tuple[TokenOverlap, ...]  # of each pair


@dataclass(frozen=True, slots=True)
class StepReplay:
    """A step: the stats of each objective, and the overlap of each pair.

    `exact` if all of the step is recorded; `has_new_logp` if the updates' own log-probabilities are, without which
    nothing is known to be clipped; `device` is that of the run.
    """

    step: int
    tokens: int
    exact: bool
    has_new_logp: bool
    device: str
    stats: Stats
    overlaps: Overlaps


@dataclass(frozen=True, slots=True)
class Replay:
    """A run under several objectives, step by step and in sum; `notes` name the limits of what was recorded."""

    run: str
    recorded: str
    objectives: tuple[str, ...]
    steps: tuple[StepReplay, ...]
    stats: Stats
    overlaps: Overlaps
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Return whether every plan is the one that the objective would have made in the run."""
        return all(step.exact for step in self.steps)


def add_up(rows: Iterable[tuple[Stats, Overlaps]], count: int) -> tuple[Stats, Overlaps]:
    """Add up the stats of `count` objectives and the overlaps of their pairs over updates or steps."""
    # From zeros, so that a step without updates has stats too.
    stats: Stats = (ObjectiveStats(),) * count
    overlaps: Overlaps = tuple(TokenOverlap(first, second) for second in range(count) for first in range(second))
    for more_stats, more_overlaps in rows:
        stats = tuple(a + b for a, b in zip(stats, more_stats, strict=True))
        overlaps = tuple(a + b for a, b in zip(overlaps, more_overlaps, strict=True))
    return stats, overlaps


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
