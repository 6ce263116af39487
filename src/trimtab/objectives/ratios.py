"""Importance ratios: per token, per segment or per response.

All start from `log_rho = ln p_new - ln p_old`, held within +-20. A ratio shared by several tokens is the exponential of
their mean `log_rho`; its gradient goes through each token's own term (the form GSPO calls GSPO-token), so the value is
shared and every token keeps its own gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trimtab.objectives.plan import Plan

LOG_RATIO_LIMIT = 20.0

Level = Literal["token", "segment", "response"]


@dataclass(frozen=True)
class Ratio:
    """How log ratios of tokens become the ratio in the surrogate."""

    level: Level
    says: str
    prepare: Callable[[Tensor, Plan], Tensor] | None = None

    def __call__(self, log_rho: Tensor, plan: Plan) -> Tensor:
        """The ratio of every token."""
        if self.prepare is not None:
            log_rho = self.prepare(log_rho, plan)
        return (log_rho if self.level == "token" else _shared(log_rho, plan)).exp()


def log_ratio(new_logp: Tensor, old_logp: Tensor) -> Tensor:
    """`ln p_new - ln p_old`, held within +-20 so that its exponential and products of it stay finite."""
    return (new_logp - old_logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def segment_mean(values: Tensor, size: Tensor) -> Tensor:
    """The mean of `values` over each run of `size` tokens."""
    return torch.segment_reduce(values, "mean", lengths=size, unsafe=True)


def _shared(log_rho: Tensor, plan: Plan) -> Tensor:
    assert plan.segment is not None and plan.segment_size is not None
    value = log_rho.detach()
    mean = segment_mean(value, plan.segment_size).index_select(0, plan.segment)
    return mean + (log_rho - value)  # the second term is 0 and carries the gradient


def _one_sided(log_rho: Tensor, plan: Plan) -> Tensor:
    held = torch.where(plan.advantage > 0, log_rho.minimum(plan.clip_high), log_rho.maximum(-plan.clip_low))
    return torch.where(plan.advantage == 0, log_rho, held)


token_ratio = Ratio("token", "r = p_new / p_old of each token")
segment_ratio = Ratio("segment", "r = exp(mean of ln(p_new / p_old) over the token's subsentence)")
response_ratio = Ratio("response", "r = exp(mean of ln(p_new / p_old) over the response)")
clipped_response_ratio = Ratio(
    "response",
    "r = exp(mean over the response of ln(p_new / p_old), each clipped on the side its advantage pushes to)",
    _one_sided,
)
