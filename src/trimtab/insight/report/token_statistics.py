"""Statistics over all tokens that a report reads: entropy quantiles, and two heat maps.

The first heat map is over probability and entropy, the second over surprisal and advantage, whose quadrants tell in
which direction a token changes the entropy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trimtab.insight.report.embed import NumpyArray, encode_array
from trimtab.insight.report.token_table import StepTokenTable
from trimtab.objectives import Reason

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
REMOVED = Reason.SILENCED | Reason.MASKED | Reason.DROPPED

P_RANGE, P_BINS = (-6.0, 0.0), 60  # log10 of the probability
H_MAX, H_BINS = 6.0, 48  # entropy in nats
S_RANGE, S_BINS = (-4.0, 8.0), 60  # surprisal minus the critical surprisal
A_RANGE, A_BINS = (-3.0, 3.0), 48  # advantage
POPULATIONS = ("rewarded", "punished", "neutral", "silenced")
QUADRANTS = ("rewarded_expected", "rewarded_surprising", "punished_expected", "punished_surprising")


@dataclass
class TokenStatistics:
    """Sums over the steps added so far; `quadrants` has tokens, gradient norm and entropy change of each quadrant."""

    h_max: float
    probability_entropy: NumpyArray = field(
        default_factory=lambda: np.zeros((len(POPULATIONS), H_BINS, P_BINS), np.int64)
    )
    surprisal_advantage: NumpyArray = field(default_factory=lambda: np.zeros((A_BINS, S_BINS), np.int64))
    quadrants: NumpyArray = field(default_factory=lambda: np.zeros((len(QUADRANTS), 3)))
    steps: list[int] = field(default_factory=list)
    quantiles: list[list[float]] = field(default_factory=list)
    tokens: int = 0

    def add(self, table: StepTokenTable) -> None:
        """Add a step; one without recorded entropies only counts its tokens."""
        self.tokens += len(table.logp)
        if len(table.logp) and np.isfinite(table.entropy).all():
            self.steps.append(table.step.number)
            self.quantiles.append(np.quantile(table.entropy, QUANTILES).tolist())
            self._add_probability_entropy(table)
            self._add_quadrants(table)

    def _add_probability_entropy(self, table: StepTokenTable) -> None:
        x = _bins(table.logp / math.log(10), P_RANGE, P_BINS)
        y = _bins(table.entropy, (0.0, self.h_max), H_BINS)
        advantage = table.effects.advantage
        # The first three partition the tokens; removed ones are also in one of them.
        removed = (table.effects.reason & int(REMOVED)) != 0
        for row, mask in enumerate((advantage > 0, advantage < 0, advantage == 0, removed)):
            self.probability_entropy[row] += _histogram(y[mask], x[mask], H_BINS, P_BINS)

    def _add_quadrants(self, table: StepTokenTable) -> None:
        excess, advantage = table.excess_surprisal, table.effects.advantage
        if not np.isfinite(excess).all():
            return
        x, y = _bins(excess, S_RANGE, S_BINS), _bins(advantage, A_RANGE, A_BINS)
        signal = advantage != 0
        self.surprisal_advantage += _histogram(y[signal], x[signal], A_BINS, S_BINS)
        # The code is the index in QUADRANTS.
        quadrant = np.where(advantage > 0, 0, 2) + (excess > 0)
        for column, weights in enumerate((None, table.grad_norm[signal], table.entropy_change[signal])):
            self.quadrants[:, column] += np.bincount(quadrant[signal], weights, len(QUADRANTS))

    def to_json(self) -> dict[str, Any]:
        """Return the statistics for the page."""
        quantiles = np.array(self.quantiles, np.float32).reshape(-1, len(QUANTILES))
        populations = zip(POPULATIONS, self.probability_entropy, strict=True)
        return {
            "tokens": self.tokens,
            "entropy_quantiles": {
                "steps": encode_array(self.steps, "i4"),
                "quantiles": QUANTILES,
                "values": [encode_array(column) for column in quantiles.T],
            },
            "probability_entropy": {
                "x": [*P_RANGE, P_BINS],
                "y": [0.0, self.h_max, H_BINS],
                "counts": {name: encode_array(counts.ravel(), "i4") for name, counts in populations},
            },
            "quadrants": {
                "x": [*S_RANGE, S_BINS],
                "y": [*A_RANGE, A_BINS],
                "counts": encode_array(self.surprisal_advantage.ravel(), "i4"),
                "sums": {name: self.quadrants[row].tolist() for row, name in enumerate(QUADRANTS)},
            },
        }


def _bins(values: NumpyArray, limits: tuple[float, float], count: int) -> NumpyArray:
    """Return the bin of each value; values outside the limits go into the outermost bins."""
    low, high = limits
    return np.clip((values - low) * (count / (high - low)), 0, count - 1).astype(np.int64)


def _histogram(y: NumpyArray, x: NumpyArray, rows: int, columns: int) -> NumpyArray:
    return np.bincount(y * columns + x, minlength=rows * columns).reshape(rows, columns)
