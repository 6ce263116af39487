"""Penalties added to the surrogate, and corrections for the mismatch between sampler and trainer.

A penalty is one term per token, a function of the new log-probability. A correction is a detached weight from
`w = p_old / p_sampler`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trimtab.objectives.lazy_torch import Tensor, torch
from trimtab.objectives.plan import Plan, Reason
from trimtab.objectives.plan_builder import PlanBuilder, TokenRule
from trimtab.objectives.ratios import LOG_RATIO_LIMIT, log_ratio
from trimtab.objectives.selection import top_share

Estimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class Penalty:
    """A penalty: `terms` returns the term of every token, `formula` states it."""

    name: str
    formula: str
    terms: Callable[[Tensor, Plan], Tensor]
    needs: frozenset[str] = frozenset()


def kl_estimate(new_logp: Tensor, other_logp: Tensor, estimator: Estimator = "k3") -> Tensor:
    """Estimate KL(new || other) per token: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1, with d = ln other - ln new."""
    d = -log_ratio(new_logp, other_logp)
    if estimator == "k1":
        return -d
    # expm1, because exp(d) - 1 has no correct digits left where d is small and k3 is about d^2 / 2.
    return d * d / 2 if estimator == "k2" else torch.expm1(d) - d


def kl(coef: float = 0.001, estimator: Estimator = "k3", corrected: bool = False) -> Penalty:
    """Penalise the KL divergence from a reference model, token by token.

    corrected=true multiplies the estimate by the token's p_new / p_old and takes the gradient through both
    (2512.02556; K3++ in 2602.04417). Value and gradient of k1 and k3 are then unbiased, although the tokens were
    sampled from the old policy. The factor is always the token's own ratio, even in methods with one ratio per
    response.
    """

    def terms(new_logp: Tensor, plan: Plan) -> Tensor:
        assert plan.ref_logp is not None
        estimate = coef * kl_estimate(new_logp, plan.ref_logp, estimator)
        return log_ratio(new_logp, plan.old_logp).exp() * estimate if corrected else estimate

    factor = "p_new / p_old x " if corrected else ""
    formula = f"+ {coef:g} {factor}{estimator}(p_new, p_ref) on every counted token"
    return Penalty("kl", formula, terms, frozenset({"ref_logp"}))


def penalized(new_logp: Tensor, plan: Plan) -> Tensor:
    """Return a mask of the tokens that have a penalty instead of a clip (KL-Cov); none if its coefficient is 0."""
    assert plan.penalty is not None
    return plan.penalty != 0


def penalized_below_proxy(new_logp: Tensor, plan: Plan) -> Tensor:
    """Return a mask of the tokens that have a penalty instead of a clip, while they are below the proxy (Lp-Reg)."""
    return penalized(new_logp, plan) & (new_logp < _proxy(plan))


def _proxy(plan: Plan) -> Tensor:
    # Without `proxy_logp` nothing was filtered away, and the proxy is the old policy itself.
    return plan.old_logp if plan.proxy_logp is None else plan.proxy_logp


def _distance_from_old(new_logp: Tensor, plan: Plan) -> Tensor:
    """Penalise `|ln p_new - ln p_old|` on the tokens that the plan penalises (KL-Cov)."""
    assert plan.penalty is not None
    return plan.penalty * log_ratio(new_logp, plan.old_logp).abs()


def _below_proxy(new_logp: Tensor, plan: Plan) -> Tensor:
    """Penalise k3 to the proxy policy on the tokens that the plan penalises, while they are below it (Lp-Reg)."""
    assert plan.penalty is not None
    return plan.penalty * penalized_below_proxy(new_logp.detach(), plan) * kl_estimate(new_logp, _proxy(plan))


# Without a formula: that of the rule which selects their tokens states both.
distance_from_old = Penalty("kl_cov", "", _distance_from_old)
below_proxy = Penalty("lp_reg", "", _below_proxy)


def penalize_improbable(share: float, coef: float) -> TokenRule:
    """Select the least probable tokens of punished responses for the penalty of `below_proxy` (Lp-Reg)."""

    def apply(builder: PlanBuilder) -> None:
        builder.penalize(top_share(-builder.logp, share, builder.batch.advantage < 0), coef)

    tokens = f"of tokens with A < 0 the lowest {share:.0%} by ln p"
    return TokenRule("lp_reg", f"{tokens} get, while p_new < q, l = -A r and a penalty of {coef:g} k3(p_new, q)", apply)


SAMPLER = frozenset({"sampler_logp"})


def _mismatch(builder: PlanBuilder) -> torch.Tensor:
    # p_old even where rules judge by the current policy: the ratio of the surrogate covers p_new / p_old already.
    assert builder.batch.sampler_logp is not None
    return log_ratio(builder.batch.old_logp, builder.batch.sampler_logp)


def tis(cap: float = 2.0) -> TokenRule:
    """Truncated importance sampling: weight every token by p_old / p_sampler, up to a cap."""

    def apply(builder: PlanBuilder) -> None:
        w = _mismatch(builder).exp()
        builder.weight = builder.weight * w.clamp(max=cap)
        builder.mark_all(w != 1, Reason.CORRECTED)
        # The mean before the cap: it shows how far sampler and trainer are apart.
        builder.metrics["correction/weight_mean"] = w.sum() / max(builder.batch.tokens, 1)

    return TokenRule("tis", f"weight min(w, {cap:g}), w = p_old / p_sampler", apply, SAMPLER)


def icepop(low: float = 0.5, high: float = 5.0, renormalize: bool = False) -> TokenRule:
    """Weight every token by p_old / p_sampler, and drop tokens whose weight is outside a band."""

    def apply(builder: PlanBuilder) -> None:
        w = _mismatch(builder).exp()
        builder.weight = builder.weight * w
        builder.mark_all(w != 1, Reason.CORRECTED)
        outside = ((w < low) | (w > high)).nonzero().squeeze(1)
        (builder.silence if renormalize else builder.drop)(outside, Reason.DROPPED)
        builder.metrics["correction/weight_mean"] = w.sum() / max(builder.batch.tokens, 1)

    formula = f"weight w where {low:g} <= w <= {high:g}, else 0; w = p_old / p_sampler"
    return TokenRule("icepop", formula, apply, SAMPLER)


def mis(low: float = 0.5, high: float = 2.0, geometric: bool = False, renormalize: bool = False) -> TokenRule:
    """Masked importance sampling: drop responses whose p_old / p_sampler is outside a band.

    The ratio of a response is the product over its tokens. The other responses keep weight 1. Add tis to weight their
    tokens too.
    """

    def apply(builder: PlanBuilder) -> None:
        responses = builder.batch.response_spans
        mean = responses.mean(_mismatch(builder))
        # In logarithms: the product of thousands of ratios overflows.
        log_w = mean if geometric else mean * responses.size
        w = log_w.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        # NaN, the mean of a response without tokens, compares false with both ends.
        outside = responses.spread((w < low) | (w > high)).nonzero().squeeze(1)
        (builder.silence if renormalize else builder.drop)(outside, Reason.DROPPED)

    what = "geometric mean" if geometric else "product"
    formula = f"responses dropped unless {low:g} <= {what} of p_old / p_sampler <= {high:g}"
    return TokenRule("mis", formula, apply, SAMPLER)
