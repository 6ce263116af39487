"""Rules that select tokens, scale clip ranges or shape advantages by entropy; Clip-Cov and KL-Cov, which protect it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from trimtab.objectives.lazy_torch import Tensor, torch
from trimtab.objectives.plan import Reason
from trimtab.objectives.plan_builder import PlanBuilder, TokenRule
from trimtab.objectives.ratios import log_ratio
from trimtab.objectives.selection import random_pick, share_count, top_share

ENTROPY = frozenset({"entropy"})

ClipScale = Literal["fixed", "sqrt_length"]
EntropyGradient = Literal["sampled", "exact"]


def top_entropy(share: float = 0.2, renormalize: bool = False) -> TokenRule:
    """Train only on the tokens with the highest entropy.

    The mean still divides by the number of all tokens. With renormalize=true it divides by the kept ones, as some
    trainers do.
    """

    def apply(builder: PlanBuilder) -> None:
        kept = top_share(builder.entropy, share)
        rest = torch.ones_like(builder.positive).index_fill_(0, kept, False).nonzero().squeeze(1)
        (builder.silence if renormalize else builder.drop)(rest, Reason.MASKED)

    over = "kept tokens" if renormalize else "all tokens"
    formula = f"weight 0 unless H is in the top {share:.0%} (denominator: {over})"
    return TokenRule("top_entropy", formula, apply, ENTROPY)


def widen_by_entropy(least: float, most: float, scale: ClipScale = "fixed") -> TokenRule:
    """Scale the clip range of a segment by its entropy relative to the mean over segments, and by its length (SSPO)."""

    def apply(builder: PlanBuilder) -> None:
        spans = builder.batch.spans
        mean = spans.mean(builder.entropy)
        centre = mean.mean()  # over segments, whatever their length
        # 0 / 0 where no segment has any entropy: leave the range as it is.
        relative = (mean / centre).nan_to_num(1.0).clamp(least, most)
        factor = spans.spread(relative)
        builder.mark_all(factor > 1, Reason.WIDENED)
        builder.mark_all(factor < 1, Reason.NARROWED)
        if scale == "sqrt_length":  # after the marks, which speak of the entropy
            factor /= spans.spread(spans.size.to(factor.dtype).sqrt())
        # In place for the second: nothing reads `factor` afterwards, and a million tokens are 4 MB.
        builder.clip_low, builder.clip_high = builder.clip_low * factor, factor.mul_(builder.clip_high)
        if builder.batch.tokens:
            builder.metrics["sspo/segment_entropy"] = centre

    formula = f"clip range times clip(segment entropy / mean segment entropy, {least:g}, {most:g})"
    if scale == "sqrt_length":
        formula += " / sqrt(tokens of the segment)"
    return TokenRule("entropy_clip", formula, apply, ENTROPY | {"segment"})


def entropy_shaped_advantage(coef: float, cap: float) -> TokenRule:
    """Raise the advantage of uncertain tokens by at most a share of its own size."""

    def apply(builder: PlanBuilder) -> None:
        # At most a share of |A|: with cap < 1 no advantage changes its sign.
        bonus = torch.minimum(coef * builder.entropy, builder.advantage.abs() * cap)
        builder.advantage = builder.advantage + bonus
        builder.mark_all(bonus > 0, Reason.RESHAPED)

    return TokenRule("entropy_advantage", f"A' = A + min({coef:g} H, {cap:g} |A|)", apply, ENTROPY)


def checked_state(owner: str, state: Mapping[str, float], required: Iterable[str], known: Iterable[str]) -> list[float]:
    """Return the values of a controller's state in the order of `known`, NaN for one that may be missing and is."""
    if not {*required} <= {*state} <= {*known}:
        raise ValueError(f"the state of {owner} has the keys {sorted(known)}, got {sorted(state)}")
    if not all(math.isfinite(float(value)) for value in state.values()):
        raise ValueError(f"the state of {owner} must be finite numbers, got {dict(state)}")
    return [float(state.get(name, math.nan)) for name in known]


@dataclass
class AdaptiveCoefficient:
    """The coefficient of an entropy bonus: up by `rate` after a rollout below the target, down after one above it.

    It is 0 while the entropy is above the target. Without a target it is constant.
    """

    start: float
    target: float | None
    rate: float
    current: float = math.nan
    below: bool = True

    def __post_init__(self) -> None:
        self.current = self.start

    @property
    def in_use(self) -> float:
        """The coefficient of this update."""
        return self.current if self.below else 0.0

    def observe(self, entropy: float) -> None:
        """Update the coefficient with a rollout's token-mean entropy; one that is not finite changes nothing."""
        if self.target is None or not math.isfinite(entropy):
            return
        self.below = entropy < self.target
        self.current = max(0.0, self.current + (self.rate if self.below else -self.rate))

    def state_dict(self) -> dict[str, float]:
        """Return the state as plain numbers."""
        return {"current": self.current, "below": float(self.below)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a state that `state_dict` returned; anything else raises and changes nothing."""
        keys = ("current", "below")
        self.current, below = checked_state("an entropy bonus", state, keys, keys)
        self.below = bool(below)


def entropy_bonus(
    coef: float = 0.01, target: float | None = None, rate: float = 0.005, gradient: EntropyGradient = "sampled"
) -> TokenRule:
    """Add the entropy to the objective: as an advantage, A' = A - coef (ln p + H), or by its own gradient.

    The expectation of that advantage over the sampled tokens is coef times the gradient of the entropy (2603.11682).
    With gradient=exact the loss is l - coef H instead, and the gradient is that of the whole distribution: no sample
    adds noise to it, and neither clip nor weight of a token changes it. With a target the coefficient starts at `coef`,
    changes by `rate` per rollout, and acts only below the target, as in Skywork-OR1 (2505.22312) and TRL's adaptive
    entropy.
    """
    state = AdaptiveCoefficient(coef, target, rate)
    exact = gradient == "exact"

    def apply(builder: PlanBuilder) -> None:
        coefficient = state.in_use
        builder.metrics["entropy_bonus/coef"] = builder.weight.new_full((), coefficient)
        if coefficient and exact:
            builder.reward_entropy(coefficient)
        elif coefficient:
            builder.advantage = builder.advantage - coefficient * (builder.logp + builder.entropy)
            builder.mark_all(torch.ones_like(builder.positive), Reason.RESHAPED)

    adapts = "" if target is None else f", while the rollout's mean entropy is below {target:g}; +-{rate:g} per rollout"
    words = {Reason.RESHAPED: "advantage shifted by the entropy bonus"}
    formula = f"- {coef:g} H on every counted token{adapts}" if exact else f"A' = A - {coef:g} (ln p + H){adapts}"
    return TokenRule("entropy_bonus", formula, apply, ENTROPY, state, reason_words=words, entropy_grad=exact)


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
