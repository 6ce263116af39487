"""Exact per-token gradient norms and first-order entropy changes.

With logits `a`, the sampled index `k`, and a coefficient `w = -d loss / d ln p_k` (see `Objective.loss_and_grad`; `A`
for an unclipped on-policy token), a step moves the logits along `w (1[v=k] - p_v)`. All of this follows from four
numbers per token: ln p, the entropy H, sum p^2 and sum p^2 ln p over the vocabulary.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

from trimtab.objectives.lazy_torch import Tensor, torch
from trimtab.objectives.objective import Objective
from trimtab.objectives.phi import batch_phi, phi, s2
from trimtab.objectives.plan import Plan
from trimtab.objectives.token_batch import TokenBatch

__all__ = [
    "Moments", "Quadrant", "batch_phi", "critical_surprisal", "critical_weight", "entropy_change",
    "gradient_norm_bounds", "gradient_norm_squared", "moments", "phi", "quadrant",
]  # fmt: skip


class Moments(NamedTuple):
    """The log-probability of a sampled token, and three moments of its next-token distribution."""

    logp: Tensor
    entropy: Tensor
    sum_p2: Tensor
    sum_p2_logp: Tensor


class Quadrant(IntEnum):
    """Sign of the advantage x surprisal below or above the critical one: which way a token moves the entropy."""

    NEUTRAL = 0
    REWARDED_EXPECTED = 1  # A > 0, s < s*: entropy falls
    REWARDED_SURPRISING = 2  # A > 0, s > s*: entropy rises
    PUNISHED_EXPECTED = 3  # A < 0, s < s*: entropy rises
    PUNISHED_SURPRISING = 4  # A < 0, s > s*: entropy falls


def moments(logits: Tensor, token: Tensor) -> Moments:
    """Return the moments from full logits (..., vocabulary) and the sampled tokens."""
    logp = logits.log_softmax(-1)
    p = logp.exp()
    p_logp = torch.where(p == 0, 0.0, p * logp)  # 0 ln 0 is 0, not NaN; NaN stays NaN
    sampled = logp.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    return Moments(sampled, -p_logp.sum(-1), (p * p).sum(-1), (p * p_logp).sum(-1))


def gradient_norm_squared(logp: Tensor, sum_p2: Tensor, coefficient: Tensor | float = 1.0) -> Tensor:
    """Return |dJ/da|^2 = w^2 (1 - 2 p_k + sum p^2), which is exact."""
    # Of a nearly certain token the bracket is a difference of almost equal numbers and may round below 0.
    return coefficient * coefficient * (1 - 2 * logp.exp() + sum_p2).clamp(min=0)


def gradient_norm_bounds(
    logp: Tensor, entropy: Tensor, vocabulary: int, coefficient: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return STAPO's bounds on |dJ/da|^2: w^2 (1 - 2p + exp(-H)), w^2 (2 - 2p - C_V H^2); C_V = (V-1) / (V ln^2 V)."""
    if vocabulary < 2:
        raise ValueError(f"vocabulary={vocabulary}: a distribution needs at least 2 tokens")
    c_v = (vocabulary - 1) / (vocabulary * math.log(vocabulary) ** 2)
    p, w2 = logp.exp(), coefficient * coefficient
    return w2 * (1 - 2 * p + (-entropy).exp()), w2 * (2 - 2 * p - c_v * entropy**2)


def critical_surprisal(entropy: Tensor, sum_p2: Tensor, sum_p2_logp: Tensor) -> Tensor:
    """Return s* = -ln p* with Phi(p*) = 0: the entropy change of more surprising tokens has the opposite sign."""
    # With q = p exp(H) and u = ln q the equation is u exp(u) = S2 exp(H), which Newton's method solves from above.
    goal = s2(entropy, sum_p2, sum_p2_logp).clamp(min=0) * entropy.exp()
    u = torch.log1p(goal)  # u exp(u) >= goal here, and the left side is convex: the steps fall to the root
    for _ in range(24):  # a fixed number: a test of convergence would make the host wait for a GPU
        u = u - (u - goal * (-u).exp()) / (1 + u)
    return entropy - u


def quadrant(advantage: Tensor, logp: Tensor, s_star: Tensor) -> Tensor:
    """Return the `Quadrant` of each token."""
    surprising = (-logp > s_star).to(torch.int64)
    code = torch.where(advantage > 0, 1, 3) + surprising
    # An exact tie is neutral: the critical token leaves the entropy as it is.
    return torch.where((advantage == 0) | (-logp == s_star), 0, code)


def entropy_change(objective: Objective, batch: TokenBatch, plan: Plan, new_logp: Tensor | None = None) -> Tensor:
    """Return the first-order change of each token's own entropy per unit of step size under a plan of `batch`.

    `new_logp` defaults to the log-probabilities by which rules judged the tokens.
    """
    # Clipped and silenced tokens have gradient 0. The sum is the change that the plan predicts.
    _, grad_logp = objective.loss_and_grad(batch.judged_logp if new_logp is None else new_logp, plan)
    return grad_logp * batch_phi(batch)


def critical_weight(advantage: Tensor, drive: Tensor, boosted: Tensor) -> Tensor:
    """Return W* = 1 + Lam / Gam, the weight on the boosted tokens at which an update leaves the entropy unchanged.

    `drive` is Phi; Lam = sum A Phi over all tokens, Gam = -sum A Phi over the boosted ones.
    """
    # Infinite where the boosted tokens do not move the entropy: then no weight on them balances the others.
    pull = advantage * drive
    return 1 + pull.sum() / -(pull * boosted).sum()
