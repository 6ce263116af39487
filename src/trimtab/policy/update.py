"""The optimizer step: forward and backward by micro-batches of a token budget, then one step.

A step with a non-finite loss, gradient or log-probability is skipped: neither the weights nor the optimizer's state
change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from trimtab.objectives import Objective, Plan, merge_metrics
from trimtab.policy.forward_backward import forward_backward
from trimtab.policy.policy import Policy
from trimtab.policy.score import Transcript, micro_batch_sizes


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


def make_optimizer(policy: Policy, lr: float, betas: tuple[float, float], weight_decay: float) -> AdamW:
    """Return AdamW over the trained parameters, fused on a GPU."""
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    fused = policy.device.type == "cuda"
    return AdamW(trained, lr=lr, betas=betas, weight_decay=weight_decay, fused=fused)


def update(
    policy: Policy,
    optimizer: Optimizer,
    objective: Objective,
    plan: Plan,
    transcripts: Sequence[Transcript],
    options: UpdateOptions,
) -> UpdateResult:
    """Take one optimizer step on one mini-batch."""
    policy.model.train()
    optimizer.zero_grad(set_to_none=True)
    sizes = micro_batch_sizes([len(t) for t in transcripts], options.token_budget, policy.packed)
    losses, metrics, new_logps, clipped = [], [], [], []
    head = policy.fused_head(options.temperature, options.fused_head)
    first = 0
    with policy.keep_autocast_cache():
        for micro in plan.split(sizes):
            held = transcripts[first : first + micro.responses]
            first += micro.responses
            out, new_logp = forward_backward(
                policy, objective, micro, held, options.temperature, options.head_chunk, head
            )
            losses.append(out.loss.detach())
            metrics.append(out.metrics)
            new_logps.append(new_logp)
            clipped += [] if out.clipped is None else [out.clipped]
    numbers = {"update/loss": torch.stack(losses).sum(), **plan.metrics, **merge_metrics(metrics)}
    result = _step(policy, optimizer, plan, numbers, torch.cat(new_logps), options.max_grad_norm)
    return replace(result, clipped=torch.cat(clipped) if clipped else None, micro_batch_sizes=sizes)


def _step(
    policy: Policy, optimizer: Optimizer, plan: Plan, metrics: dict[str, Tensor], new_logp: Tensor, max_grad_norm: float
) -> UpdateResult:
    """Clip gradients and step if everything is finite; else leave the weights alone and name what is not."""
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), max_grad_norm)
    numbers = {"update/loss": metrics["update/loss"], "update/grad_norm": grad_norm, **metrics}
    # All that the host must know in one copy: each copy by itself would wait for the GPU.
    fetched = (*numbers.values(), torch.isfinite(new_logp).all())
    *values, logp_finite = torch.stack([value.to(torch.float64) for value in fetched]).tolist()
    result = dict(zip(numbers, values, strict=True))
    finite = {
        "log-probability": bool(logp_finite),
        "loss": isfinite(result["update/loss"]),
        "gradient": isfinite(result["update/grad_norm"]),
    }
    nonfinite = [name for name, good in finite.items() if not good]
    if nonfinite:
        optimizer.zero_grad(set_to_none=True)
        return UpdateResult(result, False, " and ".join(nonfinite), _nonfinite_responses(plan, new_logp), new_logp)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # frees the gradients' memory for sampling
    return UpdateResult(result, new_logp=new_logp)


def _nonfinite_responses(plan: Plan, new_logp: Tensor) -> list[int]:
    """Return the responses with a token whose log-probability, or whose numbers in the plan, are not finite."""
    bad = ~torch.isfinite(new_logp + plan.advantage + plan.weight + plan.scale)
    ends = torch.tensor(plan.offsets[1:], device=bad.device)
    rows: list[int] = torch.searchsorted(ends, bad.nonzero().squeeze(1), right=True).unique().tolist()
    return rows
