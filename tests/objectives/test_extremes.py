"""Input nobody hopes for: finite losses and gradients, or one clear error."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import trimtab as tt
from helpers.objectives.batches import EVERY, batch, fields, moved, observed


def finite(objective: tt.Objective, tokens: tt.TokenBatch, new_logp: torch.Tensor) -> None:
    objective.observe(tokens)
    plan = objective.plan(tokens)
    for micro_batch in [plan, *plan.split(2)]:
        new = new_logp[micro_batch.slice].detach().requires_grad_()
        out = objective.loss(new, micro_batch)
        (gradient,) = torch.autograd.grad(out.loss, new)
        assert torch.isfinite(out.loss)
        assert torch.isfinite(gradient).all()
        unknown = [name for name, value in (plan.metrics | out.metrics).items() if bool(value.isnan())]
        assert unknown == []  # a metric without a value is absent


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [50.0, -50.0])
def test_ratios_of_e_to_the_fifty(name: str, dtype: torch.dtype, shift: float) -> None:
    tokens = batch(0, dtype=dtype)
    every_third = torch.arange(tokens.tokens) % 3 == 0
    finite(tt.objective(name), tokens, tokens.old_logp + shift * every_third)


@pytest.mark.parametrize("name", EVERY)
def test_probabilities_of_zero(name: str) -> None:
    padded = fields(1)
    for field in ("old_logp", "sampler_logp", "ref_logp", "proxy_logp"):
        padded[field][:, ::3] = -torch.inf
    tokens = tt.TokenBatch.from_padded(**padded)
    new = tokens.old_logp.clone()
    new[::2] = -torch.inf
    finite(tt.objective(name), tokens, new)


@pytest.mark.parametrize("name", EVERY)
def test_one_token_responses(name: str) -> None:
    tokens = batch(2, columns=1)
    finite(tt.objective(name), tokens, moved(tokens))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("advantage", [0.0, -1.0, 1.0])
def test_advantages_of_one_kind(name: str, advantage: float) -> None:
    padded = fields(3)
    padded["advantage"] = torch.full_like(padded["advantage"], advantage)
    tokens = tt.TokenBatch.from_padded(**padded)
    finite(tt.objective(name), tokens, moved(tokens))


@pytest.mark.parametrize("name", EVERY)
def test_certainty_everywhere(name: str) -> None:
    padded = fields(3)
    for field in ("old_logp", "sampler_logp", "ref_logp", "proxy_logp", "entropy"):
        padded[field] = torch.zeros_like(padded[field])
    tokens = tt.TokenBatch.from_padded(**padded)
    finite(tt.objective(name), tokens, tokens.old_logp)


@pytest.mark.parametrize("name", EVERY)
def test_responses_without_tokens_do_not_exist(name: str) -> None:
    padded = fields(6)
    kept = torch.tensor([0, 2, 5])
    tokens = tt.TokenBatch.from_padded(**{key: value[kept] for key, value in padded.items()})
    padded["mask"][[1, 3, 4]] = False
    with_empty = tt.TokenBatch.from_padded(**padded)
    objective, new = observed(tt.objective(name), tokens), moved(tokens)
    expected = objective.loss(new, objective.plan(tokens)).loss
    plan = objective.plan(with_empty)
    assert objective.loss(new, plan).loss.item() == pytest.approx(expected.item(), abs=1e-14)
    micro_batches = [objective.loss(new[micro_batch.slice], micro_batch).loss for micro_batch in plan.split(1)]
    assert torch.stack(micro_batches).sum().item() == pytest.approx(expected.item(), abs=1e-13)


@pytest.mark.parametrize("name", EVERY)
def test_an_empty_minibatch_has_loss_zero(name: str) -> None:
    padded = fields(6)
    padded["mask"] = torch.zeros_like(padded["mask"])
    tokens = tt.TokenBatch.from_padded(**padded)
    objective = tt.objective(name)
    objective.observe(tokens)
    new = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    plan = objective.plan(tokens)
    out = objective.loss(new, plan)
    assert out.loss.item() == 0
    assert not any(bool(value.isnan()) for value in (plan.metrics | out.metrics).values())
    out.loss.backward()


def test_all_tokens_silenced_give_loss_zero() -> None:
    padded = fields(6)
    padded["advantage"] = torch.ones_like(padded["advantage"])
    tokens = tt.TokenBatch.from_padded(**padded)
    for name in ("stapo", "grpo + s2t", "dr_grpo + s2t"):
        objective = tt.objective(name, mask="rare", tau_p=1.0)
        out = objective.loss(moved(tokens), objective.plan(tokens))
        assert out.loss.item() == 0


def test_a_segment_with_an_extreme_ratio_changes_no_other() -> None:
    tokens = batch(8)
    objective = tt.objective("sspo")
    plan = objective.plan(tokens)
    assert plan.segment is not None
    calm = moved(tokens, by=0.05).detach()
    wild = calm + 30.0 * (plan.segment == 2)
    gradients = []
    for new in (calm, wild):
        leaf = new.clone().requires_grad_()
        gradients.append(torch.autograd.grad(objective.loss(leaf, plan).loss, leaf)[0])
    others = plan.segment != 2
    assert torch.equal(gradients[0][others], gradients[1][others])
    assert not torch.equal(gradients[0], gradients[1])


def test_the_largest_tensors_have_the_fewest_surprises() -> None:
    """A hundred thousand tokens that are all alike: every rank is tied."""
    n = 100_000
    same = torch.full((n,), -0.5)
    tokens = tt.TokenBatch(
        old_logp=same, advantage=torch.ones(n), sequence=torch.arange(n) // 100, entropy=torch.full((n,), 0.1)
    )
    plan = tt.objective("stare").plan(tokens)
    boosted = (plan.weight > 1).nonzero().squeeze(1)
    assert torch.equal(boosted, torch.arange(n // 10))
    kept = (tt.objective("top_entropy").plan(replace(tokens)).weight > 0).sum()
    assert kept == n // 5
