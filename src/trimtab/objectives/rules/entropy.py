"""Rules that select tokens, scale clip ranges or shape advantages by entropy."""

from __future__ import annotations

from typing import Literal

import torch

from trimtab.objectives.plan_builder import PlanBuilder, TokenRule
from trimtab.objectives.reasons import Reason
from trimtab.objectives.selection import top_share

ENTROPY = frozenset({"entropy"})

ClipScale = Literal["fixed", "sqrt_length"]


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
