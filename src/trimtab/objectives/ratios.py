"""Importance ratios: per token, per segment or per response.

All start from `log_rho = ln p_new - ln p_old`, clamped to +-20. A ratio shared by several tokens is the exponential of
their mean `log_rho`; its gradient goes through each token's own term (GSPO-token), so the value is shared and every
token keeps its own gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from trimtab.objectives.lazy_torch import Tensor, torch
from trimtab.objectives.plan import Plan
from trimtab.objectives.token_batch import Spans, TokenBatch

LOG_RATIO_LIMIT = 20.0  # exp(20) and its products with weights are finite in fp32

Level = Literal["token", "segment", "response"]


@dataclass(frozen=True)
class Ratio:
    """How the log ratios of tokens become the ratio in the surrogate; `prepare` acts on them before the mean.

    With `shared` false every token keeps its own ratio, and the plan has the spans for a surrogate that sums over them.
    """

    level: Level
    formula: str
    prepare: Callable[[Tensor, Plan], Tensor] | None = None
    shared: bool = True

    def spans(self, batch: TokenBatch) -> Spans | None:
        """Return the spans of tokens that share a ratio or a weight; None where each token has its own."""
        if self.level == "token":
            return None
        return batch.spans if self.level == "segment" else batch.response_spans

    def __call__(self, new_logp: Tensor, log_rho: Tensor, plan: Plan) -> Tensor:
        """Return the ratio of every token."""
        if plan.spans is None or not self.shared:
            return log_rho.exp()
        if self.prepare is not None:  # the gradient then goes through the clipped log ratios
            new_logp = log_rho = self.prepare(log_rho, plan)
        shared: Tensor = _shared_ratio()(new_logp, log_rho.detach(), plan.spans)
        return shared


def log_ratio(new_logp: Tensor, old_logp: Tensor) -> Tensor:
    """Return `ln p_new - ln p_old`, clamped to +-20 so that its exponential and products of it stay finite."""
    return (new_logp - old_logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ratio_sums(new_logp: Tensor, old_logp: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the tokens' ratios and that of their squares, which add up over parts of a batch."""
    ratio = log_ratio(new_logp, old_logp).double().exp()
    return ratio.sum(), ratio.square().sum()


def effective_sample_share(total: float, squares: float, tokens: int) -> float:
    """Return (sum w)^2 / (n sum w^2) of n ratios: 1 if all are equal, 1 / n if a single one holds all the weight."""
    return total * total / (tokens * squares) if tokens else 1.0


@cache
def _shared_ratio() -> Any:
    """Return the function r = stopgrad(exp(mean log_rho over the span)) x p / stopgrad(p)."""

    # Defined on first use: deriving from a class of torch's imports it.
    class SharedRatio(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, own: Tensor, log_rho: Tensor, spans: Spans) -> Tensor:
            ratio = spans.spread(spans.mean(log_rho).exp())
            ctx.save_for_backward(ratio)
            return ratio

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
            (ratio,) = ctx.saved_tensors
            return gradient * ratio, None, None

    return SharedRatio.apply


def _clip_where_pushed(log_rho: Tensor, plan: Plan) -> Tensor:
    """Clip log ratios from above where A > 0 and from below where A < 0 (GMPO)."""
    # A token without signal keeps its log ratio: it still enters the mean of its response.
    clipped = torch.where(plan.advantage > 0, log_rho.minimum(plan.clip_high), log_rho.maximum(-plan.clip_low))
    return torch.where(plan.advantage == 0, log_rho, clipped)


token_ratio = Ratio("token", "r = p_new / p_old of each token")
segment_ratio = Ratio("segment", "r = exp(mean of ln(p_new / p_old) over the token's subsentence)")
response_ratio = Ratio("response", "r = exp(mean of ln(p_new / p_old) over the response)")
# Metrics and alarms then see the ratios of tokens: a product over a thousand tokens is far from 1 in any update.
token_ratio_in_response = Ratio("response", "r = p_new / p_old of each token", shared=False)
clipped_response_ratio = Ratio(
    "response",
    "r = exp(mean over the response of ln(p_new / p_old), each clipped on the side its advantage pushes to)",
    _clip_where_pushed,
)
