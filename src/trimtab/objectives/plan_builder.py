"""Token rules and the builder they act on while a plan is made.

A rule is one decision about tokens. It reads the whole mini-batch and calls `silence`, `multiply`, `drop`, ... on the
builder; it never sees a model or a gradient, and never a micro-batch alone (but for scope="micro").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from trimtab.objectives.lazy_torch import Tensor, torch
from trimtab.objectives.plan import Reason
from trimtab.objectives.token_batch import TokenBatch


class Controller(Protocol):
    """State that outlives an update: updated with every rollout batch, saved with checkpoints."""

    def observe(self, entropy: float) -> None:
        """Update the state with the token-mean entropy of a rollout batch."""

    def state_dict(self) -> dict[str, float]:
        """Return the state as plain numbers."""

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a state that `state_dict` returned."""


@dataclass(frozen=True)
class TokenRule:
    """One decision about tokens: `apply` makes it on a builder, `formula` states it, `needs` are the fields it reads.

    `reads` are optional fields that it uses if the batch has them. `reason_words` replaces the words of reasons that
    mean something else under this rule. Wherever rules were attached, they are applied in the order of `last`.
    `entropy_grad`: it puts a term of the entropy into the loss (`PlanBuilder.reward_entropy`).
    """

    name: str
    formula: str
    apply: Callable[[PlanBuilder], None]
    needs: frozenset[str] = frozenset()
    controller: Controller | None = None
    reason_words: Mapping[Reason, str] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()
    last: int = 0
    entropy_grad: bool = False


class PlanBuilder:
    """The plan of a mini-batch while rules are applied to it; `uncounted` are the tokens the normaliser leaves out."""

    # Rules name tokens by position (`mask.nonzero()`), not by mask, because most concern few tokens: each then
    # passes over a million tokens once, not at every operation.

    def __init__(
        self,
        batch: TokenBatch,
        clip_low: float,
        clip_high: float,
        coefficient: Callable[[PlanBuilder], Tensor] | None = None,
    ) -> None:
        self.batch = batch
        self._coefficient = coefficient
        self.advantage = batch.advantage
        # Expanded scalars: no memory until a rule changes them.
        self.clip_low = self.advantage.new_full((), clip_low).expand_as(self.advantage)
        self.clip_high = self.advantage.new_full((), clip_high).expand_as(self.advantage)
        self.weight = torch.ones_like(self.advantage)
        self.reason = (self.advantage == 0).to(torch.int16)  # Reason.NO_SIGNAL is the first bit
        self.uncounted: Tensor | None = None
        self.penalty: Tensor | None = None
        self.entropy_coef: Tensor | None = None
        self.metrics: dict[str, Tensor] = {}

    @property
    def logp(self) -> Tensor:
        """The log-probability that rules judge tokens by."""
        return self.batch.judged_logp

    @property
    def entropy(self) -> Tensor:
        """The entropy of every token's distribution; a rule that reads it lists it in `needs`."""
        assert self.batch.entropy is not None
        return self.batch.entropy

    @cached_property
    def positive(self) -> Tensor:
        """A mask of the tokens whose advantage in the batch is positive."""
        return self.batch.advantage > 0

    @property
    def coefficient(self) -> Tensor:
        """The coefficient of every token under the plan so far: -d loss / d ln p, without penalties.

        For an unclipped token on policy it is scale x weight x advantage; where a clip cuts the gradient it is 0.
        """
        assert self._coefficient is not None, "only an objective knows the coefficients of its plan"
        return self._coefficient(self)

    @property
    def counted_lengths(self) -> Tensor:
        """The number of counted tokens of each response."""
        lengths = self.batch.lengths
        if self.uncounted is None:
            return lengths
        # Not bincount, which makes the host wait for a GPU.
        uncounted = self.batch.sequence[self.uncounted]
        return lengths.index_add(0, uncounted, lengths.new_ones(len(uncounted)), alpha=-1)

    def leave_out_groups_without_signal(self) -> None:
        """Take groups whose advantages are all zero out of the loss, with their penalties, and out of the mean.

        In a batch without `group` every response is taken for a group.
        """
        # Not the rewards: TRL and verl pass on advantages alone, which may be made of something else.
        has_signal = self.batch.advantage != 0
        group = self.batch.sequence
        if self.batch.group is not None:
            group = self.batch.group.unique(return_inverse=True)[1][group]
        count = torch.zeros(self.batch.responses, dtype=torch.int64, device=group.device)
        silent = count.index_add_(0, group, has_signal.long())[group] == 0
        self.uncounted = silent.nonzero().squeeze(1)
        share = len(self.uncounted) / max(self.batch.tokens, 1)
        self.metrics["tokens/without_signal_share"] = self.weight.new_full((), share)

    def mark(self, tokens: Tensor, reason: Reason) -> None:
        """Add a reason to tokens, and their share to the metrics."""
        self.reason[tokens] |= int(reason)
        share = self.weight.new_full((), len(tokens) / max(self.batch.tokens, 1))
        if reason.metric in self.metrics:  # another rule marked some of these tokens already
            share = (self.reason & int(reason)).count_nonzero() / max(self.batch.tokens, 1)
        self.metrics[reason.metric] = share

    def mark_all(self, mask: Tensor, reason: Reason) -> None:
        """Add a reason to the tokens of a mask, without a metric: for reasons that most tokens have."""
        self.reason |= mask.to(torch.int16).mul_(int(reason))

    def silence(self, tokens: Tensor, reason: Reason = Reason.SILENCED) -> None:
        """Take tokens out of numerator and denominator of the mean."""
        # Rules may overlap, and the normaliser counts these positions: each must be there once.
        self.uncounted = tokens if self.uncounted is None else torch.unique(torch.cat([self.uncounted, tokens]))
        self.drop(tokens, reason)

    def drop(self, tokens: Tensor, reason: Reason = Reason.DROPPED) -> None:
        """Give tokens weight 0; they stay in the denominator."""
        self.weight.index_fill_(0, tokens, 0.0)
        self.mark(tokens, reason)

    def multiply(self, tokens: Tensor, factor: float | Tensor, reason: Reason) -> None:
        """Multiply the weight of tokens, by one factor or each by its own."""
        self.weight[tokens] *= factor
        self.mark(tokens, reason)

    def penalize(self, tokens: Tensor, coefficient: float) -> None:
        """Put a penalty on tokens; the surrogate knows when it takes the place of their clip."""
        self.penalty = torch.zeros_like(self.weight).index_fill_(0, tokens, coefficient)
        self.mark(tokens, Reason.PENALIZED)

    def reward_entropy(self, coefficient: float) -> None:
        """Add `coefficient` times the entropy of every token to the objective, with the gradient of the entropy."""
        self.entropy_coef = torch.full_like(self.weight, coefficient)
