"""Corrections for a sampler that is not quite the trainer: detached weights from `w = p_old / p_sampler`."""

from __future__ import annotations

import torch

from trimtab.objectives.plan_builder import Draft, Rule
from trimtab.objectives.ratios import LOG_RATIO_LIMIT, log_ratio
from trimtab.objectives.reasons import Reason

SAMPLER = frozenset({"sampler_logp"})


def _mismatch(draft: Draft) -> torch.Tensor:
    assert draft.batch.sampler_logp is not None
    return log_ratio(draft.batch.old_logp, draft.batch.sampler_logp)


def truncated(cap: float) -> Rule:
    """TIS: every token is weighted by `min(w, cap)`."""

    def apply(draft: Draft) -> None:
        w = _mismatch(draft).exp()
        draft.weight = draft.weight * w.clamp(max=cap)
        draft.mark_all(w != 1, Reason.CORRECTED)
        draft.metrics["correction/weight_mean"] = w.sum() / max(draft.batch.tokens, 1)

    return Rule("tis", f"weight min(w, {cap:g}), w = p_old / p_sampler", apply, SAMPLER)


def banded(low: float, high: float, renormalize: bool) -> Rule:
    """IcePop: tokens are weighted by `w`, and dropped where it leaves the band."""

    def apply(draft: Draft) -> None:
        w = _mismatch(draft).exp()
        draft.weight = draft.weight * w
        draft.mark_all(w != 1, Reason.CORRECTED)
        outside = ((w < low) | (w > high)).nonzero().squeeze(1)
        (draft.silence if renormalize else draft.drop)(outside, Reason.DROPPED)
        draft.metrics["correction/weight_mean"] = w.sum() / max(draft.batch.tokens, 1)

    return Rule("icepop", f"weight w where {low:g} <= w <= {high:g}, else 0; w = p_old / p_sampler", apply, SAMPLER)


def drop_responses(low: float, high: float, geometric: bool, renormalize: bool) -> Rule:
    """MIS: whole responses are dropped where their ratio leaves the band."""

    def apply(draft: Draft) -> None:
        responses = draft.batch.response_runs
        mean = responses.mean(_mismatch(draft))
        log_w = mean if geometric else mean * responses.size
        w = log_w.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        outside = responses.spread((w < low) | (w > high)).nonzero().squeeze(1)
        (draft.silence if renormalize else draft.drop)(outside, Reason.DROPPED)

    what = "geometric mean" if geometric else "product"
    return Rule("mis", f"responses dropped unless {low:g} <= {what} of p_old / p_sampler <= {high:g}", apply, SAMPLER)
