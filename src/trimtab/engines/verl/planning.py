"""Plan the updates of a step on the driver, over each mini-batch exactly as verl will split it.

verl gives each rank an equal, consecutive chunk of the batch's rows, and each update trains on an equal share of every
chunk. The rows of a mini-batch are therefore spread over the batch; they are gathered here by update, rank and row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.engines.verl import columns
from trimtab.engines.verl.columns import Nested, SampledTokens
from trimtab.objectives import Objective, Plan, TokenBatch

METRIC_PREFIX = "trimtab/"


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
    return sorted({columns.VERL_FIELDS[name] for name in names} | {"response_mask", "old_log_probs", "advantages"})


def plan_step(
    objective: Objective,
    data: Mapping[str, Nested],
    minibatch: int,
    ranks: int,
    tokenizer: Any,
    recorded: Iterable[str] = (),
) -> PlannedStep:
    """Let the controllers observe the batch, and plan its mini-batches of `minibatch` responses.

    `recorded` are columns that the recorder needs besides those that the objective reads.
    """
    # Tokens in the order of the updates, so that a mini-batch is a slice.
    rows = minibatch_rows(len(data["response_mask"]), minibatch, ranks)
    sampled = columns.sampled_tokens(data["response_mask"], [row for update in rows for row in update])
    tokens = columns.token_batch(data, sampled, {*objective.needs, *recorded}, tokenizer)
    objective.observe(tokens)
    plans = [objective.plan(tokens.select(n, n + minibatch)) for n in range(0, tokens.responses, minibatch)]
    planned = columns.plan_columns(objective, tokens, plans)
    fields = {f"{columns.PREFIX}{name}": sampled.unpack(column) for name, column in planned.items()}
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


def _per_response(rows: Sequence[list[int]], plans: Sequence[Plan]) -> dict[str, Tensor]:
    """Return the update of each response and the tokens in its mini-batch, in verl's order of rows."""
    update = torch.empty(sum(map(len, rows)), dtype=torch.int64)
    tokens = torch.empty_like(update)
    for number, (indices, plan) in enumerate(zip(rows, plans, strict=True)):
        update[indices], tokens[indices] = number, plan.tokens
    return {columns.UPDATE: update, columns.MINIBATCH_TOKENS: tokens}
