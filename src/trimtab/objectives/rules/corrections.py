"""Corrections for the mismatch between sampler and trainer: detached weights from `w = p_old / p_sampler`."""

from __future__ import annotations

import torch

from trimtab.objectives.plan_builder import PlanBuilder, TokenRule
from trimtab.objectives.ratios import LOG_RATIO_LIMIT, log_ratio
from trimtab.objectives.reasons import Reason

SAMPLER = frozenset({"sampler_logp"})


def _mismatch(builder: PlanBuilder) -> torch.Tensor:
    assert builder.batch.sampler_logp is not None
    return log_ratio(builder.batch.old_logp, builder.batch.sampler_logp)


def truncated(cap: float) -> TokenRule:
    """Weight every token by `min(w, cap)` (TIS)."""

    def apply(builder: PlanBuilder) -> None:
        w = _mismatch(builder).exp()
        builder.weight = builder.weight * w.clamp(max=cap)
        builder.mark_all(w != 1, Reason.CORRECTED)
        builder.metrics["correction/weight_mean"] = w.sum() / max(builder.batch.tokens, 1)

    return TokenRule("tis", f"weight min(w, {cap:g}), w = p_old / p_sampler", apply, SAMPLER)


def banded(low: float, high: float, renormalize: bool) -> TokenRule:
    """Weight tokens by `w`, and drop those outside the band (IcePop)."""

    def apply(builder: PlanBuilder) -> None:
        w = _mismatch(builder).exp()
        builder.weight = builder.weight * w
        builder.mark_all(w != 1, Reason.CORRECTED)
        outside = ((w < low) | (w > high)).nonzero().squeeze(1)
        (builder.silence if renormalize else builder.drop)(outside, Reason.DROPPED)
        builder.metrics["correction/weight_mean"] = w.sum() / max(builder.batch.tokens, 1)

    return TokenRule(
        "icepop", f"weight w where {low:g} <= w <= {high:g}, else 0; w = p_old / p_sampler", apply, SAMPLER
    )


def drop_responses(low: float, high: float, geometric: bool, renormalize: bool) -> TokenRule:
    """Drop whole responses whose ratio is outside the band (MIS)."""

    def apply(builder: PlanBuilder) -> None:
        responses = builder.batch.response_spans
        mean = responses.mean(_mismatch(builder))
        # In logarithms: the product of thousands of ratios overflows.
        log_w = mean if geometric else mean * responses.size
        w = log_w.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        outside = responses.spread((w < low) | (w > high)).nonzero().squeeze(1)
        (builder.silence if renormalize else builder.drop)(outside, Reason.DROPPED)

    what = "geometric mean" if geometric else "product"
    return TokenRule(
        "mis", f"responses dropped unless {low:g} <= {what} of p_old / p_sampler <= {high:g}", apply, SAMPLER
    )
