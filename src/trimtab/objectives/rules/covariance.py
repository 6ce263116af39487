"""Clip-Cov and KL-Cov: the few tokens whose log-probability and advantage move together drain the entropy."""

from __future__ import annotations

from torch import Tensor

from trimtab.objectives.plan_builder import Draft, Rule
from trimtab.objectives.ratios import log_ratio
from trimtab.objectives.selection import random_pick, share_count, top_share


def _covariance(draft: Draft) -> Tensor:
    logp, advantage = draft.logp, draft.advantage
    return (advantage - advantage.mean()) * (logp - logp.mean())


def drop_covariant(share: float, low: float, high: float, seed: int) -> Rule:
    """Clip-Cov: of the unclipped tokens with `low < cov < high`, a random share (of all tokens) is dropped."""

    def apply(draft: Draft) -> None:
        cov = _covariance(draft)
        ratio = log_ratio(draft.logp, draft.batch.old_logp).exp()
        over = (draft.advantage > 0) & (ratio > 1 + draft.clip_high)
        under = (draft.advantage < 0) & (ratio < 1 - draft.clip_low)
        among = (cov > low) & (cov < high) & ~over & ~under
        count = share_count(draft.batch.tokens, share)
        draft.drop(random_pick(among.nonzero().squeeze(1), count, seed, draft.batch.old_logp))

    says = f"a random {share:g} of all tokens dropped, among unclipped ones with {low:g} < cov < {high:g}"
    return Rule("clip_cov", f"{says}; cov = (A - mean A)(ln p - mean ln p)", apply)


def penalize_covariant(share: float, coef: float) -> Rule:
    """KL-Cov: the tokens with the largest covariance get a penalty in place of their clip."""

    def apply(draft: Draft) -> None:
        draft.penalize(top_share(_covariance(draft), share), coef)

    says = f"the top {share:g} by cov get l = -A r + {coef:g} |ln p_new - ln p_old|"
    return Rule("kl_cov", f"{says}; cov = (A - mean A)(ln p - mean ln p)", apply)


def penalize_improbable(share: float, coef: float) -> Rule:
    """Lp-Reg: the least probable tokens of punished responses are held to a proxy policy."""

    def apply(draft: Draft) -> None:
        punished = draft.batch.advantage < 0
        draft.penalize(top_share(-draft.logp, share, punished), coef)

    return Rule(
        "lp_reg",
        f"of tokens with A < 0 the lowest {share:.0%} by ln p get l = -A r + {coef:g} k3(p_new, q) while p_new < q",
        apply,
    )
