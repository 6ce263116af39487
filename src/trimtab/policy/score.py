"""Scoring: log-probability, entropy and two moments of every response token, in fp32.

The head is applied to response positions alone and in chunks, so the logits of a batch never exist at one time; with
gradients each chunk's logits are made again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trimtab.objectives.theory import Moments, moments
from trimtab.policy.models import Policy


@dataclass(frozen=True)
class Transcript:
    """A prompt and its response, as token ids."""

    prompt: Sequence[int]
    response: Sequence[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


def parts_by_budget(lengths: Sequence[int], budget: int) -> list[int]:
    """Sizes of consecutive parts whose padded tokens (rows x longest) stay within the budget; one row at least each."""
    sizes, rows, longest = [], 0, 0
    for length in lengths:
        longest = max(longest, length)
        if rows and (rows + 1) * longest > budget:
            sizes.append(rows)
            rows, longest = 0, length
        rows += 1
    return [*sizes, rows] if rows else sizes


def response_hidden(policy: Policy, sequences: Sequence[Transcript]) -> tuple[Tensor, Tensor]:
    """The hidden states that predict each response token, and those tokens, concatenated."""
    width = max(len(s) for s in sequences)
    ids = [[*s.prompt, *s.response, *[policy.pad_token] * (width - len(s))] for s in sequences]
    mask = [[1] * len(s) + [0] * (width - len(s)) for s in sequences]
    rows = [row * width + len(s.prompt) - 1 + t for row, s in enumerate(sequences) for t in range(len(s.response))]
    hidden = policy.hidden(torch.tensor(ids, device=policy.device), torch.tensor(mask, device=policy.device))
    where = torch.tensor(rows, device=policy.device, dtype=torch.int64)
    tokens = torch.tensor([t for s in sequences for t in s.response], device=policy.device, dtype=torch.int64)
    return hidden.reshape(-1, hidden.shape[-1]).index_select(0, where), tokens


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
def score(policy: Policy, sequences: Sequence[Transcript], temperature: float, budget: int, chunk: int) -> Moments:
    """The four numbers of every response token, part by part."""
    was_training = policy.model.training
    policy.model.eval()
    scored = [_score_part(policy, part, temperature, chunk) for part in cut(sequences, budget)]
    policy.model.train(was_training)
    return Moments(*(torch.cat(values) for values in zip(*scored, strict=True)))


def cut(sequences: Sequence[Transcript], budget: int) -> Iterable[Sequence[Transcript]]:
    """The sequences in parts of a token budget."""
    first = 0
    for size in parts_by_budget([len(s) for s in sequences], budget):
        yield sequences[first : first + size]
        first += size


def _score_part(policy: Policy, part: Sequence[Transcript], temperature: float, chunk: int) -> Moments:
    with policy.autocast():
        hidden, tokens = response_hidden(policy, part)
        pieces = [
            moments(policy.logits(h, temperature), t)
            for h, t in zip(hidden.split(chunk), tokens.split(chunk), strict=True)
        ]
    return Moments(*(torch.cat(values) for values in zip(*pieces, strict=True)))
