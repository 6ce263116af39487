"""On a GPU: the same plan as on a CPU, and a host that is not kept waiting."""

from __future__ import annotations

import pytest
import torch

import trimtab as tt
from helpers.gpu import count_host_syncs
from helpers.objectives.batches import EVERY, fields, moved

pytestmark = pytest.mark.gpu


def pair(seed: int) -> tuple[tt.TokenBatch, tt.TokenBatch]:
    padded = fields(seed, rows=40, columns=60, dtype=torch.float32)
    return tt.TokenBatch.from_padded(**padded), tt.TokenBatch.from_padded(**{k: v.cuda() for k, v in padded.items()})


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("seed", range(3))
def test_a_gpu_makes_the_same_plan_and_gradient(name: str, seed: int) -> None:
    host, device = pair(seed)
    objective = tt.objective(name)
    objective.observe(host)
    plans = objective.plan(host), objective.plan(device)
    assert torch.equal(plans[0].reason, plans[1].reason.cpu())
    assert torch.equal(plans[0].weight == 0, plans[1].weight.cpu() == 0)
    for field in ("advantage", "weight", "scale", "clip_low", "clip_high"):
        torch.testing.assert_close(getattr(plans[1], field).cpu(), getattr(plans[0], field))
    gradients = []
    for plan, new in zip(plans, (moved(host), moved(host).detach().cuda().requires_grad_()), strict=True):
        gradients.append(torch.autograd.grad(objective.loss(new, plan).loss, new)[0].cpu())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", EVERY)
def test_the_loss_never_syncs_with_the_gpu_and_the_plan_a_few_times(name: str) -> None:
    _, device = pair(0)
    objective, new = tt.objective(name), moved(pair(0)[0]).detach().cuda().requires_grad_()
    objective.plan(device)  # what a batch finds out about itself, it finds out once
    assert count_host_syncs(lambda: objective.plan(device)) <= 3 * max(2, len(objective.rules))
    plan = objective.plan(device)
    micro_batches = plan.split(10)

    def losses() -> None:
        for micro_batch in micro_batches:
            objective.loss(new[micro_batch.slice], micro_batch).loss.backward()

    assert count_host_syncs(losses) == 0
