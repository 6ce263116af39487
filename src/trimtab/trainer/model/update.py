"""The optimizer step: forward and backward by micro-batches of a token budget, then one step.

A step with a non-finite loss, gradient or log-probability is skipped: neither the weights nor the optimizer's state
change. In fp16 a gradient that is not finite may be too large for its type only: the update is then computed again with
a smaller loss scale, until it is finite or the scale cannot be the cause.

With a fused head the gradients by hidden states and head are formed in the forward pass (`head_gradients`, 3 GEMMs), so
each chunk of rows needs its loss as soon as its log-probabilities are known. Chunks may end anywhere if every token has
its own ratio; if responses or segments share one, chunks hold whole responses. A response longer than a chunk, or a
plan made per micro-batch, has its log-probabilities scored first, which costs a fourth GEMM. Without a fused head
autograd does it, with each chunk's logits computed twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from trimtab.objectives import LossOutput, Objective, Plan, effective_sample_share, merge_metrics, ratio_sums
from trimtab.trainer.model.kept_rows import KeptRows
from trimtab.trainer.model.lm_head import Head, HeadGradients, head_gradients, head_scores
from trimtab.trainer.model.loss_scale import LossScale
from trimtab.trainer.model.policy import Policy
from trimtab.trainer.model.score import (
    Transcript,
    idle_pass,
    kept_rows,
    log_probs,
    log_probs_and_entropies,
    micro_batch_sizes,
    packed_sizes,
    response_hidden_states,
)
from trimtab.trainer.parallel import ShardedOptimizer, World, balanced_shares

ALONE = World()
RATIO_SUMS = ("ratios", "squared ratios")  # between a process's share and the metric of the whole mini-batch


@dataclass(frozen=True)
class UpdateResult:
    """What an update did: its metrics, and if it was not taken, what was not finite and in which responses.

    `micro_batch_sizes` is how many responses each forward pass held.
    """

    metrics: dict[str, float]
    taken: bool = True
    nonfinite: str = ""
    nonfinite_responses: list[int] = field(default_factory=list)
    new_logp: Tensor | None = None
    clipped: Tensor | None = None
    micro_batch_sizes: Sequence[int] = ()
    overflows: int = 0  # how often it was computed again with a smaller loss scale


@dataclass(frozen=True)
class UpdateOptions:
    """Size of micro-batches and of the head's chunks, temperature and gradient clipping.

    `fused_head`: the head forms its gradients in the forward pass; None: on a GPU only.
    """

    token_budget: int
    head_chunk: int
    temperature: float
    max_grad_norm: float
    fused_head: bool | None = None


def make_optimizer(
    policy: Policy, lr: float, betas: tuple[float, float], weight_decay: float, world: World = ALONE
) -> AdamW | ShardedOptimizer:
    """Return AdamW over the trained parameters, fused on a GPU; several processes share its state."""
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    fused = policy.device.type == "cuda"

    def adamw(parameters: list[nn.Parameter]) -> AdamW:
        return AdamW(parameters, lr=lr, betas=betas, weight_decay=weight_decay, fused=fused)

    return ShardedOptimizer(trained, world, adamw) if world.parallel else adamw(trained)


def start_gradients(optimizer: Optimizer | ShardedOptimizer) -> None:
    """Start an update without gradients."""
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.start()
    else:
        optimizer.zero_grad(set_to_none=True)


def clip_gradients(
    policy: Policy, optimizer: Optimizer | ShardedOptimizer, max_norm: float, scale: float = 1.0
) -> Tensor:
    """Sum the gradients over all processes, clip the sum by its norm, and return that norm before clipping.

    `scale` is what the loss was multiplied by.
    """
    if scale != 1:
        for parameter in policy.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 / scale)
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.reduce(max_norm)
    return torch.nn.utils.clip_grad_norm_(policy.model.parameters(), max_norm)


def update(
    policy: Policy,
    optimizer: Optimizer | ShardedOptimizer,
    objective: Objective,
    plan: Plan,
    transcripts: Sequence[Transcript],
    options: UpdateOptions,
    world: World = ALONE,
    loss_scale: LossScale | None = None,
) -> UpdateResult:
    """Take one optimizer step on one mini-batch; each of several processes computes the gradients of its share.

    Plan and transcripts are those of all processes, and so is the result.
    """
    if loss_scale is None:
        return _attempt(policy, optimizer, objective, plan, transcripts, options, world)
    before, overflows = loss_scale.state_dict(), 0
    while True:
        scale = loss_scale.value
        result = _attempt(policy, optimizer, objective, plan, transcripts, options, world, scale)
        if result.nonfinite != "gradient" or not loss_scale.lower():
            break
        overflows += 1
    if result.taken:
        loss_scale.keep()
    else:  # something else is wrong than the scale
        loss_scale.load_state_dict(before)
    return replace(result, metrics=result.metrics | {"update/loss_scale": scale}, overflows=overflows)


def _attempt(
    policy: Policy,
    optimizer: Optimizer | ShardedOptimizer,
    objective: Objective,
    plan: Plan,
    transcripts: Sequence[Transcript],
    options: UpdateOptions,
    world: World,
    scale: float = 1.0,
) -> UpdateResult:
    """Compute the gradients of an update with a loss scale, and take it if everything is finite."""
    policy.model.train()
    start_gradients(optimizer)
    shares = response_shares(policy, transcripts, world)
    sizes = share_sizes(policy, transcripts, shares, options.token_budget)
    losses, metrics, new_logps, clipped = [], [], [], []
    head = policy.fused_head(options.temperature, options.fused_head)
    with policy.keep_autocast_cache():
        for first, last in pairwise(accumulate(sizes[world.rank], initial=shares[world.rank].start)):
            micro = (plan.replan or plan.select)(first, last)
            out, new_logp = forward_backward(
                policy, objective, micro, transcripts[first:last], options.temperature, options.head_chunk, head, scale
            )
            losses.append(out.loss.detach())
            metrics.append(out.metrics)
            new_logps.append(new_logp)
            clipped += [] if out.clipped is None else [out.clipped]
        for _ in range(least_passes(policy, sizes) - len(losses)):
            idle_pass(policy)
    none = plan.old_logp.new_zeros(0)  # for a process without a share
    own = {"update/loss": torch.stack(losses).sum() if losses else none.sum(), **merge_metrics(metrics)}
    new_logp = torch.cat(new_logps or [none])
    before = plan.old_logp[plan.offsets[shares[world.rank].start] : plan.offsets[shares[world.rank].stop]]
    own |= dict(zip(RATIO_SUMS, ratio_sums(new_logp, before), strict=True))
    result = _step(policy, optimizer, plan, own, new_logp, options.max_grad_norm, shares, world, scale)
    tokens = [plan.offsets[share.stop] - plan.offsets[share.start] for share in shares]
    has_clip = any(world.gather(bool(clipped)))
    return replace(
        result,
        new_logp=world.gather_columns(new_logp, tokens),
        clipped=world.gather_columns(torch.cat(clipped or [none.bool()]), tokens) if has_clip else None,
        micro_batch_sizes=[size for share in sizes for size in share],
    )


def response_shares(policy: Policy, transcripts: Sequence[Transcript], world: World) -> list[slice]:
    """Return which responses each process scores or trains on: consecutive ones, so that all take about as long."""
    if world.size == 1:
        return [slice(0, len(transcripts))]
    # A token costs a pass through the weights, and attention to all tokens before it.
    costs = [len(t) * (1 + len(t) / policy.attention_crossover) for t in transcripts]
    return balanced_shares(costs, world.size)


def share_sizes(
    policy: Policy, transcripts: Sequence[Transcript], shares: Sequence[slice], token_budget: int
) -> list[list[int]]:
    """Return the sizes of the micro-batches of every process's share."""
    return [micro_batch_sizes([len(t) for t in transcripts[share]], token_budget, policy.packed) for share in shares]


def least_passes(policy: Policy, sizes: Sequence[Sequence[int]]) -> int:
    """Return how many passes a process must run at least; `sizes` are those of `share_sizes`."""
    # In every pass the processes gather sharded layers together.
    return max(map(len, sizes)) if policy.sharded else 0


def _step(
    policy: Policy,
    optimizer: Optimizer | ShardedOptimizer,
    plan: Plan,
    own: dict[str, Tensor],
    new_logp: Tensor,
    max_grad_norm: float,
    shares: Sequence[slice],
    world: World,
    scale: float,
) -> UpdateResult:
    """Clip gradients and step if everything is finite; else leave the weights alone and name what is not.

    `own` are metrics of this process's share, `new_logp` its log-probabilities.
    """
    grad_norm = clip_gradients(policy, optimizer, max_grad_norm, scale)
    numbers = {"update/grad_norm": grad_norm, **plan.metrics, **own}
    # All that the host must know in one copy: each copy by itself would wait for the GPU.
    fetched = (*numbers.values(), torch.isfinite(new_logp).all())
    *values, logp_finite = torch.stack([value.to(torch.float64) for value in fetched]).tolist()
    found = dict(zip(numbers, values, strict=True))
    everywhere = world.gather(({name: found[name] for name in own}, bool(logp_finite)))
    result = {"update/loss": 0.0, **found, **_merge([metrics for metrics, _ in everywhere])}
    total, squares = (result.pop(name) for name in RATIO_SUMS)
    result["update/effective_sample_share_min"] = effective_sample_share(total, squares, plan.tokens)
    finite = {
        "log-probability": all(good for _, good in everywhere),
        "loss": isfinite(result["update/loss"]),
        "gradient": isfinite(result["update/grad_norm"]),
    }
    nonfinite = [name for name, good in finite.items() if not good]
    if nonfinite:
        optimizer.zero_grad(set_to_none=True)
        share = shares[world.rank]
        rows = [share.start + row for row in _nonfinite_responses(plan.select(share.start, share.stop), new_logp)]
        return UpdateResult(
            result, False, " and ".join(nonfinite), [row for part in world.gather(rows) for row in part]
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # frees the gradients' memory for sampling
    return UpdateResult(result)


def _merge(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the metrics of all processes' shares, as `merge_metrics` does those of micro-batches."""
    merged = {}
    for name in {name: None for metrics in shares for name in metrics}:
        first, *rest = (metrics[name] for metrics in shares if name in metrics)
        extreme = {"_max": max, "_min": min}.get(name[-4:])
        merged[name] = extreme((first, *rest)) if extreme else sum(rest, first)
    return merged


def _nonfinite_responses(plan: Plan, new_logp: Tensor) -> list[int]:
    """Return the responses with a token whose log-probability, or whose numbers in the plan, are not finite."""
    bad = ~torch.isfinite(new_logp + plan.advantage + plan.weight + plan.scale)
    ends = torch.tensor(plan.offsets[1:], device=bad.device)
    rows: list[int] = torch.searchsorted(ends, bad.nonzero().squeeze(1), right=True).unique().tolist()
    return rows


def forward_backward(
    policy: Policy,
    objective: Objective,
    micro: Plan,
    transcripts: Sequence[Transcript],
    temperature: float,
    head_chunk: int,
    head: Head | None = None,
    scale: float = 1.0,
) -> tuple[LossOutput, Tensor]:
    """Return a micro-batch's loss and its new log-probabilities; accumulate gradients times `scale`.

    `head` is `policy.fused_head(...)`, made once for all micro-batches of an update; None leaves the head to autograd.
    """
    if head is None:
        if micro.entropy_coef is None:
            new_logp = log_probs(policy, transcripts, temperature, head_chunk)
            out = objective.loss(new_logp, micro)
        else:
            new_logp, entropy = log_probs_and_entropies(policy, transcripts, temperature, head_chunk)
            out = objective.loss(new_logp, micro, entropy)
        _scaled(out.loss, scale).backward()
        return out, new_logp.detach()
    with policy.autocast():
        hidden, tokens = response_hidden_states(policy, transcripts)
    hidden = hidden.to(head.weight.dtype)  # frees the fp32 hidden states
    kept = kept_rows(policy, transcripts)
    out, gradients = _head_backward(policy, head, objective, micro, hidden.detach(), tokens, head_chunk, scale, kept)
    hidden.backward(gradients.hidden)
    return out, gradients.logp


def _head_backward(
    policy: Policy,
    head: Head,
    objective: Objective,
    micro: Plan,
    hidden: Tensor,
    tokens: Tensor,
    head_chunk: int,
    scale: float,
    kept: KeptRows | None,
) -> tuple[LossOutput, HeadGradients]:
    """Run the fused head: the micro-batch's loss and the gradients by hidden states, head weight and bias.

    The gradients are formed here in the head's precision, so they are scaled here.
    """
    chunks = _independent_chunks(micro, head_chunk)
    if chunks is None:  # score everything first: the fourth GEMM
        sizes = [min(head_chunk, micro.tokens - first) for first in range(0, micro.tokens, head_chunk)]
        whole, grad_logp = objective.loss_and_grad(head_scores(hidden, head, tokens, head_chunk, kept).logp, micro)
        outputs = [whole]

        def loss_fn(logp: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            return whole.loss, _scaled(grad_logp[rows], scale)
    else:
        # A loss is some 30 small operations, with shared ratios or without: launching them for every chunk takes less
        # time than computing the chunk's logits again, except for heads so small that neither matters.
        sizes, outputs, left = [chunk.tokens for chunk in chunks], [], iter(chunks)

        def loss_fn(logp: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            out, grad_logp = objective.loss_and_grad(logp, next(left))
            outputs.append(out)
            return out.loss, _scaled(grad_logp, scale)

    linear: Any = policy.lm_head
    weight_grad, bias_grad = _grad_buffer(linear.weight), _grad_buffer(linear.bias)
    gradients = head_gradients(
        hidden,
        head,
        tokens,
        loss_fn,
        sizes,
        frozen=weight_grad is None,
        weight_grad=weight_grad,
        bias_grad=bias_grad,
        kept=kept,
        entropy_grad=None if micro.entropy_grad is None else _scaled(micro.entropy_grad, scale),
    )
    out = LossOutput.concat(outputs)
    if gradients.entropy is not None and micro.entropy_grad is not None:
        out = replace(out, loss=out.loss + (micro.entropy_grad * gradients.entropy).sum())
    return out, gradients


def _scaled(value: Tensor, scale: float) -> Tensor:
    return value if scale == 1 else value * scale


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
