"""Gradients are the derivatives they claim to be, and reach the new log-probabilities alone."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

import trimtab as tt
from helpers.objectives.batches import COMBINATIONS, EVERY, batch, fields, moved, observed
from trimtab.objectives import METHODS

# Where a ratio is shared, the gradient of each token is its own; it equals the plain derivative as long as the tokens
# of a run have one weight. The weights of CISPO, DPPO and VESPO are constants by definition, which no finite difference
# can know.
PLAIN = [name for name in METHODS if name not in ("cispo", "dppo", "vespo")]


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_the_derivative(name: str, seed: int) -> None:
    tokens, objective = batch(seed), tt.objective(name)
    plan = objective.plan(tokens)
    assert gradcheck(lambda new: objective.loss(new, plan).loss, (moved(tokens, seed),), eps=1e-7, atol=1e-7)


def test_cispo_moves_log_probabilities_by_a_constant_weight() -> None:
    tokens, objective = batch(0), tt.objective("cispo")
    plan, new = objective.plan(tokens), moved(tokens)
    (gradient,) = torch.autograd.grad(objective.loss(new, plan).loss, new)
    weight = (new.detach() - tokens.old_logp).exp().clamp(0.8, 1.28)
    torch.testing.assert_close(gradient, -weight * tokens.advantage / tokens.tokens)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_corrected_kl_has_a_gradient_through_ratio_and_estimate(estimator: str) -> None:
    tokens, objective = batch(0), tt.objective("grpo", kl={"coef": 1.0, "estimator": estimator, "corrected": True})
    plan = objective.plan(tokens)
    assert gradcheck(lambda new: objective.loss(new, plan).loss, (moved(tokens),), eps=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["gspo + s2t(tau_p=0.2)", "sspo + stare(gate=none)"])
def test_a_shared_ratio_keeps_each_tokens_own_gradient(name: str) -> None:
    tokens, objective = batch(1), tt.objective(name, clip_low=10.0, clip_high=10.0)
    plan, new = objective.plan(tokens), moved(tokens)
    (gradient,) = torch.autograd.grad(objective.loss(new, plan).loss, new)
    spans = plan.spans
    assert spans is not None
    ratio = spans.spread(spans.mean(new.detach() - tokens.old_logp).exp())
    torch.testing.assert_close(gradient, -ratio * tokens.advantage * plan.weight * plan.scale)


@pytest.mark.parametrize("name", EVERY)
def test_no_gradient_flows_through_the_batch(name: str) -> None:
    padded = fields(4)
    leaves = {key: value.requires_grad_() for key, value in padded.items() if value.is_floating_point()}
    tokens = tt.TokenBatch.from_padded(**padded)
    objective = tt.objective(name)
    objective.observe(tokens)
    new = moved(tokens)
    plan = objective.plan(tokens)
    assert not any(t.requires_grad for t in vars(plan).values() if isinstance(t, torch.Tensor))
    objective.loss(new, plan).loss.backward()
    assert new.grad is not None
    assert all(leaf.grad is None for leaf in leaves.values())


@pytest.mark.parametrize("name", EVERY)
def test_metrics_carry_no_gradient(name: str) -> None:
    tokens = batch(4)
    objective = observed(tt.objective(name), tokens)
    plan = objective.plan(tokens)
    out = objective.loss(moved(tokens), plan)
    assert not any(value.requires_grad for value in (plan.metrics | out.metrics).values())


@pytest.mark.parametrize("name", ["stapo", *COMBINATIONS])
def test_loss_and_grad_are_the_loss_and_its_gradient(name: str) -> None:
    tokens = batch(4)
    objective = observed(tt.objective(name), tokens)
    plan, new = objective.plan(tokens), moved(tokens)
    loss = objective.loss(new, plan).loss
    (gradient,) = torch.autograd.grad(loss, new)
    with torch.no_grad():
        out, grad_logp = objective.loss_and_grad(new, plan)
    assert torch.equal(out.loss, loss) and not out.loss.requires_grad
    assert torch.equal(grad_logp, gradient)


def test_half_precision_log_probabilities_are_computed_with_in_single_precision() -> None:
    tokens, objective = batch(4, dtype=torch.float32), tt.objective("stapo")
    new = moved(tokens).detach().to(torch.bfloat16).requires_grad_()
    out = objective.loss(new, objective.plan(tokens))
    assert out.loss.dtype == torch.float32
    (gradient,) = torch.autograd.grad(out.loss, new)
    assert gradient.dtype == torch.bfloat16
