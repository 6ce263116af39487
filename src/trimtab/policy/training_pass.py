"""The forward and backward pass of one part: the loss of its plan, and its gradients added to the weights'.

A fused head forms gradients in the forward pass (`head_gradients`: 3 GEMMs). A chunk of it must know its loss as soon
as it knows its log-probabilities. Where every token has its own ratio, chunks are cut anywhere; where responses or
segments share one, chunks are whole responses. A loss is some 30 small operations, as many for shared ratios as for
others; to launch them takes less time than a chunk's logits once more, but for heads so small that neither matters. So
only a response longer than a chunk, or a part that is planned by itself, has its log-probabilities scored first, which
costs the fourth GEMM and takes the loss once.

Otherwise, and for heads that are more than a linear map, autograd does it, with each chunk's logits made twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.objectives import LossOutput, Objective, Plan
from trimtab.policy.head import Head, HeadGradients, head_gradients, head_scores
from trimtab.policy.models import Policy
from trimtab.policy.score import Transcript, log_probs, response_hidden


def training_pass(
    policy: Policy,
    objective: Objective,
    part: Plan,
    transcripts: Sequence[Transcript],
    temperature: float,
    chunk: int,
    head: Head | None = None,
) -> tuple[LossOutput, Tensor]:
    """The loss of a part and the log-probabilities it was taken at; gradients are added to the parameters'.

    With a head (`policy.fused_head`, made once for all parts of an update) it is fused.
    """
    if head is None:
        new_logp = log_probs(policy, transcripts, temperature, chunk)
        out = objective.loss(new_logp, part)
        out.loss.backward()
        return out, new_logp.detach()
    with policy.autocast():
        hidden, tokens = response_hidden(policy, transcripts)
    hidden = hidden.to(head.weight.dtype)  # the wider ones are not kept
    out, made = _through_head(policy, head, objective, part, hidden.detach(), tokens, chunk)
    hidden.backward(made.hidden)
    return out, made.logp


def _through_head(
    policy: Policy, head: Head, objective: Objective, part: Plan, hidden: Tensor, tokens: Tensor, chunk: int
) -> tuple[LossOutput, HeadGradients]:
    pieces = _pieces(part, chunk)
    if pieces is None:  # the fourth GEMM
        sizes = [min(chunk, part.tokens - first) for first in range(0, part.tokens, chunk)]
        whole, grad_logp = objective.loss_and_grad(head_scores(hidden, head, tokens, chunk).logp, part)
        outputs = [whole]

        def loss_of(logp: Tensor, here: slice) -> tuple[Tensor, Tensor]:
            return whole.loss, grad_logp[here]
    else:
        sizes, outputs, left = [piece.tokens for piece in pieces], [], iter(pieces)

        def loss_of(logp: Tensor, here: slice) -> tuple[Tensor, Tensor]:
            out, grad_logp = objective.loss_and_grad(logp, next(left))
            outputs.append(out)
            return out.loss, grad_logp

    linear: Any = policy.head
    made = head_gradients(
        hidden,
        head,
        tokens,
        loss_of,
        sizes,
        frozen=not linear.weight.requires_grad,
        weight_grad=_gradient(linear.weight),
        bias_grad=_gradient(linear.bias),
    )
    return LossOutput.joined(outputs), made


def _gradient(parameter: nn.Parameter | None) -> Tensor | None:
    """Where a parameter's gradient is added up; None where it has none."""
    if parameter is None or not parameter.requires_grad:
        return None
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _pieces(part: Plan, chunk: int) -> list[Plan] | None:
    """The part in pieces of at most `chunk` tokens whose loss needs no other piece; None where there are none."""
    if part.spans is None and part.replan is None:
        return [part.cut(first, min(first + chunk, part.tokens)) for first in range(0, part.tokens, chunk)]
    lengths = [last - first for first, last in pairwise(part.offsets)]
    if max(lengths, default=0) > chunk or part.replan is not None:
        return None
    sizes, tokens = [0], 0
    for length in lengths:
        if sizes[-1] and tokens + length > chunk:
            sizes.append(0)
            tokens = 0
        sizes[-1] += 1
        tokens += length
    return part.split(sizes)
