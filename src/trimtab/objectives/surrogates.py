"""Surrogates: from a token's ratio and advantage to its term in the loss (to be minimised).

Each returns the terms, and a mask of the tokens whose gradient is cut by a clip (None where there is no clip).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trimtab.objectives.lazy_torch import Tensor, torch
from trimtab.objectives.plan import Plan
from trimtab.objectives.ratios import LOG_RATIO_LIMIT, log_ratio
from trimtab.objectives.token_batch import LOGP_FLOOR

LOG_WEIGHT_LEAST = math.log(1e-8)  # VESPO's lower limit of ln w; the upper one is that of log ratios
COMPLEMENT_LEAST = 1e-8  # of 1 - p: a log-probability in fp32 cannot tell a smaller one from 0

Divergence = Literal["tv", "kl"]
Terms = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Surrogate:
    """A surrogate: `terms(ratio, new_logp, plan)` returns the terms and the clip mask, `formula` states it."""

    formula: str
    terms: Callable[[Tensor, Tensor, Plan], Terms]
    clip_low: float = math.inf
    clip_high: float = math.inf


def ppo_clip(
    low: float, high: float, dual: float | None = None, unclipped: Callable[[Tensor, Plan], Tensor] | None = None
) -> Surrogate:
    """PPO: `max(-A r, -A clip(r))`, and with a dual clip `c` at most `-A c` where `A < 0`.

    `unclipped(new_logp, plan)` is a mask of tokens that have neither clip at this moment.
    """

    def terms(ratio: Tensor, new_logp: Tensor, plan: Plan) -> Terms:
        # Where A > 0 only the upper bound can bind and where A < 0 only the lower one (and c), so this is one clamp.
        up = plan.advantage > 0
        lower = (1 - plan.clip_low).masked_fill_(up, -math.inf)
        upper = torch.where(up, 1 + plan.clip_high, math.inf if dual is None else dual)
        clipped = torch.clamp(ratio, lower, upper)
        if unclipped is not None:
            clipped = torch.where(unclipped(new_logp.detach(), plan), ratio, clipped)
        return -plan.advantage * clipped, clipped != ratio

    formula = f"l = max(-A r, -A clip(r, {1 - low:.6g}, {1 + high:.6g}))"
    if dual is not None:
        formula += f", at most -A {dual:g} where A < 0"
    return Surrogate(formula, terms, low, high)


def weighted_log_prob(low: float, high: float, upper_only: bool) -> Surrogate:
    """CISPO: `-stopgrad(clip(r)) A ln p`; a clipped token keeps its gradient, with the clipped weight."""

    def terms(ratio: Tensor, new_logp: Tensor, plan: Plan) -> Terms:
        # The gradient flows through ln p alone; the floor keeps 0 x -inf out of the product.
        detached = ratio.detach()
        clipped = detached.clamp(None if upper_only else 1 - plan.clip_low, 1 + plan.clip_high)
        return -clipped * plan.advantage * new_logp.clamp(min=LOGP_FLOOR), clipped != detached

    lowest = 0 if upper_only else 1 - low
    return Surrogate(f"l = -stopgrad(clip(r, {lowest:.6g}, {1 + high:.6g})) A ln p_new", terms, low, high)


def probability_mask(divergence: Divergence, low: float, high: float, cap: float) -> Surrogate:
    """DPPO: `-stopgrad(min(r, cap)) A ln p`, 0 where the probability has moved too far in the direction A pushes to."""

    def terms(ratio: Tensor, new_logp: Tensor, plan: Plan) -> Terms:
        floored = new_logp.clamp(min=LOGP_FLOOR)
        new, old, up = floored.detach(), plan.old_logp, plan.advantage > 0
        moved = binary_kl(old, new) if divergence == "kl" else (new.exp() - old.exp()).abs()
        # where of two Python numbers gives float32, also for a plan in float64: one of them is a tensor.
        most = torch.where(up, plan.advantage.new_full((), high), low)
        masked = (moved > most) & torch.where(up, new > old, new < old)
        weight = ratio.detach().clamp(max=cap).masked_fill(masked, 0.0)
        return -weight * plan.advantage * floored, masked

    formula = f"l = -stopgrad(min(r, {cap:g})) A ln p_new, and 0 where "
    if divergence == "tv":
        formula += f"A > 0 and p_new - p_old > {high:g}, or A <= 0 and p_old - p_new > {low:g}"
    else:
        formula += f"A > 0, p_new > p_old and D > {high:g}, or A <= 0, p_new < p_old and D > {low:g}; "
        formula += "D = p_old ln(p_old / p_new) + (1 - p_old) ln((1 - p_old) / (1 - p_new))"
    return Surrogate(formula, terms)


def binary_kl(old_logp: Tensor, new_logp: Tensor) -> Tensor:
    """Return KL(old || new) of whether the token is sampled or any other: `p ln(p/p') + (1-p) ln((1-p)/(1-p'))`."""
    # expm1 keeps the digits of 1 - p that exp loses near 1. The floor keeps a p that was rounded to 1 from an infinite
    # divergence, and 0 x ln 0 from NaN.
    old_rest = (-torch.expm1(old_logp)).clamp(min=COMPLEMENT_LEAST)
    new_rest = (-torch.expm1(new_logp)).clamp(min=COMPLEMENT_LEAST)
    return old_logp.exp() * (old_logp - new_logp) + old_rest * (old_rest / new_rest).log()


def gamma_weight(k_pos: float, lambda_pos: float, k_neg: float, lambda_neg: float) -> Surrogate:
    """VESPO: `-stopgrad(phi(w)) A ln p`, with `w` the product of the response's ratios and phi a gamma kernel."""

    def terms(ratio: Tensor, new_logp: Tensor, plan: Plan) -> Terms:
        assert plan.spans is not None
        total = plan.spans.sum(log_ratio(new_logp.detach(), plan.old_logp))
        log_w = plan.spans.spread(total.clamp(LOG_WEIGHT_LEAST, LOG_RATIO_LIMIT))
        rewarded = plan.advantage >= 0
        k = torch.where(rewarded, log_w.new_full((), k_pos), k_neg)
        lam = torch.where(rewarded, log_w.new_full((), lambda_pos), lambda_neg)
        # The logarithm of e^lam w^k e^(-lam w): exactly 0 at w = 1. Its limit binds for a lambda far above k alone.
        phi = (k * log_w - lam * torch.expm1(log_w)).clamp(max=LOG_RATIO_LIMIT).exp()
        return -phi * plan.advantage * new_logp.clamp(min=LOGP_FLOOR), None

    kernel = f"phi = w^{k_pos:g} e^({lambda_pos:g} (1 - w)) where A >= 0, else w^{k_neg:g} e^({lambda_neg:g} (1 - w))"
    product = "w = product of r over the response, ln w within [ln 1e-8, 20]"
    return Surrogate(f"l = -stopgrad(phi) A ln p_new, {kernel}; {product}", terms)


def soft_gate(tau_positive: float, tau_negative: float) -> Surrogate:
    """SAPO: a sigmoid around ratio 1 in place of a clip."""

    def terms(ratio: Tensor, new_logp: Tensor, plan: Plan) -> Terms:
        # where of two Python numbers gives float32, also for a plan in float64: one of them is a tensor.
        up = plan.advantage.new_full((), tau_positive)
        tau = torch.where(plan.advantage > 0, up, tau_negative)
        return -plan.advantage * (4 / tau) * torch.sigmoid(tau * (ratio - 1)), None

    taus = f"tau = {tau_positive:g} where A > 0, else {tau_negative:g}"
    return Surrogate(f"l = -A (4 / tau) sigmoid(tau (r - 1)), {taus}", terms)


def geometric_clip(low: float, high: float) -> Surrogate:
    """GMPO: `-A r`, where the log ratios behind `r` were clipped token by token."""

    def terms(ratio: Tensor, new_logp: Tensor, plan: Plan) -> Terms:
        # `clipped_response_ratio` did the clipping; here the clipped tokens are only found again, for the metrics.
        log_rho = log_ratio(new_logp.detach(), plan.old_logp)
        over = (plan.advantage > 0) & (log_rho > plan.clip_high)
        under = (plan.advantage < 0) & (log_rho < -plan.clip_low)
        return -plan.advantage * ratio, over | under

    formula = f"l = -A r, the log ratios in r at most {high:g} where A > 0 and at least {-low:g} where A < 0"
    return Surrogate(formula, terms, low, high)


def _policy_gradient(ratio: Tensor, new_logp: Tensor, plan: Plan) -> Terms:
    return -plan.advantage * new_logp.clamp(min=LOGP_FLOOR), None


log_prob = Surrogate("l = -A ln p_new", _policy_gradient)
