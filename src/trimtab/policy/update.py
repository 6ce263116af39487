"""The optimizer step: parts by token budget, gradients summed, one step.

Nothing that is not finite reaches the weights or the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

import torch
from torch import Tensor

from trimtab.objectives import Objective, Plan, merge_metrics
from trimtab.policy.models import Policy
from trimtab.policy.score import Transcript, parts_by_budget
from trimtab.policy.training_pass import training_pass


@dataclass(frozen=True)
class UpdateResult:
    """What an update did: its metrics, or why it was not taken and which responses were to blame.

    `parts` is how many responses each forward pass held.
    """

    metrics: dict[str, float]
    taken: bool = True
    fault: str = ""
    responses: list[int] = field(default_factory=list)
    new_logp: Tensor | None = None
    clipped: Tensor | None = None
    parts: Sequence[int] = ()


@dataclass(frozen=True)
class UpdateOptions:
    """How parts are cut and gradients clipped; `fused_head`: its gradients are formed in the forward pass.

    None: on a GPU.
    """

    token_budget: int
    head_chunk: int
    temperature: float
    max_grad_norm: float
    fused_head: bool | None = None


def make_optimizer(policy: Policy, lr: float, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """AdamW over what is trained; fused on a GPU."""
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    fused = policy.device.type == "cuda"
    return torch.optim.AdamW(trained, lr=lr, betas=betas, weight_decay=weight_decay, fused=fused)


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    objective: Objective,
    plan: Plan,
    transcripts: Sequence[Transcript],
    options: UpdateOptions,
) -> UpdateResult:
    """One update on one mini-batch."""
    policy.model.train()
    optimizer.zero_grad(set_to_none=True)
    sizes = parts_by_budget([len(t) for t in transcripts], options.token_budget, policy.packed)
    losses, metrics, seen, clipped = [], [], [], []
    head = policy.fused_head(options.temperature, options.fused_head)
    first = 0
    with policy.unchanging():
        for part in plan.split(sizes):
            mine = transcripts[first : first + part.responses]
            first += part.responses
            out, new_logp = training_pass(policy, objective, part, mine, options.temperature, options.head_chunk, head)
            losses.append(out.loss.detach())
            metrics.append(out.metrics)
            seen.append(new_logp)
            clipped += [] if out.clipped is None else [out.clipped]
    result = _step(policy, optimizer, plan, losses, metrics, torch.cat(seen), options.max_grad_norm)
    return replace(result, clipped=torch.cat(clipped) if clipped else None, parts=sizes)


def _step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    losses: list[Tensor],
    metrics: list[dict[str, Tensor]],
    new_logp: Tensor,
    max_grad_norm: float,
) -> UpdateResult:
    """Step if all is finite; else leave the weights alone and say what was not."""
    norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), max_grad_norm)
    loss = torch.stack(losses).sum()
    numbers = {"update/loss": loss, "update/grad_norm": norm, **plan.metrics, **merge_metrics(metrics)}
    # All that the host must know in one copy: each would wait for the GPU by itself.
    fetched = (*numbers.values(), torch.isfinite(new_logp).all())
    *values, fine = torch.stack([value.to(torch.float64) for value in fetched]).tolist()
    result = dict(zip(numbers, values, strict=True))
    checks = {
        "log-probability": bool(fine),
        "loss": isfinite(result["update/loss"]),
        "gradient": isfinite(result["update/grad_norm"]),
    }
    faults = [name for name, good in checks.items() if not good]
    if faults:
        optimizer.zero_grad(set_to_none=True)
        return UpdateResult(result, False, " and ".join(faults), _to_blame(plan, new_logp), new_logp)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # nothing reads gradients until the next update: sampling can have the memory
    return UpdateResult(result, new_logp=new_logp)


def _to_blame(plan: Plan, new_logp: Tensor) -> list[int]:
    """The responses with a token whose log-probability, or whose part in the plan, is not finite."""
    bad = ~torch.isfinite(new_logp + plan.advantage + plan.weight + plan.scale)
    starts = torch.tensor(plan.offsets[1:], device=bad.device)
    rows: list[int] = torch.searchsorted(starts, bad.nonzero().squeeze(1), right=True).unique().tolist()
    return rows
