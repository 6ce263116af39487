"""A plan in the making: the whole mini-batch, and the marks that rules leave on it.

A rule is one decision about tokens. It reads the batch and calls `silence`, `multiply`, `drop`, ... on the builder; it
never sees a model, a gradient or a part of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from trimtab.objectives.reasons import Reason
from trimtab.objectives.token_batch import TokenBatch


class Controller(Protocol):
    """State that outlives an update: it looks at every rollout batch, and is saved with checkpoints."""

    def observe(self, entropy: float) -> None:
        """Take in the token-mean entropy of a rollout batch."""
        ...

    def state_dict(self) -> dict[str, float]:
        """The state as plain numbers."""
        ...

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what `state_dict` gave."""
        ...


@dataclass(frozen=True)
class TokenRule:
    """One decision about tokens: its name, the sentence that states it, what it reads, what it does to a builder."""

    name: str
    formula: str
    apply: Callable[[PlanBuilder], None]
    needs: frozenset[str] = frozenset()
    controller: Controller | None = None


@dataclass(eq=False)
class PlanBuilder:
    """The working state of planning, over the tokens of the whole mini-batch.

    Rules name tokens by position (`mask.nonzero()`), not by mask: they concern few, and a million tokens are then
    passed over once instead of at every step.
    """

    batch: TokenBatch
    clip_low: Tensor
    clip_high: Tensor
    uncounted: Tensor | None = None
    penalty: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)
    advantage: Tensor = field(init=False)
    weight: Tensor = field(init=False)
    reason: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.advantage = self.batch.advantage
        self.weight = torch.ones_like(self.advantage)
        self.reason = (self.advantage == 0).to(torch.int16)  # Reason.NO_SIGNAL is the first bit

    @property
    def logp(self) -> Tensor:
        """The log-probability tokens are judged by."""
        return self.batch.judged_logp

    @property
    def entropy(self) -> Tensor:
        """The entropy of every token's distribution (a rule that reads it says so in `needs`)."""
        assert self.batch.entropy is not None
        return self.batch.entropy

    @cached_property
    def positive(self) -> Tensor:
        """A mask of the tokens with a positive advantage in the batch."""
        return self.batch.advantage > 0

    @property
    def counted_lengths(self) -> Tensor:
        """Counted tokens of each response."""
        lengths = self.batch.lengths
        if self.uncounted is None:
            return lengths
        return lengths - torch.bincount(self.batch.sequence[self.uncounted], minlength=len(lengths))

    def mark(self, tokens: Tensor, reason: Reason) -> None:
        """Note a reason on tokens, and their share among the metrics."""
        self.reason[tokens] |= int(reason)
        share = self.weight.new_full((), len(tokens) / max(self.batch.tokens, 1))
        if reason.metric in self.metrics:  # another rule marked some of these tokens already
            share = (self.reason & int(reason)).count_nonzero() / self.batch.tokens
        self.metrics[reason.metric] = share

    def mark_all(self, mask: Tensor, reason: Reason) -> None:
        """Note a reason on the tokens of a mask: for reasons that most tokens have, whose share says nothing."""
        self.reason |= mask.to(torch.int16).mul_(int(reason))

    def silence(self, tokens: Tensor, reason: Reason = Reason.SILENCED) -> None:
        """Take tokens out of numerator and denominator."""
        self.uncounted = tokens if self.uncounted is None else torch.unique(torch.cat([self.uncounted, tokens]))
        self.drop(tokens, reason)

    def drop(self, tokens: Tensor, reason: Reason = Reason.DROPPED) -> None:
        """Give tokens weight 0; they stay in the denominator."""
        self.weight.index_fill_(0, tokens, 0.0)
        self.mark(tokens, reason)

    def multiply(self, tokens: Tensor, factor: float, reason: Reason) -> None:
        """Multiply the weight of tokens."""
        self.weight[tokens] *= factor
        self.mark(tokens, reason)

    def penalize(self, tokens: Tensor, coefficient: float) -> None:
        """Put a penalty on tokens in place of their clip range."""
        self.penalty = torch.zeros_like(self.weight).index_fill_(0, tokens, coefficient)
        self.clip_low = self.clip_low.index_fill(0, tokens, torch.inf)
        self.clip_high = self.clip_high.index_fill(0, tokens, torch.inf)
        self.mark(tokens, Reason.PENALIZED)
