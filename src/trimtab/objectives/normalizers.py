"""Aggregation of token terms into one loss.

Each is a scale per token that includes the normaliser of the whole mini-batch, so that the loss of any micro-batch is a
plain sum. Silenced tokens leave numerator and denominator. Where the batch has rollouts of several responses
(`TokenBatch.rollout`), "a response" here is a rollout: all the tokens of its branches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trimtab.objectives.lazy_torch import Tensor, torch
from trimtab.objectives.plan_builder import PlanBuilder


@dataclass(frozen=True)
class Normalizer:
    """An aggregation: `scale` returns the factor of every token, `formula` states it."""

    name: str
    formula: str
    scale: Callable[[PlanBuilder], Tensor]


def _per_token(builder: PlanBuilder) -> Tensor:
    """Return 1 / counted tokens for every counted token."""
    out = 0 if builder.uncounted is None else len(builder.uncounted)
    # An expanded scalar: no memory for a million equal numbers. At least 1 keeps it finite if all are silenced.
    one = builder.advantage.new_full((), 1 / max(builder.batch.tokens - out, 1))
    return _counted(builder, one.expand(builder.batch.tokens))


def _per_response(builder: PlanBuilder, divisor: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Return 1 / (rollouts with a counted token x divisor of the rollout's counted tokens) for every counted token.

    Without `TokenBatch.rollout` every response is a rollout.
    """
    # A rollout whose tokens are all silenced counts neither here nor in the sum; at least 1 keeps this finite.
    lengths, owner = builder.counted_lengths, builder.batch.sequence
    if builder.batch.rollout is not None:
        number = builder.batch.rollout_numbers
        lengths, owner = torch.zeros_like(lengths).index_add_(0, number, lengths), number[owner]
    each = (lengths > 0).sum().clamp(min=1).to(builder.advantage.dtype).expand(len(lengths))
    if divisor is not None:
        each = each * divisor(lengths)
    return _counted(builder, each.reciprocal().index_select(0, owner))


def _counted(builder: PlanBuilder, scale: Tensor) -> Tensor:
    """Set the scale of uncounted tokens to 0."""
    return scale if builder.uncounted is None else scale.index_fill(0, builder.uncounted, 0.0)


token_mean = Normalizer("token-mean", "mean over the counted tokens of the mini-batch", _per_token)
seq_mean_token_mean = Normalizer(
    "seq-mean-token-mean",
    "mean over a response's counted tokens, then over responses; a rollout of several is one",
    lambda builder: _per_response(builder, lambda lengths: lengths.clamp(min=1)),
)
seq_mean_token_sum = Normalizer(
    "seq-mean-token-sum",
    "sum over a response's counted tokens, mean over responses; a rollout of several is one",
    lambda builder: _per_response(builder, None),
)


def seq_mean_token_sum_norm(length: float) -> Normalizer:
    """Sum over the tokens of each response and divide by a constant length, average over responses."""
    return Normalizer(
        "seq-mean-token-sum-norm",
        f"sum over a response's counted tokens / {length:g}, mean over responses; a rollout of several is one",
        lambda builder: _per_response(builder, lambda _: builder.advantage.new_full((), length)),
    )


AGGREGATIONS = {each.name: each for each in (token_mean, seq_mean_token_mean, seq_mean_token_sum)}
