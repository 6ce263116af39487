"""The tokens of a recorded step with everything a report says about them, exactly and for any objective.

What a token does to an update is `coefficient` (how strongly the objective pushes its log-probability up) times what
the moments of its distribution say: `norm`, the length of the gradient of its log-probability in the logits, and `phi`,
by which it drives its own entropy. Coefficients are per token of the mini-batch, so that a plain token-mean gives the
advantage times the ratio.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from trimtab.insight.replay.batches import (
    as_tensor,
    gradient_coefficients,
    load_columns,
    new_log_probs,
    replan,
    set_controllers,
    to_token_batch,
    with_advantages_of,
)
from trimtab.insight.report.embed import Array
from trimtab.objectives import Objective, Plan, TokenBatch, theory
from trimtab.record import RecordedStep, RecordedUpdate, Records, read_step

_PLANNED = {
    "weight": "weight",
    "scale": "scale",
    "clip_low": "clip_low",
    "clip_high": "clip_high",
    "penalty": "penalty",
}


class Batched(NamedTuple):
    """A recorded update as the mini-batch it was, and the log-probabilities of its own pass."""

    update: RecordedUpdate
    batch: TokenBatch
    new_logp: torch.Tensor


@dataclass(frozen=True)
class Treated:
    """What an objective did, or would have done, with each token of a step; arrays over the step's tokens."""

    coefficient: Array
    advantage: Array
    weight: Array
    reason: Array
    clipped: Array
    clip_low: Array
    clip_high: Array


@dataclass(frozen=True)
class Measured:
    """A recorded step's tokens; NaN where the record lacks what a number is made of."""

    step: RecordedStep
    logp: Array
    entropy: Array
    sum_p2: Array
    sum_p2_logp: Array
    log_ratio: Array
    treated: Treated

    @cached_property
    def norm(self) -> Array:
        """sqrt(1 - 2p + sum p^2): the gradient of ln p in the logits."""
        return _numpy(theory.gradient_norm_squared(as_tensor(self.logp), as_tensor(self.sum_p2)).sqrt())

    @cached_property
    def phi(self) -> Array:
        """STARE's Phi: a push of ln p changes the entropy by minus this."""
        moments = (self.logp, self.entropy, self.sum_p2, self.sum_p2_logp)
        return _numpy(theory.phi(*(as_tensor(values) for values in moments)))

    @cached_property
    def beyond(self) -> Array:
        """Surprisal beyond the critical one, at which the entropy change turns its sign."""
        moments = (self.entropy, self.sum_p2, self.sum_p2_logp)
        return -self.logp - _numpy(theory.critical_surprisal(*(as_tensor(values) for values in moments)))

    @cached_property
    def gradient(self) -> Array:
        """The length of each token's gradient in the logits, under the recorded objective."""
        return np.abs(self.treated.coefficient) * self.norm

    @cached_property
    def entropy_change(self) -> Array:
        """The change of its own entropy that each token's push brings, to first order and per unit of step size."""
        return -self.treated.coefficient * self.phi


def open_step(records: Records, number: int) -> RecordedStep:
    """A step that is known to be recorded, both its tables checked."""
    info, files = read_step(records.folder, number)
    return RecordedStep(records, info, files).checked()


def measure(step: RecordedStep, objective: Objective | None) -> Measured:
    """A step's tokens under the objective that was recorded; without it coefficients are unknown."""
    load_columns(step, objective.needs if objective else ())
    judged = "current_logp" if "current_logp" in step.tokens else "old_logp"
    new = _column(step, "new_logp")
    moved = new - step.tokens["old_logp"]
    return Measured(
        step=step,
        logp=np.maximum(step.tokens[judged], np.float32(-1e4)),
        entropy=_column(step, "entropy"),
        sum_p2=_column(step, "sum_p2"),
        sum_p2_logp=_column(step, "sum_p2_logp"),
        log_ratio=np.where(np.isfinite(moved), moved, np.float32(np.nan)),
        treated=_as_recorded(step, objective),
    )


def batches_of(step: RecordedStep, needs: Iterable[str]) -> list[Batched]:
    """The step's mini-batches, with the fields that objectives need of them."""
    out = []
    for update in step.updates:
        if update.info.tokens:
            batch = to_token_batch(update, needs)
            out.append(Batched(update, batch, new_log_probs(update, batch)))
    return out


def treat(step: RecordedStep, objective: Objective, batches: Sequence[Batched]) -> Treated:
    """What another objective would have done with the step's mini-batches."""
    set_controllers(objective, step, recorded=False)
    parts = [_treat_update(batched, objective) for batched in batches]
    names = Treated.__dataclass_fields__
    return Treated(**{name: np.concatenate([part[name] for part in parts]) for name in names})


def _treat_update(batched: Batched, objective: Objective) -> dict[str, Array]:
    update, batch, new_logp = batched
    plans = replan(objective, with_advantages_of(batch, objective, update), update)
    coefficient, clipped = gradient_coefficients(objective, plans, new_logp)
    joined = {name: torch.cat([getattr(plan, name) for plan in plans]) for name in _OF_PLAN}
    return {
        "coefficient": _numpy(coefficient) * _per_token(update, batch),
        "clipped": _numpy(clipped),
        **{name: _numpy(values) for name, values in joined.items()},
    }


_OF_PLAN = ("advantage", "weight", "reason", "clip_low", "clip_high")


def _as_recorded(step: RecordedStep, objective: Objective | None) -> Treated:
    """The recorded plan as it stands in the record, and its coefficients at the recorded log-probabilities."""
    columns = step.tokens
    count = step.info.tokens
    return Treated(
        coefficient=np.full(count, np.nan, np.float32) if objective is None else _coefficients(step, objective),
        advantage=columns["planned_advantage" if "planned_advantage" in columns else "advantage"],
        weight=columns["weight"],
        reason=columns["reason"],
        clipped=columns["clipped"] if "clipped" in columns else np.zeros(count, bool),
        clip_low=columns["clip_low"],
        clip_high=columns["clip_high"],
    )


def _coefficients(step: RecordedStep, objective: Objective) -> Array:
    objective.load_state_dict(step.info.controllers)
    parts = [np.empty(0, np.float32)]
    for update, batch, new_logp in batches_of(step, objective.needs):
        plans = [_written(plan, update) for plan in replan(objective, batch, update)]
        push, _ = gradient_coefficients(objective, plans, new_logp)
        parts.append(_numpy(push) * _per_token(update, batch))
    return np.concatenate(parts)


def _written(plan: Plan, update: RecordedUpdate) -> Plan:
    """A plan with the numbers of the record: of a record with a share of the groups no plan comes out the same."""
    columns = update.step.tokens
    names = {
        **{name: name for name in _PLANNED},
        "advantage": "planned_advantage" if "planned_advantage" in columns else "advantage",
    }
    found: dict[str, Any] = {
        name: as_tensor(update.column(column)[plan.slice]) for name, column in names.items() if column in columns
    }
    return replace(plan, **found)


def _per_token(update: RecordedUpdate, batch: TokenBatch) -> np.float32:
    """The tokens of the mini-batch; of a record with a share of the groups, about so many."""
    return np.float32(batch.tokens * max(sum(update.info.micro_batches) / max(batch.responses, 1), 1.0))


def _column(step: RecordedStep, name: str) -> Array:
    values: Array = step.tokens[name] if name in step.tokens else np.full(step.info.tokens, np.nan, np.float32)
    return values


def _numpy(values: torch.Tensor) -> Array:
    array: Array = values.detach().numpy()
    return array
