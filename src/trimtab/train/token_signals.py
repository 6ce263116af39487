"""Signs of trouble in a step's tokens, the same for every objective: what alarms look at besides the plain metrics.

Each is one pass over the step's batch; nothing here needs the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.objectives import TokenBatch, gradient_norm_squared, largest, quantile, share_count

# A token is rare and confident where its surprisal is this many nats above its own expectation, the entropy: it was
# drawn although it is 20 times less probable than what its distribution usually gives. Free of the vocabulary's size.
SPURIOUS_NATS = 3.0
FEW_SHARE, FEW = 0.001, 10  # the few tokens whose gradients are compared with all: this share, at least so many
GRAM = 4  # tokens of the n-grams whose repeats are counted
_ODD = 0x5851F42D4C957F2D  # products with an odd number mix well modulo 2^64


def token_signs(batch: TokenBatch) -> dict[str, Tensor]:
    """The signs of a scored step as 0-d tensors, by metric name; without tokens there are none."""
    if not batch.tokens:
        return {}
    assert batch.entropy is not None
    signs = {
        "policy/entropy_median": quantile(batch.entropy, 0.5),
        "policy/entropy_p90": quantile(batch.entropy, 0.9),
        "tokens/spurious_share": spurious(batch).float().mean(),
    }
    if batch.sum_p2 is not None and bool((batch.advantage != 0).any()):
        signs["tokens/top_gradient_share"] = top_gradient_share(batch)
    if batch.token is not None:
        signs["response/repetition_share"] = repetition_share(batch.token, batch.sequence)
    return signs


def spurious(batch: TokenBatch) -> Tensor:
    """A mask of the tokens that are rare, confident and rewarded, by `SPURIOUS_NATS` and a positive advantage."""
    assert batch.entropy is not None
    return (batch.advantage > 0) & (-batch.old_logp - batch.entropy > SPURIOUS_NATS)


def top_gradient_share(batch: TokenBatch) -> Tensor:
    """The share of all gradient norms that the few largest hold; norms are exact, of unclipped on-policy tokens."""
    assert batch.sum_p2 is not None
    norm = gradient_norm_squared(batch.old_logp, batch.sum_p2, batch.advantage).sqrt()
    few = min(batch.tokens, max(FEW, share_count(batch.tokens, FEW_SHARE)))
    return norm[largest(norm, few)].sum() / norm.sum().clamp(min=torch.finfo(norm.dtype).tiny)


def repetition_share(token: Tensor, sequence: Tensor) -> Tensor:
    """The share of n-grams that were in the same response before; 0 where no response is long enough for one."""
    count = len(token) - GRAM + 1
    if count < 1:
        return torch.zeros((), device=token.device)
    code = sequence[:count].to(torch.int64) * _ODD
    for place in range(GRAM):
        code = (code + token[place : place + count]) * _ODD
    code = code[sequence[:count] == sequence[GRAM - 1 :]].sort().values
    repeats = (code[1:] == code[:-1]).sum(dtype=torch.float32)
    return repeats / max(len(code), 1)
