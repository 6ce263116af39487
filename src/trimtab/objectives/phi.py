"""STARE's Phi: the first-order effect of a token on the entropy of its own distribution.

An unclipped step of size eta with coefficient A on the sampled token changes the entropy by -eta A Phi. With the two
moments of the distribution Phi is exact; without them, as in other trainers, it is estimated from ln p and H.
"""

from __future__ import annotations

from typing import Literal

from trimtab.objectives.lazy_torch import Tensor, torch
from trimtab.objectives.token_batch import TokenBatch

MOMENTS = ("sum_p2", "sum_p2_logp")
PhiSource = Literal["exact", "estimated"]
NEIGHBOURS = 64  # tokens of similar entropy that the estimate of S2 averages over


def phi(logp: Tensor, entropy: Tensor, sum_p2: Tensor, sum_p2_logp: Tensor) -> Tensor:
    """Return STARE's Phi(p) = p (ln p + H) - S2, S2 = sum p^2 (ln p + H); an unclipped step changes H by -A Phi."""
    return own_phi(logp, entropy) - s2(entropy, sum_p2, sum_p2_logp)


def s2(entropy: Tensor, sum_p2: Tensor, sum_p2_logp: Tensor) -> Tensor:
    """Return S2, the expectation of p (ln p + H) over the distribution."""
    return sum_p2_logp + entropy * sum_p2


def batch_phi(batch: TokenBatch) -> Tensor:
    """Return `phi` of a batch's tokens, at the log-probabilities by which rules judge them."""
    for name in ("entropy", *MOMENTS):
        if getattr(batch, name) is None:
            raise ValueError(f"the entropy change needs `{name}`, which this TokenBatch lacks: see theory.moments")
    assert batch.entropy is not None and batch.sum_p2 is not None and batch.sum_p2_logp is not None
    return phi(batch.judged_logp, batch.entropy, batch.sum_p2, batch.sum_p2_logp)


def own_phi(logp: Tensor, entropy: Tensor) -> Tensor:
    """Return p (ln p + H), the part of Phi that is the sampled token's own."""
    return logp.exp() * (logp + entropy)


def token_phi(batch: TokenBatch, source: PhiSource | None = None) -> Tensor:
    """Return Phi of a batch's tokens; without a source exact if the batch has moments, else estimated."""
    measured = all(getattr(batch, name) is not None for name in MOMENTS)
    if source == "exact" or (source is None and measured):
        return batch_phi(batch)
    assert batch.entropy is not None
    return estimated_phi(batch.judged_logp, batch.entropy)


def estimated_phi(logp: Tensor, entropy: Tensor) -> Tensor:
    """Estimate Phi without moments: S2 is the mean of p (ln p + H) over the tokens with the most similar entropy."""
    # S2 is the expectation of p (ln p + H) over the tokens that could have been sampled. Each position has one sample,
    # so the samples of positions with similar entropy stand in for the others.
    own = own_phi(logp, entropy)
    if not len(own):
        return own
    order = entropy.argsort(stable=True)
    blocks = max(1, len(own) // NEIGHBOURS)
    block = torch.empty_like(order)
    block[order] = torch.arange(len(own), device=own.device) * blocks // len(own)
    sums = own.new_zeros(blocks).index_add_(0, block, own)
    return own - (sums / torch.bincount(block, minlength=blocks))[block]
