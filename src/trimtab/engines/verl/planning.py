"""Plans in verl: made on the driver, sent to the workers as fields of the batch, and read there by the loss.

A field is a nested tensor with one value per response token, tool output included. Only tokens that the policy sampled
(`response_mask` 1) are packed, planned and trained on; the others hold 0.

verl gives each rank an equal, consecutive chunk of the batch's rows, and each update trains on an equal share of every
chunk. The rows of a mini-batch are therefore spread over the batch; they are gathered here by update, rank and row. The
loss refuses batches without a plan, and batches that verl has split into other mini-batches than were planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import response_from_nested

from trimtab.engines import common
from trimtab.objectives import Objective, Plan, TokenBatch
from trimtab.own_parts import look_beside
from trimtab.trainer.config import build_objective

METRIC_PREFIX = "trimtab/"
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


def token_batch(
    data: Mapping[str, Nested],
    sampled: SampledTokens,
    names: Iterable[str],
    tokenizer: Any,
    rollouts: Sequence[int] | None = None,
) -> TokenBatch:
    """Make a `TokenBatch` of verl's fields, with the optional columns `names`; `rollouts` are in the batch's order."""
    optional: dict[str, Any] = {name: sampled.pack(data[VERL_FIELDS[name]]) for name in names}
    if "segment" in optional:
        optional["segment"] = common.segments_by_turn(optional["segment"], sampled.index, sampled.sequence, tokenizer)
    return TokenBatch(
        old_logp=sampled.pack(data["old_log_probs"]),
        advantage=sampled.pack(data["advantages"]),
        sequence=sampled.sequence,
        responses=sampled.responses,
        rollout=None if rollouts is None else torch.tensor(rollouts),
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
    for name in ("penalty", "entropy_coef"):
        if getattr(plans[0], name) is not None:
            columns[name] = joined(name)
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
        entropy_coef=column.get("entropy_coef"),
        ref_logp=batch.ref_logp,
        offsets=batch.offsets,
        tokens_in_minibatch=int(data[MINIBATCH_TOKENS][0]),
    )


@dataclass(frozen=True)
class PlannedStep:
    """The plans of a step: the rows of each update, the tokens in that order, and the fields for the workers."""

    rows: list[list[int]]
    sampled: SampledTokens
    tokens: TokenBatch
    plans: list[Plan]
    fields: dict[str, Any]
    sent: str

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics of the plans, each the mean over the updates that have it."""
        found: dict[str, list[float]] = {}
        for plan in self.plans:
            for name, value in plan.metrics.items():
                found.setdefault(name, []).append(float(value))
        return {f"{METRIC_PREFIX}{name}": sum(values) / len(values) for name, values in found.items()}


def fields_read(names: Iterable[str]) -> list[str]:
    """Return the fields of verl's data for optional columns of a `TokenBatch`, and those that every plan reads."""
    return sorted({VERL_FIELDS[name] for name in names} | {"response_mask", "old_log_probs", "advantages"})


def plan_step(
    objective: Objective,
    data: Mapping[str, Nested],
    minibatch: int,
    ranks: int,
    tokenizer: Any,
    recorded: Iterable[str] = (),
    rollouts: Sequence[int] | None = None,
) -> PlannedStep:
    """Let the controllers observe the batch, and plan its mini-batches of `minibatch` responses.

    `recorded` are columns that the recorder needs besides those that the objective reads. `rollouts` has an id for
    each row if several rows can be the branches of one rollout.
    """
    # Tokens in the order of the updates, so that a mini-batch is a slice.
    rows = minibatch_rows(len(data["response_mask"]), minibatch, ranks)
    order = [row for update in rows for row in update]
    sampled = sampled_tokens(data["response_mask"], order)
    ids = None if rollouts is None else [rollouts[row] for row in order]
    tokens = token_batch(data, sampled, {*objective.needs, *recorded}, tokenizer, ids)
    objective.observe(tokens)
    plans = [objective.plan(tokens.select(n, n + minibatch)) for n in range(0, tokens.responses, minibatch)]
    planned = plan_columns(objective, tokens, plans)
    fields = {f"{PREFIX}{name}": sampled.unpack(column) for name, column in planned.items()}
    return PlannedStep(rows, sampled, tokens, plans, fields | _per_response(rows, plans), ",".join(planned))


def minibatch_rows(responses: int, minibatch: int, ranks: int) -> list[list[int]]:
    """Return the rows of every update, as verl splits them.

    verl pads a batch until it divides evenly; one that does not is an error, because its plan would not fit.
    """
    if minibatch < 1 or ranks < 1 or responses % minibatch or minibatch % ranks:
        raise ValueError(
            f"a batch of {responses} responses cannot be split into mini-batches of {minibatch} on {ranks} ranks: make "
            "train_batch_size a multiple of ppo_mini_batch_size, and ppo_mini_batch_size * rollout.n one of the ranks"
        )
    chunk, share = responses // ranks, minibatch // ranks
    return [
        [rank * chunk + update * share + n for rank in range(ranks) for n in range(share)]
        for update in range(responses // minibatch)
    ]


@dataclass(frozen=True)
class Place:
    """Where a row of verl's batch comes from: its prompt, which of the prompt's rollouts, and which output of that."""

    prompt: str
    rollout: int
    branch: int


def places(keys: Sequence[str]) -> list[Place]:
    """Read the places of rows from verl's keys: `PROMPT_ROLLOUT_OUTPUT`."""
    parts = [key.rsplit("_", 2) for key in keys]
    return [Place(prompt, int(rollout), int(branch)) for prompt, rollout, branch in parts]


def _per_response(rows: Sequence[list[int]], plans: Sequence[Plan]) -> dict[str, Tensor]:
    """Return the update of each response and the tokens in its mini-batch, in verl's order of rows."""
    update = torch.empty(sum(map(len, rows)), dtype=torch.int64)
    tokens = torch.empty_like(update)
    for number, (indices, plan) in enumerate(zip(rows, plans, strict=True)):
        update[indices], tokens[indices] = number, plan.tokens
    return {UPDATE: update, MINIBATCH_TOKENS: tokens}


@dataclass(frozen=True)
class PlannedLoss:
    """A loss function for verl. It holds the objective's table, which pickles; every worker builds the objective.

    `folders` is where the driver looks for a method of the user's own (`python:MODULE:NAME`).
    """

    table: Mapping[str, Any]
    folders: tuple[str, ...] = ()

    @cached_property
    def objective(self) -> Objective:
        """Build the objective, on the worker at the first call."""
        for folder in reversed(self.folders):
            look_beside(folder)
        return build_objective(self.table)

    def __call__(
        self, model_output: Mapping[str, Any], data: Any, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss of one micro-batch and its metrics."""
        _check(data)
        sampled = sampled_tokens(data["response_mask"])
        new_logp = sampled.pack(response_from_nested(model_output["log_probs"], data["response_mask"]))
        entropy = None
        if self.objective.needs_entropy_grad and model_output.get("entropy") is not None:
            entropy = sampled.pack(response_from_nested(model_output["entropy"], data["response_mask"]))
        ranks = int(data["dp_size"])
        # verl's engine may call this under autocast, but ratios must be computed in float32.
        with torch.autocast(device_type=new_logp.device.type, enabled=False):
            out = self.objective.loss(new_logp, micro_batch_plan(self.objective, data, sampled), entropy)
            loss = out.loss * ranks  # engines average gradients over ranks, and our losses add up
        # verl expects the same metrics from every micro-batch: one without tokens has a ratio of 1.
        metrics = dict.fromkeys(("update/ratio_min", "update/ratio_max"), torch.ones(())) | out.metrics
        return loss, {f"{METRIC_PREFIX}{name}": metric(name, value, ranks) for name, value in metrics.items()}


def metric(name: str, value: Tensor, ranks: int) -> Any:
    """Wrap a metric for verl, which sums over micro-batches and averages over ranks."""
    for ending, kind in (("_max", AggregationType.MAX), ("_min", AggregationType.MIN)):
        if name.endswith(ending):
            return Metric(kind, value)
    return Metric(AggregationType.SUM, value * ranks)


def _check(data: Any) -> None:
    """Raise an error unless the data hold the plan of this mini-batch."""
    if SENT_COLUMNS not in data.keys() or UPDATE not in data.keys():  # noqa: SIM118  (a TensorDict)
        raise RuntimeError(
            "trimtab: the data of this update hold no plan: the driver must run trainer.v1.trainer_mode=trimtab"
        )
    updates = data[UPDATE].unique().tolist()
    tokens = data[MINIBATCH_TOKENS].unique().tolist()
    found = int(data["batch_num_tokens"])
    if len(updates) != 1 or tokens != [found]:
        raise RuntimeError(
            f"trimtab: verl split the batch into other mini-batches than were planned (updates {updates} together, "
            f"{tokens} tokens planned, {found} found), so the plan does not fit"
        )
