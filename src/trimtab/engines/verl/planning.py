"""A step's plans on the driver: over each mini-batch exactly as verl will cut it, from the data to what travels.

verl hands equal runs of a batch's rows to its ranks, and every rank takes an equal share of its run for each update. So
a mini-batch is scattered over the batch, and is gathered here in the order of updates, ranks and rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.engines.verl import columns
from trimtab.engines.verl.columns import Nested, Sampled
from trimtab.objectives import Objective, Plan, TokenBatch

METRICS = "trimtab/"


@dataclass(frozen=True)
class PlannedStep:
    """The plans of a step: the rows of each update, its tokens in that order, and what goes to the workers."""

    rows: list[list[int]]
    where: Sampled
    tokens: TokenBatch
    plans: list[Plan]
    fields: dict[str, Any]
    sent: str

    @property
    def metrics(self) -> dict[str, float]:
        """What was planned: the mean over the updates in which there was something to measure."""
        found: dict[str, list[float]] = {}
        for plan in self.plans:
            for name, value in plan.metrics.items():
                found.setdefault(name, []).extend([float(value)] if bool(torch.isfinite(value)) else [])
        return {f"{METRICS}{name}": sum(values) / len(values) for name, values in found.items() if values}


def fields_read(names: Iterable[str]) -> list[str]:
    """The fields of verl's data behind the optional fields of a TokenBatch, and those that every plan reads."""
    return sorted({columns.FIELDS[name] for name in names} | {"response_mask", "old_log_probs", "advantages"})


def plan_step(
    objective: Objective,
    data: Mapping[str, Nested],
    minibatch: int,
    ranks: int,
    tokenizer: Any,
    more: Iterable[str] = (),
) -> PlannedStep:
    """Let the controllers look at the batch, and plan its mini-batches of `minibatch` responses.

    `more` are fields that the objective does not read and a record wants.
    """
    rows = minibatch_rows(len(data["response_mask"]), minibatch, ranks)
    where = columns.sampled(data["response_mask"], [row for update in rows for row in update])
    tokens = columns.token_batch(data, where, {*objective.needs, *more}, tokenizer)
    objective.observe(tokens)
    plans = [objective.plan(tokens.select(n, n + minibatch)) for n in range(0, tokens.responses, minibatch)]
    planned = columns.plan_columns(objective, tokens, plans)
    fields = {f"{columns.PREFIX}{name}": where.unpack(column) for name, column in planned.items()}
    return PlannedStep(rows, where, tokens, plans, fields | _of_responses(rows, plans), ",".join(planned))


def minibatch_rows(responses: int, minibatch: int, ranks: int) -> list[list[int]]:
    """The rows of every update, as verl cuts them: equal runs of rows to the ranks, and of each run an equal share.

    verl pads a batch until it divides; one that does not is an error here, for the plan would be of something else.
    """
    if minibatch < 1 or ranks < 1 or responses % minibatch or minibatch % ranks:
        raise ValueError(
            f"a batch of {responses} responses cannot be cut into mini-batches of {minibatch} on {ranks} ranks: "
            "make train_batch_size a multiple of ppo_mini_batch_size, and that times rollout.n one of the ranks"
        )
    run, share = responses // ranks, minibatch // ranks
    return [
        [rank * run + update * share + n for rank in range(ranks) for n in range(share)]
        for update in range(responses // minibatch)
    ]


def _of_responses(rows: Sequence[list[int]], plans: Sequence[Plan]) -> dict[str, Tensor]:
    """Each response's update, and the tokens of that update's mini-batch, in verl's order of the responses."""
    update = torch.empty(sum(len(mine) for mine in rows), dtype=torch.int64)
    tokens = torch.empty_like(update)
    for number, (mine, plan) in enumerate(zip(rows, plans, strict=True)):
        update[mine], tokens[mine] = number, plan.tokens
    return {columns.UPDATE: update, columns.TOKENS: tokens}
