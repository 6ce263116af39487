"""Forward and backward in chunks of the head: loss, metrics and clipped tokens are those of the whole micro-batch."""

from __future__ import annotations

import pytest
import torch

import trimtab as tt
from made_batch import LENGTH, made_batch, made_transcripts
from trimtab.trainer.model import Policy, UpdateOptions, load_policy, update
from trimtab.trainer.model.update import forward_backward

CHUNK = 32


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("demo", device="cpu", seed=3)


@pytest.mark.parametrize("chunk", [LENGTH - 1, CHUNK, 10_000])
@pytest.mark.parametrize("name", ["grpo", "sspo", "sapo", "gmpo"])
def test_chunks_of_the_head_give_the_loss_and_metrics_of_the_micro_batch(policy: Policy, name: str, chunk: int) -> None:
    objective = tt.objective(name)
    plan = objective.plan(made_batch())
    out, logp = forward_backward(policy, objective, plan, made_transcripts(), 1.0, chunk, policy.fused_head(1.0, True))
    expected = objective.loss(logp, plan)
    torch.testing.assert_close(out.loss, expected.loss)
    assert (out.clipped is None) == (expected.clipped is None)
    assert out.clipped is None or torch.equal(out.clipped, expected.clipped)
    assert out.metrics.keys() == expected.metrics.keys()
    for key, value in expected.metrics.items():
        torch.testing.assert_close(out.metrics[key], value, msg=key)
    assert out.metrics["update/ratio_max"] > out.metrics["update/ratio_min"]


@pytest.mark.parametrize("seed", range(3))
def test_a_tiny_approximate_kl_is_not_lost_to_rounding(seed: int) -> None:
    """In fp32 a sum of ratios near 1 has lost what the KL is made of; a sum of small terms has not."""
    normal = torch.randn(2, 100_000, generator=torch.Generator().manual_seed(seed))
    old, new = -normal[0].abs(), -normal[0].abs() + 1e-3 * normal[1]
    batch = tt.TokenBatch(old_logp=old, advantage=torch.ones_like(old), sequence=torch.zeros(len(old)))
    log_rho = new.double() - old.double()
    objective = tt.objective("grpo")
    found = objective.loss(new, objective.plan(batch)).metrics["update/approx_kl"].item()
    assert found == pytest.approx((log_rho.exp() - 1 - log_rho).mean().item(), rel=0.01)


def test_an_update_reports_the_metrics_of_all_its_micro_batches(policy: Policy) -> None:
    objective, optimizer = tt.objective("sspo"), torch.optim.SGD(policy.model.parameters(), lr=0.0)
    plan = objective.plan(made_batch())
    options = UpdateOptions(50, 20, 1.0, 1e9, fused_head=True)
    result = update(policy, optimizer, objective, plan, made_transcripts(), options)
    assert result.new_logp is not None and len(result.micro_batch_sizes) > 2
    for key, value in objective.loss(result.new_logp, plan).metrics.items():
        assert result.metrics[key] == pytest.approx(value.item(), rel=1e-5), key
