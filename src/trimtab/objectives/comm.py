"""Gather the mini-batch of all ranks on every rank.

Each rank gathers the few token vectors that planning reads, plans the whole mini-batch, and keeps its own tokens. So
quantiles, counts and normalisers are the same to the last bit for any number of ranks.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trimtab.objectives.lazy_torch import Tensor, torch
from trimtab.objectives.token_batch import RESPONSE_INTS, TOKEN_FLOATS, TOKEN_INTS, TokenBatch

_KNOWN = (*TOKEN_FLOATS, *TOKEN_INTS, *RESPONSE_INTS)


class Comm(Protocol):
    """A communicator for planning; it is only called with tensors of one shape and type on all ranks."""

    def all_gather(self, tensor: Tensor) -> Sequence[Tensor] | Tensor:
        """Return the tensors of all ranks in rank order: a list, stacked, or concatenated along the first axis."""


@dataclass(frozen=True)
class ProcessGroup:
    """A communicator over `torch.distributed` (the default group unless one is given)."""

    group: torch.distributed.ProcessGroup | None = None

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather equal-shaped tensors from every rank of the group."""
        out = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size(self.group))]
        # NCCL takes contiguous tensors alone.
        torch.distributed.all_gather(out, tensor.contiguous(), group=self.group)
        return out


def gather_rows(comm: Comm, tensor: Tensor) -> Tensor:
    """Gather an equal-shaped tensor from every rank: (ranks, *shape)."""
    out = comm.all_gather(tensor)
    stacked = out if isinstance(out, torch.Tensor) else torch.stack(list(out))
    return stacked.reshape(-1, *tensor.shape)


def gather_batch(batch: TokenBatch, names: Iterable[str], comm: Comm | None) -> tuple[TokenBatch, slice]:
    """Gather the fields `names` of all ranks into one batch; also return which of its responses are this rank's."""
    if comm is None:
        return batch, slice(0, batch.responses)
    # The groups only to check that no two ranks use one rollout id for different rollouts.
    wanted = {*names, "sequence"} | (set[str]() if batch.rollout is None else set(RESPONSE_INTS))
    present = [n for n in _KNOWN if n in wanted and getattr(batch, n) is not None]
    sizes, rank = _sizes(batch, present, comm)
    tokens, responses = sizes[:, 0].tolist(), sizes[:, 1].tolist()
    first = sum(responses[:rank])

    def collect(names: list[str], counts: Sequence[int] = tokens) -> dict[str, Tensor]:
        if not names:
            return {}
        local = torch.stack([getattr(batch, name) for name in names])
        # all_gather needs equal shapes, so every rank pads to the longest.
        padded = local.new_zeros(len(names), max(counts))
        padded[:, : local.shape[1]] = local
        rows = gather_rows(comm, padded)
        whole = torch.cat([row[:, :count] for row, count in zip(rows, counts, strict=True)], dim=1)
        return dict(zip(names, whole, strict=True))

    # Two transfers, one per type, whatever the number of fields; a third for those that have one value per response.
    values: dict[str, Any] = collect([n for n in present if n in TOKEN_FLOATS])
    values |= collect([n for n in present if n in TOKEN_INTS])
    values |= collect([n for n in present if n in RESPONSE_INTS], responses)
    # Every rank numbers its responses from 0: shift them by those of the ranks before.
    before = torch.tensor([sum(responses[:r]) for r in range(len(responses))], device=batch.old_logp.device)
    values["sequence"] = values["sequence"] + before.repeat_interleave(sizes[:, 0].to(before.device))
    return TokenBatch(**values, responses=sum(responses)), slice(first, first + batch.responses)


def _sizes(batch: TokenBatch, present: list[str], comm: Comm) -> tuple[Tensor, int]:
    """Return every rank's (tokens, responses), and this rank's number."""
    # Ranks with other fields would wait for each other forever, or read a row as another field: compare them first.
    schema = sum(1 << _KNOWN.index(n) for n in present) * 2 + int(batch.old_logp.dtype == torch.float64)
    # A communicator need not know ranks: each sends a random number and finds its own among those that come back.
    nonce = secrets.randbits(62)
    header = torch.tensor([nonce, schema, batch.tokens, batch.responses], device=batch.old_logp.device)
    rows = gather_rows(comm, header).cpu()
    ranks = (rows[:, 0] == nonce).nonzero().flatten().tolist()
    if len(ranks) != 1:
        raise ValueError("comm.all_gather did not return what this rank sent: it must give the tensors of all ranks")
    if (rows[:, 1] != schema).any():
        raise ValueError("the ranks give TokenBatches with different fields or float types: make them alike")
    return rows[:, 2:], ranks[0]
