"""The mini-batch of all processes, on every process.

Each rank gathers the few token vectors that planning reads and plans the whole mini-batch, then keeps its own tokens.
So quantiles, counts and normalisers are the same to the last bit however many processes share the work.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from trimtab.objectives.token_batch import TOKEN_FLOATS, TOKEN_INTS, TokenBatch


class Comm(Protocol):
    """What planning asks of a communicator. It only ever passes tensors of one shape and type on all ranks."""

    def all_gather(self, tensor: Tensor) -> Sequence[Tensor] | Tensor:
        """The tensors of all ranks, in rank order: a list, stacked, or concatenated along the first axis."""
        ...


@dataclass(frozen=True)
class ProcessGroup:
    """A communicator over `torch.distributed` (the default group unless one is given)."""

    group: torch.distributed.ProcessGroup | None = None

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather equal-shaped tensors from every rank of the group."""
        world = torch.distributed.get_world_size(self.group)
        out = [torch.empty_like(tensor) for _ in range(world)]
        torch.distributed.all_gather(out, tensor.contiguous(), group=self.group)
        return out


@dataclass(frozen=True)
class Share:
    """This rank's part of the whole mini-batch."""

    tokens: slice
    responses: slice


def gather_rows(comm: Comm, tensor: Tensor) -> Tensor:
    """One row per rank of an equal-shaped 1-D or 2-D tensor: (ranks, *shape)."""
    out = comm.all_gather(tensor)
    stacked = out if isinstance(out, Tensor) else torch.stack(list(out))
    return stacked.reshape(-1, *tensor.shape)


def gather_batch(batch: TokenBatch, names: Iterable[str], comm: Comm | None) -> tuple[TokenBatch, Share]:
    """The fields `names` of all ranks' tokens as one batch, and where this rank's tokens are in it."""
    if comm is None:
        return batch, Share(slice(0, batch.tokens), slice(0, batch.responses))
    present = [n for n in (*TOKEN_FLOATS, *TOKEN_INTS) if n in {*names, "sequence"} and getattr(batch, n) is not None]
    sizes, rank = _sizes(batch, present, comm)
    tokens, responses = sizes[:, 0].tolist(), sizes[:, 1].tolist()
    first_token, first_response = sum(tokens[:rank]), sum(responses[:rank])

    def collect(names: list[str]) -> dict[str, Tensor]:
        if not names:
            return {}
        local = torch.stack([getattr(batch, name) for name in names])
        padded = local.new_zeros(len(names), max(tokens))
        padded[:, : batch.tokens] = local
        rows = gather_rows(comm, padded)
        whole = torch.cat([row[:, :count] for row, count in zip(rows, tokens, strict=True)], dim=1)
        return dict(zip(names, whole, strict=True))

    values: dict[str, Any] = collect([n for n in present if n in TOKEN_FLOATS])
    values |= collect([n for n in present if n in TOKEN_INTS])
    before = torch.tensor([sum(responses[:r]) for r in range(len(responses))], device=batch.old_logp.device)
    values["sequence"] = values["sequence"] + before.repeat_interleave(sizes[:, 0].to(before.device))
    share = Share(
        slice(first_token, first_token + batch.tokens), slice(first_response, first_response + batch.responses)
    )
    return TokenBatch(**values, responses=sum(responses)), share


def _sizes(batch: TokenBatch, present: list[str], comm: Comm) -> tuple[Tensor, int]:
    """Every rank's (tokens, responses), and which rank this is: it finds its own random mark among the others'."""
    known = (*TOKEN_FLOATS, *TOKEN_INTS)
    kinds = sum(1 << known.index(n) for n in present) * 2 + int(batch.old_logp.dtype == torch.float64)
    mark = secrets.randbits(62)
    header = torch.tensor([mark, kinds, batch.tokens, batch.responses], device=batch.old_logp.device)
    rows = gather_rows(comm, header).cpu()
    ranks = (rows[:, 0] == mark).nonzero().flatten().tolist()
    if len(ranks) != 1:
        raise ValueError("comm.all_gather did not return what this rank sent: it must give the tensors of all ranks")
    if (rows[:, 1] != kinds).any():
        raise ValueError(
            "the ranks give TokenBatches with different fields or float types: make them alike on all ranks"
        )
    return rows[:, 2:], ranks[0]
