"""Scoring: log-probability, entropy and two moments of every response token, in fp32.

The head is applied to response positions alone and in chunks, so the logits of a batch never exist at one time; with
gradients each chunk's logits are made again in the backward pass. On a GPU scoring is the fused head's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trimtab.objectives import Moments, moments
from trimtab.policy.head import Head, head_scores
from trimtab.policy.models import Policy
from trimtab.policy.packed import Packed

_TYPES = {"int64": torch.int64, "float32": torch.float32}


@dataclass(frozen=True)
class Transcript:
    """A prompt and its response, as token ids."""

    prompt: Sequence[int]
    response: Sequence[int]

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise ValueError("a transcript without a prompt: nothing predicts its response's first token")

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)

    @cached_property
    def ids(self) -> np.ndarray:
        """Prompt and response in one array, made once: lists of ints are slow to go through."""
        return np.array([*self.prompt, *self.response], dtype=np.int64)


def parts_by_budget(lengths: Sequence[int], budget: int, packed: bool = False) -> list[int]:
    """Sizes of consecutive parts whose tokens stay within the budget, padding included unless they are packed.

    A part holds one row at least. Packed parts are as few as the budget allows and, of as many, as even as eighths of
    the budget make them: a small one takes the host as long as a large one, and memory wants sizes that come again.
    """
    if not packed:
        return _padded_parts(lengths, budget)
    ends = list(accumulate(lengths, initial=0))
    fewest = len(_packed_parts(ends, budget))
    choices = (_packed_parts(ends, budget * eighths // 8) for eighths in range(1, 9))
    return next(sizes for sizes in choices if len(sizes) == fewest)


def _padded_parts(lengths: Sequence[int], budget: int) -> list[int]:
    sizes, rows, longest = [], 0, 0
    for length in lengths:
        longest = max(longest, length)
        if rows and (rows + 1) * longest > budget:
            sizes.append(rows)
            rows, longest = 0, length
        rows += 1
    return [*sizes, rows] if rows else sizes


def _packed_parts(ends: Sequence[int], budget: int) -> list[int]:
    """By where rows end, 0 first."""
    sizes, first = [], 0
    while first < len(ends) - 1:
        last = max(bisect_right(ends, ends[first] + budget) - 1, first + 1)
        sizes.append(last - first)
        first = last
    return sizes


def response_hidden(policy: Policy, sequences: Sequence[Transcript]) -> tuple[Tensor, Tensor]:
    """The hidden states that predict each response token, and those tokens, concatenated."""
    ids = np.concatenate([s.ids for s in sequences])
    lengths = np.array([len(s) for s in sequences])
    responses = np.array([len(s.response) for s in sequences])
    starts = np.concatenate([[0], lengths.cumsum()])
    drawn = np.repeat(starts[1:] - responses.cumsum(), responses) + np.arange(responses.sum())  # the response tokens
    if policy.packed:
        positions = np.arange(len(ids)) - np.repeat(starts[:-1], lengths)
        flat, at, bounds, before, tokens = to_device(policy.device, ids, positions, starts, drawn - 1, ids[drawn])
        hidden = policy.hidden_packed(Packed(flat, at, bounds.to(torch.int32), int(lengths.max())))
    else:
        real = np.arange(lengths.max()) < lengths[:, None]
        table = np.full(real.shape, policy.pad_token)
        table[real] = ids
        padding = np.repeat(np.arange(len(lengths)) * real.shape[1] - starts[:-1], responses)  # before each of them
        rows, mask, before, tokens = to_device(
            policy.device, table, real.astype(np.int64), drawn - 1 + padding, ids[drawn]
        )
        hidden = policy.hidden(rows, mask).flatten(0, 1)
    return hidden.index_select(0, before), tokens


def to_device(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    """Arrays of one type as tensors, to a GPU in one copy that nobody waits for."""
    if device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    host = torch.empty(sum(array.size for array in arrays), dtype=_TYPES[arrays[0].dtype.name], pin_memory=True)
    np.concatenate([array.ravel() for array in arrays], out=host.numpy())
    pieces = host.to(device, non_blocking=True).split([array.size for array in arrays])
    return [piece.view(array.shape) for piece, array in zip(pieces, arrays, strict=True)]


def log_probs(policy: Policy, sequences: Sequence[Transcript], temperature: float, chunk: int) -> Tensor:
    """Differentiable log-probabilities of the response tokens of one part."""

    def head(hidden: Tensor, tokens: Tensor) -> Tensor:
        logits = policy.logits(hidden, temperature)
        return logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(-1)

    with policy.autocast():
        hidden, tokens = response_hidden(policy, sequences)
        pieces = zip(hidden.split(chunk), tokens.split(chunk), strict=True)
        return torch.cat([checkpoint(head, h, t, use_reentrant=False) for h, t in pieces])


@torch.no_grad()
def score(
    policy: Policy,
    sequences: Sequence[Transcript],
    temperature: float,
    budget: int,
    chunk: int,
    fused: bool | None = None,
) -> Moments:
    """The four numbers of every response token, part by part; by default the head is fused on a GPU."""
    was_training = policy.model.training
    policy.model.eval()
    head = policy.fused_head(temperature, fused)
    with policy.autocast():
        scored = [_score_part(policy, part, temperature, chunk, head) for part in cut(sequences, budget, policy.packed)]
    policy.model.train(was_training)
    return Moments(*(torch.cat(values) for values in zip(*scored, strict=True)))


def cut(sequences: Sequence[Transcript], budget: int, packed: bool = False) -> Iterable[Sequence[Transcript]]:
    """The sequences in parts of a token budget."""
    first = 0
    for size in parts_by_budget([len(s) for s in sequences], budget, packed):
        yield sequences[first : first + size]
        first += size


def _score_part(
    policy: Policy, part: Sequence[Transcript], temperature: float, chunk: int, head: Head | None
) -> Moments:
    hidden, tokens = response_hidden(policy, part)
    if head is not None:
        hidden = hidden.to(head.weight.dtype)  # the wider ones are not kept
        return head_scores(hidden, head, tokens, chunk)
    pieces = [
        moments(policy.logits(h, temperature), t) for h, t in zip(hidden.split(chunk), tokens.split(chunk), strict=True)
    ]
    return Moments(*(torch.cat(values) for values in zip(*pieces, strict=True)))
