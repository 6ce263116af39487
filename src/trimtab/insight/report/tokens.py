"""The tokens of a recorded step with every number that a report shows, and statistics over the steps that it reads.

A token's part in an update is its `coefficient`, minus d loss / d log-prob times the number of tokens of the mini-batch
(for a plain token-mean: advantage x ratio), times two numbers of its distribution: the norm of d log-prob / d logits,
and STARE's `phi`, by which the token changes the entropy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from trimtab.insight.replay import (
    RecordedMiniBatch,
    TokenEffects,
    as_tensor,
    gradient_coefficients,
    load_columns,
    recorded_mini_batch,
    replan,
    set_controllers,
    token_effects,
    with_advantages_of,
)
from trimtab.insight.report.embed import NumpyArray, encode_array
from trimtab.objectives import Objective, Plan, Reason, theory
from trimtab.record import RecordedStep, RecordedUpdate

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
REMOVED = Reason.SILENCED | Reason.MASKED | Reason.DROPPED

P_RANGE, P_BINS = (-6.0, 0.0), 60  # log10 of the probability
H_MAX, H_BINS = 6.0, 48  # entropy in nats
S_RANGE, S_BINS = (-4.0, 8.0), 60  # surprisal minus the critical surprisal
A_RANGE, A_BINS = (-3.0, 3.0), 48  # advantage
POPULATIONS = ("rewarded", "punished", "neutral", "silenced")
QUADRANTS = tuple(quadrant.name.lower() for quadrant in theory.Quadrant if quadrant)


@dataclass(frozen=True)
class StepTokenTable:
    """A recorded step's tokens and the effects of its own objective; NaN if a column is not recorded."""

    step: RecordedStep
    logp: NumpyArray
    entropy: NumpyArray
    sum_p2: NumpyArray
    sum_p2_logp: NumpyArray
    log_ratio: NumpyArray
    batches: list[RecordedMiniBatch]
    effects: TokenEffects

    @cached_property
    def logp_grad_norm(self) -> NumpyArray:
        """Return sqrt(1 - 2p + sum p^2), the norm of d log-prob / d logits."""
        return theory.gradient_norm_squared(as_tensor(self.logp), as_tensor(self.sum_p2)).sqrt().numpy()

    @cached_property
    def phi(self) -> NumpyArray:
        """Return STARE's Phi: raising the log-prob changes the entropy by minus this."""
        moments = (self.logp, self.entropy, self.sum_p2, self.sum_p2_logp)
        return theory.phi(*map(as_tensor, moments)).numpy()

    @cached_property
    def critical_surprisal(self) -> NumpyArray:
        """Return the surprisal at which the entropy change changes its sign."""
        moments = (self.entropy, self.sum_p2, self.sum_p2_logp)
        return theory.critical_surprisal(*map(as_tensor, moments)).numpy()

    @cached_property
    def grad_norm(self) -> NumpyArray:
        """Return the norm of each token's gradient in the logits, under the recorded objective."""
        norm: NumpyArray = np.abs(self.effects.coefficient) * self.logp_grad_norm
        return norm

    @cached_property
    def entropy_change(self) -> NumpyArray:
        """Return the predicted first-order change of each token's entropy, per unit of step size."""
        return -self.effects.coefficient * self.phi


def token_table(step: RecordedStep, objective: Objective | None) -> StepTokenTable:
    """Return a step's tokens under the recorded objective; without it coefficients are NaN."""
    load_columns(step, objective.needs if objective else ())
    batches = mini_batches(step, objective.needs) if objective else []
    # The log-probabilities by which the run judged its tokens.
    judged = "current_logp" if "current_logp" in step.tokens else "old_logp"
    log_ratio = _column(step, "new_logp") - step.tokens["old_logp"]
    return StepTokenTable(
        step=step,
        logp=np.maximum(step.tokens[judged], np.float32(-1e4)),  # -inf would make NaN of every product with 0
        entropy=_column(step, "entropy"),
        sum_p2=_column(step, "sum_p2"),
        sum_p2_logp=_column(step, "sum_p2_logp"),
        log_ratio=np.where(np.isfinite(log_ratio), log_ratio, np.float32(np.nan)),
        batches=batches,
        effects=_recorded_effects(step, objective, batches),
    )


def mini_batches(step: RecordedStep, needs: Iterable[str]) -> list[RecordedMiniBatch]:
    """Return the step's mini-batches that have tokens, with the fields that objectives need."""
    return [recorded_mini_batch(update, needs) for update in step.updates if update.info.tokens]


def step_effects(step: RecordedStep, objective: Objective, batches: Sequence[RecordedMiniBatch]) -> TokenEffects:
    """Return what another objective would have done with the step's mini-batches."""
    # An adaptive gate observes this step only: the microscope does not read the steps before it.
    set_controllers(objective, step, recorded=False)
    effects = []
    for recorded in batches:
        found = token_effects(objective, with_advantages_of(recorded.batch, objective, recorded.update), recorded)
        effects.append(replace(found, coefficient=found.coefficient * _tokens_in_mini_batch(recorded)))
    names = TokenEffects.__dataclass_fields__
    return TokenEffects(**{name: np.concatenate([getattr(one, name) for one in effects]) for name in names})


def _recorded_effects(
    step: RecordedStep, objective: Objective | None, batches: Sequence[RecordedMiniBatch]
) -> TokenEffects:
    """Return the recorded plan, and its coefficients at the recorded log-probabilities."""
    columns = step.tokens
    count = step.info.tokens  # optional columns may be missing
    unknown = np.full(count, np.nan, np.float32)
    return TokenEffects(
        coefficient=unknown if objective is None else _coefficients(step, objective, batches),
        advantage=columns[_advantage_column(step)],
        weight=columns["weight"],
        reason=columns["reason"],
        clipped=columns["clipped"] if "clipped" in columns else np.zeros(count, bool),
        clip_low=columns["clip_low"],
        clip_high=columns["clip_high"],
    )


def _coefficients(step: RecordedStep, objective: Objective, batches: Sequence[RecordedMiniBatch]) -> NumpyArray:
    set_controllers(objective, step, recorded=True)
    coefficients = [np.empty(0, np.float32)]
    for recorded in batches:
        plans = replan(objective, recorded.batch, recorded.update)
        plans = [_with_recorded_values(plan, recorded.update) for plan in plans]
        coefficient, _ = gradient_coefficients(objective, plans, recorded.new_logp)
        coefficients.append(coefficient.numpy() * _tokens_in_mini_batch(recorded))
    return np.concatenate(coefficients)


def _with_recorded_values(plan: Plan, update: RecordedUpdate) -> Plan:
    """Return the plan with its recorded values, which a record of a share of the groups cannot reproduce."""
    columns = {name: name for name in ("weight", "scale", "clip_low", "clip_high", "penalty")}
    columns["advantage"] = _advantage_column(update.step)
    present = {name: column for name, column in columns.items() if column in update.step.tokens}
    values: dict[str, Any] = {name: as_tensor(update.column(column)[plan.slice]) for name, column in present.items()}
    return replace(plan, **values)


def _advantage_column(step: RecordedStep) -> str:
    return "planned_advantage" if "planned_advantage" in step.tokens else "advantage"


def _tokens_in_mini_batch(recorded: RecordedMiniBatch) -> np.float32:
    # A record of a share of the groups holds fewer responses than the mini-batch had: tokens are scaled up.
    responses = sum(recorded.update.info.micro_batches)
    return np.float32(recorded.batch.tokens * max(responses / max(recorded.batch.responses, 1), 1.0))


def _column(step: RecordedStep, name: str) -> NumpyArray:
    return step.tokens[name] if name in step.tokens else np.full(step.info.tokens, np.nan, np.float32)


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
        critical = table.critical_surprisal
        advantage = table.effects.advantage
        if not np.isfinite(critical).all():
            return
        x, y = _bins(-table.logp - critical, S_RANGE, S_BINS), _bins(advantage, A_RANGE, A_BINS)
        signal = advantage != 0
        self.surprisal_advantage += _histogram(y[signal], x[signal], A_BINS, S_BINS)
        quadrant = theory.quadrant(*map(as_tensor, (advantage, table.logp, critical))).numpy()
        # The first code of `theory.Quadrant` is the neutral one.
        for column, weights in enumerate((None, table.grad_norm[signal], table.entropy_change[signal])):
            self.quadrants[:, column] += np.bincount(quadrant[signal], weights, len(QUADRANTS) + 1)[1:]

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
