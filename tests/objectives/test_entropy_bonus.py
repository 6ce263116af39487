"""The entropy bonus with the gradient of the entropy, against NumPy, its sampled form, and the method alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import trimtab as tt
from helpers.objectives.batches import batch, fields, moved, observed, seeds
from trimtab.objectives.methods.compose import describe

HOSTS = ("grpo", "dapo", "gspo", "sspo", "cispo", "stapo(tau_p=0.3)", "dr_grpo", "dapo + s2t(tau_p=0.2) + kl(coef=0.1)")
BONUS = "entropy_bonus(coef=0.3, gradient=exact)"
TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def entropies(tokens: tt.TokenBatch, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens.tokens, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("host", HOSTS)
@given(seed=seeds, size=st.integers(1, 7))
@settings(max_examples=10, deadline=None)
def test_the_loss_is_the_methods_less_the_scaled_entropy_in_any_parts(host: str, seed: int, size: int) -> None:
    tokens = batch(seed)
    plain, rewarded = tt.objective(host), tt.objective(f"{host} + {BONUS}")
    new, entropy, plan = moved(tokens), entropies(tokens), rewarded.plan(tokens)
    expected = plain.loss(new, plain.plan(tokens)).loss
    scale = plain.plan(tokens).scale.numpy()
    outs = [rewarded.loss(new[m.slice], m, entropy[m.slice]) for m in plan.split(size)]
    total = torch.stack([out.loss for out in outs]).sum()
    bonus = 0.3 * float(np.sum(scale * entropy.detach().numpy()))
    torch.testing.assert_close(total, expected - bonus, **TIGHT)
    by_logp, by_entropy = torch.autograd.grad(total, [new, entropy])
    torch.testing.assert_close(by_logp, torch.autograd.grad(expected, new)[0], **TIGHT)
    np.testing.assert_allclose(by_entropy.numpy(), -0.3 * scale, rtol=1e-12, atol=1e-15)
    assert plan.entropy_grad is not None
    torch.testing.assert_close(by_entropy, plan.entropy_grad, **TIGHT)
    # Advantages, weights and reasons are the method's own: the bonus is beside them.
    assert torch.equal(plan.advantage, plain.plan(tokens).advantage)
    assert torch.equal(plan.weight, plain.plan(tokens).weight) and torch.equal(plan.reason, plain.plan(tokens).reason)


def test_silenced_tokens_have_no_bonus() -> None:
    tokens = batch(5)
    plan = tt.objective(f"stapo(tau_p=0.5) + {BONUS}").plan(tokens)
    silenced = plan.reason & int(tt.Reason.SILENCED) != 0
    assert silenced.any() and plan.entropy_grad is not None
    assert plan.entropy_grad[silenced].eq(0).all() and plan.entropy_grad[~silenced].lt(0).all()


@pytest.mark.parametrize("name", [f"dapo + {BONUS}", "dapo + entropy_bonus(target=0.3, gradient=exact)"])
def test_golden(name: str) -> None:
    # Two tokens of H 0.1 and 0.2, no advantage: -c (0.1 + 0.2) / 2, of which the second form has c = 0.01 + 0.005.
    tokens = tt.TokenBatch(
        old_logp=torch.tensor([-1.0, -2.0]),
        advantage=torch.zeros(2),
        sequence=torch.tensor([0, 0]),
        entropy=torch.tensor([0.1, 0.2]),
    )
    objective = tt.objective(name)
    objective.observe(tokens)
    entropy = torch.tensor([0.1, 0.2], requires_grad=True)
    out = objective.loss(tokens.old_logp.clone().requires_grad_(), objective.plan(tokens), entropy)
    out.loss.backward()
    coefficient = 0.3 if "coef" in name else 0.015
    assert out.loss.item() == pytest.approx(-coefficient * 0.15)
    assert entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([-coefficient / 2] * 2)


@given(seed=seeds, size=st.integers(2, 40))
@settings(max_examples=30, deadline=None)
def test_the_expected_gradient_of_the_sampled_form_is_that_of_the_exact_one(seed: int, size: int) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum()
    (exact,) = torch.autograd.grad(entropy, logits, retain_graph=True)
    p, rows = logp.exp().detach(), torch.arange(size)
    # On policy, with every token of the vocabulary once, weighted by its probability.
    tokens = tt.TokenBatch(
        old_logp=logp, advantage=torch.zeros(size), sequence=rows, entropy=entropy.detach().expand(size)
    )
    objective = tt.objective("reinforce + entropy_bonus(coef=1.0)")
    _, grad_logp = objective.loss_and_grad(logp.detach(), objective.plan(tokens))
    (sampled,) = torch.autograd.grad(logp, logits, grad_outputs=-size * p * grad_logp)
    torch.testing.assert_close(sampled, exact, rtol=1e-9, atol=1e-12)
    expected = -p * (logp.detach() + entropy.detach())
    torch.testing.assert_close(exact, expected, rtol=1e-9, atol=1e-12)


@given(seed=seeds)
@settings(max_examples=10, deadline=None)
def test_above_its_target_the_method_is_left_alone_to_the_bit_and_needs_no_entropy(seed: int) -> None:
    tokens = batch(seed)
    rewarded = observed(tt.objective("sspo + entropy_bonus(coef=0.5, target=0.001, gradient=exact)"), tokens)
    plain, new = tt.objective("sspo"), moved(tokens)
    plan = rewarded.plan(tokens)
    assert plan.entropy_coef is None and plan.entropy_grad is None
    assert torch.equal(rewarded.loss(new, plan).loss, plain.loss(new, plain.plan(tokens)).loss)
    assert plan.metrics["entropy_bonus/coef"] == 0


def test_the_coefficient_goes_up_and_down_by_the_rate_and_is_resumed() -> None:
    name = "dapo + entropy_bonus(coef=0.01, target=0.3, rate=0.005, gradient=exact)"
    one, tokens, found = tt.objective(name), batch(0), []
    for entropy in (0.2, 0.1, 0.5, 0.2):
        one.controllers["entropy_bonus"].observe(entropy)
        plan = one.plan(tokens)
        found.append(None if plan.entropy_coef is None else round(float(plan.entropy_coef[0]), 6))
    assert found == [0.015, 0.02, None, 0.02]
    other = tt.objective(name)
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.plan(tokens).entropy_coef, one.plan(tokens).entropy_coef)  # type: ignore[arg-type]


def test_a_loss_without_entropies_or_with_ones_that_train_nothing_is_an_error() -> None:
    tokens, objective = batch(0), tt.objective(f"dapo + {BONUS}")
    assert objective.needs_entropy_grad and not tt.objective("dapo + entropy_bonus").needs_entropy_grad
    new, plan = moved(tokens), objective.plan(tokens)
    with pytest.raises(ValueError, match=r"term of the entropy, and it is not given: call loss\(new_logp, plan, entr"):
        objective.loss(new, plan)
    with pytest.raises(ValueError, match="it has no gradient"):
        objective.loss(new, plan, entropies(tokens).detach())
    with pytest.raises(ValueError, match=r"entropy has shape \(3,\).*one entropy per response token"):
        objective.loss(new, plan, torch.zeros(3, requires_grad=True))
    assert objective.loss(new.detach(), plan, entropies(tokens).detach()).loss.isfinite()  # nobody trains here


def test_padded_entropies_are_packed_as_log_probabilities_are() -> None:
    padded = fields(3)
    tokens = tt.TokenBatch.from_padded(**padded)
    entropy = torch.rand(padded["mask"].shape, dtype=torch.float64, requires_grad=True)
    objective = tt.objective(f"dapo + {BONUS}")
    objective.loss(moved(tokens), objective.plan(tokens), tokens.pack(entropy)).loss.backward()
    assert entropy.grad is not None
    assert entropy.grad[~padded["mask"].bool()].eq(0).all() and entropy.grad[padded["mask"].bool()].lt(0).all()


def test_its_page_names_the_choice() -> None:
    assert "- 0.3 H on every counted token" in tt.objective(f"dapo + {BONUS}").explain()
    assert "(sampled, exact)" in describe("entropy_bonus")
    with pytest.raises(ValueError, match="gradient"):
        tt.objective("dapo + entropy_bonus(gradient=true)")
