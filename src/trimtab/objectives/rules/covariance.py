"""Clip-Cov and KL-Cov: act on the few tokens with a high covariance of log-probability and advantage."""

from __future__ import annotations

from trimtab.objectives.lazy_torch import Tensor
from trimtab.objectives.plan_builder import PlanBuilder, TokenRule
from trimtab.objectives.ratios import log_ratio
from trimtab.objectives.selection import random_pick, share_count, top_share


def _covariance(builder: PlanBuilder) -> Tensor:
    # To first order an update lowers the entropy by the covariance of ln p and A: these are a token's terms of it.
    logp, advantage = builder.logp, builder.advantage
    return (advantage - advantage.mean()) * (logp - logp.mean())


def drop_covariant(share: float, low: float, high: float, seed: int) -> TokenRule:
    """Drop a random share (of all tokens) of the unclipped tokens with `low < cov < high` (Clip-Cov)."""

    def apply(builder: PlanBuilder) -> None:
        cov = _covariance(builder)
        ratio = log_ratio(builder.logp, builder.batch.old_logp).exp()
        over = (builder.advantage > 0) & (ratio > 1 + builder.clip_high)
        under = (builder.advantage < 0) & (ratio < 1 - builder.clip_low)
        among = (cov > low) & (cov < high) & ~over & ~under
        count = share_count(builder.batch.tokens, share)  # of all tokens, not of the candidates
        builder.drop(random_pick(among.nonzero().squeeze(1), count, seed, builder.batch.old_logp))

    formula = f"a random {share:g} of all tokens dropped, among unclipped ones with {low:g} < cov < {high:g}"
    return TokenRule("clip_cov", f"{formula}; cov = (A - mean A)(ln p - mean ln p)", apply)


def penalize_covariant(share: float, coef: float) -> TokenRule:
    """Put a penalty on the tokens with the largest covariance in place of their clip (KL-Cov)."""

    def apply(builder: PlanBuilder) -> None:
        builder.penalize(top_share(_covariance(builder), share), coef)

    formula = f"the top {share:g} by cov get l = -A r and a penalty of {coef:g} |ln p_new - ln p_old|"
    return TokenRule("kl_cov", f"{formula}; cov = (A - mean A)(ln p - mean ln p)", apply)
