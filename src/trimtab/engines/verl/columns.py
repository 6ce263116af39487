"""Convert between verl's nested tensors and packed token vectors, and send plans to workers as fields of the batch.

A field is a nested tensor with one value per response token, tool output included. Only tokens that the policy sampled
(`response_mask` 1) are packed, planned and trained on; the others hold 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.engines import common
from trimtab.objectives import Objective, Plan, TokenBatch

PREFIX = "trimtab_"
UPDATE = f"{PREFIX}update"  # per response: which update of the step
MINIBATCH_TOKENS = f"{PREFIX}tokens"  # per response: tokens in its mini-batch
# Per batch: the names of the columns that were sent. A column that is not sent stands for its default, so a worker
# could not tell a lost column from one that was left out.
SENT_COLUMNS = f"{PREFIX}columns"

# verl's fields for the optional columns of a TokenBatch; the driver makes `segment` from the token ids.
VERL_FIELDS = {
    "entropy": "entropy",
    "sampler_logp": "rollout_log_probs",
    "ref_logp": "ref_log_prob",
    "segment": "responses",
    "token": "responses",
}

Nested = Any  # a jagged nested tensor; torch has no type for its methods


@dataclass(frozen=True)
class SampledTokens:
    """The positions of the sampled tokens in nested tensors of one shape, in a given order of rows."""

    index: Tensor
    sequence: Tensor
    offsets: Tensor
    responses: int

    def pack(self, nested: Nested) -> Tensor:
        """Return the values of the sampled tokens of a nested tensor; differentiable."""
        packed: Tensor = nested.values().index_select(0, self.index)
        return packed

    def unpack(self, packed: Tensor) -> Nested:
        """Return a nested tensor with these values at the sampled tokens and 0 elsewhere."""
        flat = packed.new_zeros(int(self.offsets[-1])).index_copy(0, self.index, packed)
        return torch.nested.nested_tensor_from_jagged(flat, self.offsets)


def sampled_tokens(response_mask: Nested, rows: Sequence[int] | None = None) -> SampledTokens:
    """Find the sampled tokens of a nested mask, in the order of `rows` (None: all rows in turn)."""
    offsets = response_mask.offsets()
    order = torch.arange(len(offsets) - 1) if rows is None else torch.tensor(list(rows), dtype=torch.int64)
    order = order.to(offsets.device)
    lengths = offsets.diff()[order]
    # Flat positions of all tokens of the rows in their new order, without a loop over rows.
    before = lengths.cumsum(0) - lengths
    within = torch.arange(int(lengths.sum()), device=offsets.device)
    index = (offsets[order] - before).repeat_interleave(lengths) + within
    mask = response_mask.values().index_select(0, index).bool()
    sequence = torch.arange(len(order), device=offsets.device).repeat_interleave(lengths)
    return SampledTokens(index[mask], sequence[mask], offsets, len(order))


def token_batch(data: Mapping[str, Nested], sampled: SampledTokens, names: Iterable[str], tokenizer: Any) -> TokenBatch:
    """Make a `TokenBatch` of verl's fields, with the optional columns `names`."""
    optional: dict[str, Any] = {name: sampled.pack(data[VERL_FIELDS[name]]) for name in names}
    if "segment" in optional:
        optional["segment"] = common.segments_by_turn(optional["segment"], sampled.index, sampled.sequence, tokenizer)
    return TokenBatch(
        old_logp=sampled.pack(data["old_log_probs"]),
        advantage=sampled.pack(data["advantages"]),
        sequence=sampled.sequence,
        responses=sampled.responses,
        **optional,
    )


def plan_columns(objective: Objective, batch: TokenBatch, plans: Sequence[Plan]) -> dict[str, Tensor]:
    """Return the columns of the plans of a batch's consecutive mini-batches that workers cannot derive themselves.

    A weight of 1, the method's own clip range and an unchanged advantage are not sent: most methods send one or two
    columns. `segment` is sent if tokens of a segment share a ratio.
    """

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(plan, name) for plan in plans])

    columns = {"scale": joined("scale")}
    defaults: dict[str, Tensor | float] = {
        "advantage": batch.advantage,
        "weight": 1.0,
        "clip_low": objective.surrogate.clip_low,
        "clip_high": objective.surrogate.clip_high,
    }
    for name, value in defaults.items():
        column = joined(name)
        if not bool((column == value).all()):  # a column costs bandwidth to every worker
            columns[name] = column
    if plans[0].penalty is not None:
        columns["penalty"] = joined("penalty")
    if objective.ratio.level == "segment":
        assert batch.segment is not None
        columns["segment"] = batch.segment.to(torch.int32)
    return columns


def micro_batch_plan(objective: Objective, data: Mapping[str, Any], sampled: SampledTokens) -> Plan:
    """Rebuild the plan of a micro-batch on a worker from the columns that were sent with its responses."""
    sent = str(data[SENT_COLUMNS]).split(",")
    lost = [name for name in sent if f"{PREFIX}{name}" not in data.keys()]  # noqa: SIM118  (a TensorDict)
    if lost:
        raise RuntimeError(f"trimtab: the columns {', '.join(lost)} of the plan did not reach this worker")
    column = {name: sampled.pack(data[f"{PREFIX}{name}"]) for name in sent}
    batch = TokenBatch(
        old_logp=sampled.pack(data["old_log_probs"]),
        advantage=column["advantage"] if "advantage" in column else sampled.pack(data["advantages"]),
        sequence=sampled.sequence,
        segment=column.get("segment"),
        ref_logp=sampled.pack(data["ref_log_prob"]) if "ref_logp" in objective.needs else None,
        responses=sampled.responses,
    )

    def column_or(name: str, value: float) -> Tensor:
        return column[name] if name in column else torch.full_like(batch.old_logp, value)

    return Plan(
        old_logp=batch.old_logp,
        advantage=batch.advantage,
        weight=column_or("weight", 1.0),
        scale=column["scale"],
        clip_low=column_or("clip_low", objective.surrogate.clip_low),
        clip_high=column_or("clip_high", objective.surrogate.clip_high),
        # Only the driver needs reasons, for the record.
        reason=torch.zeros_like(batch.sequence, dtype=torch.int16),
        spans=objective.ratio.spans(batch),
        penalty=column.get("penalty"),
        ref_logp=batch.ref_logp,
        offsets=batch.offsets,
        tokens_in_minibatch=int(data[MINIBATCH_TOKENS][0]),
    )
