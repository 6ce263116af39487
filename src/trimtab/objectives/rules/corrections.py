"""Corrections for the mismatch between sampler and trainer: detached weights from `w = p_old / p_sampler`."""

from __future__ import annotations

from trimtab.objectives.lazy_torch import torch
from trimtab.objectives.plan_builder import PlanBuilder, TokenRule
from trimtab.objectives.ratios import LOG_RATIO_LIMIT, log_ratio
from trimtab.objectives.reasons import Reason

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
