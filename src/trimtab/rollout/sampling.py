"""Drawing a token: temperature, top-k and top-p, then inversion by one number of the sample's own stream."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.rollout.rng import uniform
from trimtab.rollout.types import SamplingOptions


def draw(logits: Tensor, keys: Tensor, position: int | Tensor, options: SamplingOptions) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability under the distribution it was drawn from; temperature 0 is greedy."""
    if options.temperature == 0:
        logp = logits.float().log_softmax(-1)
        best = logp.max(-1)
        return best.indices, best.values
    logp = restrict(logits.float() / options.temperature, options).log_softmax(-1)
    mass = logp.exp().to(torch.float64).cumsum(-1)
    goal = uniform(keys, position)[:, None] * mass[:, -1:]  # the last may miss 1 by rounding
    token = torch.searchsorted(mass, goal, right=True).clamp(max=logits.shape[-1] - 1)
    return token.squeeze(1), logp.gather(1, token).squeeze(1)


def restrict(logits: Tensor, options: SamplingOptions) -> Tensor:
    """Logits with everything outside top-k and then top-p at -inf; tokens of equal logits stay or go together."""
    if options.top_k and options.top_k < logits.shape[-1]:
        least = logits.topk(options.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if options.top_p < 1:
        ordered = logits.sort(dim=-1, descending=True).values
        p = ordered.softmax(-1)
        inside = (p.cumsum(-1) - p < options.top_p).sum(-1, keepdim=True).clamp(min=1)  # the one that crosses stays
        logits = logits.masked_fill(logits < ordered.gather(1, inside - 1), -torch.inf)
    return logits
