"""Between verl's nested tensors and token vectors: packing them, and a plan as columns that travel with the data.

A column is a nested tensor with one value per response token, tool output included; only tokens that the policy sampled
(`response_mask` 1) are packed, planned over and trained on, the others hold nought.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.objectives import Objective, Plan, TokenBatch, segment_ids

PREFIX = "trimtab_"
UPDATE, TOKENS = (
    f"{PREFIX}update",
    f"{PREFIX}tokens",
)  # per response: which update of the step, tokens in its mini-batch
SENT = f"{PREFIX}columns"  # per batch: the names of the columns that were sent, so that none is lost in silence

# What verl calls the optional fields of a TokenBatch; the driver makes `segment` from the token ids.
FIELDS = {
    "entropy": "entropy",
    "sampler_logp": "rollout_log_probs",
    "ref_logp": "ref_log_prob",
    "segment": "responses",
    "token": "responses",
}

Nested = Any  # a jagged nested tensor, whose methods torch does not type


@dataclass(frozen=True)
class Sampled:
    """Where the tokens that the policy sampled sit in nested tensors of one shape, row by row in a chosen order."""

    index: Tensor
    sequence: Tensor
    offsets: Tensor
    responses: int

    def pack(self, nested: Nested) -> Tensor:
        """Their values in a nested tensor. Gradients pass."""
        packed: Tensor = nested.values().index_select(0, self.index)
        return packed

    def unpack(self, packed: Tensor) -> Nested:
        """A nested tensor with these values, and nought where the policy sampled nothing."""
        flat = packed.new_zeros(int(self.offsets[-1])).index_copy(0, self.index, packed)
        return torch.nested.nested_tensor_from_jagged(flat, self.offsets)


def sampled(response_mask: Nested, rows: Sequence[int] | None = None) -> Sampled:
    """The sampled tokens of a nested mask, of all rows in turn or of `rows` in theirs."""
    offsets = response_mask.offsets()
    order = torch.arange(len(offsets) - 1) if rows is None else torch.tensor(list(rows), dtype=torch.int64)
    order = order.to(offsets.device)
    lengths = offsets.diff()[order]
    before = lengths.cumsum(0) - lengths
    places = (offsets[order] - before).repeat_interleave(lengths) + torch.arange(
        int(lengths.sum()), device=offsets.device
    )
    kept = response_mask.values().index_select(0, places).bool()
    number = torch.arange(len(order), device=offsets.device).repeat_interleave(lengths)
    return Sampled(places[kept], number[kept], offsets, len(order))


def token_batch(data: Mapping[str, Nested], where: Sampled, names: Iterable[str], tokenizer: Any) -> TokenBatch:
    """The token batch of verl's fields, with those optional ones that are named."""
    given: dict[str, Any] = {name: where.pack(data[FIELDS[name]]) for name in names}
    if "segment" in given:
        given["segment"] = subsentences(given["segment"], where, tokenizer)
    return TokenBatch(
        old_logp=where.pack(data["old_log_probs"]),
        advantage=where.pack(data["advantages"]),
        sequence=where.sequence,
        responses=where.responses,
        **given,
    )


def subsentences(token: Tensor, where: Sampled, tokenizer: Any) -> Tensor:
    """Segment ids from 0 in every response; the output of a tool ends a segment too."""
    resumes = torch.diff(where.index, prepend=where.index[:1] - 1) != 1
    begins = torch.diff(where.sequence, prepend=where.sequence[:1] - 1) != 0
    turn = (resumes | begins).cumsum(0)
    within = segment_ids(token, tokenizer, sequence=turn - turn[:1])
    starts = torch.diff(within, prepend=within[:1] - 1) != 0
    number = (starts | resumes | begins).cumsum(0)
    first = number[begins]
    return number - first.repeat_interleave(torch.diff(begins.nonzero().squeeze(1), append=_end(token)))


def _end(token: Tensor) -> Tensor:
    return torch.full((1,), len(token), device=token.device)


def plan_columns(objective: Objective, batch: TokenBatch, plans: Sequence[Plan]) -> dict[str, Tensor]:
    """What the plans of a batch's consecutive mini-batches decided, without what goes without saying.

    A weight of 1, the method's own clip range and the advantage as it came are not sent: for most methods two columns
    are left. `segment` goes along where tokens share a ratio.
    """

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(plan, name) for plan in plans])

    columns = {"scale": joined("scale")}
    usual: dict[str, Tensor | float] = {
        "advantage": batch.advantage,
        "weight": 1.0,
        "clip_low": objective.surrogate.clip_low,
        "clip_high": objective.surrogate.clip_high,
    }
    for name, value in usual.items():
        column = joined(name)
        if not bool((column == value).all()):
            columns[name] = column
    if plans[0].penalty is not None:
        columns["penalty"] = joined("penalty")
    if objective.ratio.level == "segment":
        assert batch.segment is not None
        columns["segment"] = batch.segment.to(torch.int32)
    return columns


def part_plan(objective: Objective, data: Mapping[str, Any], where: Sampled) -> Plan:
    """The plan of the responses of one forward pass, from the columns that travelled with them."""
    sent = str(data[SENT]).split(",")
    lost = [name for name in sent if f"{PREFIX}{name}" not in data.keys()]  # noqa: SIM118  (a TensorDict)
    if lost:
        raise RuntimeError(f"trimtab: the columns {', '.join(lost)} of the plan did not reach this worker")
    column = {name: where.pack(data[f"{PREFIX}{name}"]) for name in sent}
    batch = TokenBatch(
        old_logp=where.pack(data["old_log_probs"]),
        advantage=column["advantage"] if "advantage" in column else where.pack(data["advantages"]),
        sequence=where.sequence,
        segment=column.get("segment"),
        ref_logp=where.pack(data["ref_log_prob"]) if "ref_logp" in objective.needs else None,
        responses=where.responses,
    )

    def or_else(name: str, value: float) -> Tensor:
        return column[name] if name in column else torch.full_like(batch.old_logp, value)

    return Plan(
        old_logp=batch.old_logp,
        advantage=batch.advantage,
        weight=or_else("weight", 1.0),
        scale=column["scale"],
        clip_low=or_else("clip_low", objective.surrogate.clip_low),
        clip_high=or_else("clip_high", objective.surrogate.clip_high),
        reason=torch.zeros_like(batch.sequence, dtype=torch.int16),
        spans=objective.ratio.spans(batch),
        penalty=column.get("penalty"),
        ref_logp=batch.ref_logp,
        offsets=batch.offsets,
        tokens_in_minibatch=int(data[TOKENS][0]),
    )
