"""Penalties added to the surrogate: one term per token, a function of the new log-probability."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trimtab.objectives.lazy_torch import Tensor, torch
from trimtab.objectives.plan import Plan
from trimtab.objectives.plan_builder import PlanBuilder, TokenRule
from trimtab.objectives.ratios import log_ratio
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
