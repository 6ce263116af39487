"""What a trainer hands to the recorder: plain values for each response, columns of tensors for each update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from trimtab.record.conversation import Observation, RecordedCall
from trimtab.record.schema import FROM_BATCH, FROM_PLAN

if TYPE_CHECKING:  # reading records needs no torch, so nothing here imports it before a trainer calls
    from torch import Tensor


@dataclass(frozen=True)
class RecordedResponse:
    """One graded response: what the table `responses` says of it. `tokens` are those that are trained on.

    `rewards` is a JSON object where there are several rewards, each by name and before its weight. Of a conversation
    `observations` and `calls` are its turns, and `ended` is how it ended.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    group: int
    sample: int
    reward: float
    verdict: str
    finished: bool
    extracted: str = ""
    answer: str = ""
    source: str = ""
    rewards: str = ""
    observations: Sequence[Observation] = ()
    calls: Sequence[RecordedCall] = ()
    ended: str = ""


@dataclass(frozen=True)
class UpdateRecord:
    """One update: its columns in host memory, and which responses of the step they belong to.

    `first_response` counts over the step's responses. `columns` has `sequence` (which response of the update a token
    belongs to, from 0) beside the columns of the table `tokens`. `micro_batches` is how many responses each forward
    pass held.
    """

    number: int
    first_response: int
    responses: int
    columns: dict[str, Tensor]
    micro_batches: Sequence[int] = ()
    taken: bool = True


# What is read by name here of a `TokenBatch` and a `Plan`; the rest are columns, read by the schema's names.
class _Batch(Protocol):
    @property
    def responses(self) -> int: ...
    @property
    def sequence(self) -> Tensor: ...


class _Plan(Protocol):
    @property
    def replan(self) -> Callable[[int, int], Any] | None: ...
    def split(self, sequences: Sequence[int]) -> Sequence[Any]: ...


def update_record(
    number: int,
    first_response: int,
    batch: _Batch,
    plan: _Plan,
    *,
    micro_batches: Sequence[int] = (),
    new_logp: Tensor | None = None,
    clipped: Tensor | None = None,
    taken: bool = True,
) -> UpdateRecord:
    """Copy the columns of an update to host memory: the mini-batch, its plan, and what the forward passes returned."""
    import torch

    # With scope = "micro" the weights of the plan as a whole are not those that were used: its micro-batches' are.
    plans = plan.split(micro_batches) if plan.replan else [plan]

    def planned(name: str) -> Tensor | None:
        values = [getattr(piece, name) for piece in plans]
        return values[0] if len(values) == 1 or values[0] is None else torch.cat(values)

    found: dict[str, Tensor | None] = {name: getattr(batch, name) for name in FROM_BATCH}
    found |= {name: planned(name) for name in FROM_PLAN}
    found |= {"planned_advantage": planned("advantage"), "new_logp": new_logp, "clipped": clipped}
    # On a CPU nothing is copied: nobody changes a batch or a plan after its update.
    columns = to_host({"sequence": batch.sequence} | {k: value for k, value in found.items() if value is not None})
    columns = _without_equal_advantage(columns)
    return UpdateRecord(number, first_response, batch.responses, columns, tuple(micro_batches), taken)


def to_host(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy columns to host memory."""
    import torch

    # All copies are started before the first wait: a synchronous copy of each column would wait for the GPU each time.
    copies = {name: value.to("cpu", non_blocking=value.is_cuda) for name, value in columns.items()}
    for device in {value.device for value in columns.values() if value.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def join_ranks(ranks: Sequence[UpdateRecord], first_response: int) -> UpdateRecord:
    """Join the records that the ranks have of one update, in rank order."""
    import torch

    for rank in ranks:  # dropped on a rank where no rule changed the advantage; another rank may have it
        rank.columns.setdefault("planned_advantage", rank.columns["advantage"])
    columns = {name: torch.cat([rank.columns[name] for rank in ranks]) for name in ranks[0].columns}
    # Each rank numbers its responses from 0.
    before = torch.tensor([0, *accumulate(rank.responses for rank in ranks)][:-1])
    columns["sequence"] += before.repeat_interleave(torch.tensor([len(rank.columns["sequence"]) for rank in ranks]))
    return replace(
        ranks[0],
        first_response=first_response,
        responses=sum(rank.responses for rank in ranks),
        columns=_without_equal_advantage(columns),
        micro_batches=[size for rank in ranks for size in rank.micro_batches],
    )


def _without_equal_advantage(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop the planned advantage where no rule changed it, which is so for most methods."""
    import torch

    if torch.equal(columns["advantage"], columns["planned_advantage"]):
        del columns["planned_advantage"]
    return columns
