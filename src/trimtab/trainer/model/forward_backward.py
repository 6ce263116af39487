"""Forward and backward pass of one micro-batch: its loss, and gradients accumulated into the parameters.

With a fused head the gradients by hidden states and head are formed in the forward pass (`head_gradients`, 3 GEMMs), so
each chunk of rows needs its loss as soon as its log-probabilities are known. Chunks may end anywhere if every token has
its own ratio; if responses or segments share one, chunks hold whole responses. A response longer than a chunk, or a
plan made per micro-batch, has its log-probabilities scored first, which costs a fourth GEMM.

Without a fused head autograd does it, with each chunk's logits computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.objectives import LossOutput, Objective, Plan
from trimtab.trainer.model.lm_head import Head, HeadGradients, head_gradients, head_scores
from trimtab.trainer.model.policy import Policy
from trimtab.trainer.model.score import Transcript, log_probs, packed_sizes, response_hidden_states


def forward_backward(
    policy: Policy,
    objective: Objective,
    micro: Plan,
    transcripts: Sequence[Transcript],
    temperature: float,
    head_chunk: int,
    head: Head | None = None,
) -> tuple[LossOutput, Tensor]:
    """Return a micro-batch's loss and its new log-probabilities; accumulate gradients into the parameters.

    `head` is `policy.fused_head(...)`, made once for all micro-batches of an update; None leaves the head to autograd.
    """
    if head is None:
        new_logp = log_probs(policy, transcripts, temperature, head_chunk)
        out = objective.loss(new_logp, micro)
        out.loss.backward()
        return out, new_logp.detach()
    with policy.autocast():
        hidden, tokens = response_hidden_states(policy, transcripts)
    hidden = hidden.to(head.weight.dtype)  # frees the fp32 hidden states
    out, gradients = _head_backward(policy, head, objective, micro, hidden.detach(), tokens, head_chunk)
    hidden.backward(gradients.hidden)
    return out, gradients.logp


def _head_backward(
    policy: Policy, head: Head, objective: Objective, micro: Plan, hidden: Tensor, tokens: Tensor, head_chunk: int
) -> tuple[LossOutput, HeadGradients]:
    """Run the fused head: the micro-batch's loss and the gradients by hidden states, head weight and bias."""
    chunks = _independent_chunks(micro, head_chunk)
    if chunks is None:  # score everything first: the fourth GEMM
        sizes = [min(head_chunk, micro.tokens - first) for first in range(0, micro.tokens, head_chunk)]
        whole, grad_logp = objective.loss_and_grad(head_scores(hidden, head, tokens, head_chunk).logp, micro)
        outputs = [whole]

        def loss_fn(logp: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            return whole.loss, grad_logp[rows]
    else:
        # A loss is some 30 small operations, with shared ratios or without: launching them for every chunk takes less
        # time than computing the chunk's logits again, except for heads so small that neither matters.
        sizes, outputs, left = [chunk.tokens for chunk in chunks], [], iter(chunks)

        def loss_fn(logp: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            out, grad_logp = objective.loss_and_grad(logp, next(left))
            outputs.append(out)
            return out.loss, grad_logp

    linear: Any = policy.lm_head
    weight_grad, bias_grad = _grad_buffer(linear.weight), _grad_buffer(linear.bias)
    gradients = head_gradients(
        hidden, head, tokens, loss_fn, sizes, frozen=weight_grad is None, weight_grad=weight_grad, bias_grad=bias_grad
    )
    return LossOutput.concat(outputs), gradients


def _grad_buffer(parameter: nn.Parameter | None) -> Tensor | None:
    """Return a parameter's `.grad`, made as zeros if missing; None if the parameter is not trained."""
    if parameter is None or not parameter.requires_grad:
        return None
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _independent_chunks(micro: Plan, head_chunk: int) -> list[Plan] | None:
    """Split into chunks of at most `head_chunk` tokens whose losses do not depend on each other; None if impossible."""
    if micro.spans is None and micro.replan is None:
        return [micro.cut(first, min(first + head_chunk, micro.tokens)) for first in range(0, micro.tokens, head_chunk)]
    longest = max((last - first for first, last in pairwise(micro.offsets)), default=0)
    if longest > head_chunk or micro.replan is not None:
        return None
    return micro.split(packed_sizes(micro.offsets, head_chunk))
