"""trim: its prediction against a real softmax, its control law, its controller, and where it does nothing."""

from __future__ import annotations

import pytest
import torch

import trimtab as tt
from trimtab import theory

TOKENS, VOCABULARY = 240, 12


def tabular(seed: int = 0, sharpness: float = 2.0) -> tuple[torch.Tensor, torch.Tensor, tt.TokenBatch]:
    """A tabular softmax policy with a row of logits for every token, the tokens drawn from it, and their batch."""
    rng = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(TOKENS, VOCABULARY, generator=rng, dtype=torch.float64)
    token = torch.multinomial(logits.softmax(-1), 1, generator=rng).squeeze(1)
    m = theory.moments(logits, token)
    sequence = torch.arange(TOKENS) // 10
    advantage = torch.randn(TOKENS // 10, generator=rng, dtype=torch.float64)[sequence]
    tokens = tt.TokenBatch(
        old_logp=m.logp, entropy=m.entropy, sum_p2=m.sum_p2, sum_p2_logp=m.sum_p2_logp, advantage=advantage,
        sequence=sequence, segment=torch.arange(TOKENS) // 3,
    )  # fmt: skip
    return logits, token, tokens


def entropy_after(
    logits: torch.Tensor, token: torch.Tensor, objective: tt.Objective, plan: tt.Plan, eta: float
) -> float:
    """The sum of the rows' entropies after a step of gradient descent on the logits."""
    leaf = logits.clone().requires_grad_()
    new_logp = leaf.log_softmax(-1).gather(1, token[:, None]).squeeze(1)
    (gradient,) = torch.autograd.grad(objective.loss(new_logp, plan).loss, leaf)
    return float(torch.distributions.Categorical(logits=logits - eta * gradient).entropy().sum())


def steered(name: str, tokens: tt.TokenBatch) -> tt.Objective:
    """The objective after a rollout with this batch's entropy."""
    objective = tt.objective(name)
    objective.observe(tokens)
    return objective


@pytest.mark.parametrize("method", ["dapo", "grpo", "sspo", "gspo", "stapo(tau_p=0.2)", "cispo", "gmpo", "vespo"])
@pytest.mark.parametrize("floor", [0.1, 9.0])  # above the floor, and far below it
def test_the_predicted_change_is_that_of_a_small_step_on_a_tabular_policy(method: str, floor: float) -> None:
    logits, token, tokens = tabular()
    objective = steered(f"{method} + trim(floor={floor})", tokens)
    plan, eta = objective.plan(tokens), 1e-4
    up, down = (entropy_after(logits, token, objective, plan, sign * eta) for sign in (1, -1))
    assert plan.metrics["trim/predicted_change"].item() == pytest.approx((up - down) / (2 * eta), rel=1e-5)


@pytest.mark.parametrize("variant", ["O1", "O3", "C1", "C2", "C3"])
def test_the_critical_weight_leaves_the_entropy_unchanged_to_second_order(variant: str) -> None:
    logits, token, tokens = tabular()
    # A little more reward for what is probable: DAPO's update then lowers the entropy, and STARE has to balance it.
    tokens.advantage[:] = tokens.advantage.sign() + 0.2 * (tokens.old_logp > -1)
    stare = tt.objective("stare", boost="critical", variant=variant, gate="none", share=0.4)
    plan, dapo = stare.plan(tokens), tt.objective("dapo")
    assert 1 < plan.metrics["stare/weight"] < 10
    before = float(torch.distributions.Categorical(logits=logits).entropy().sum())
    for eta in (1e-2, 1e-3):
        change = entropy_after(logits, token, stare, plan, eta) - before
        unweighted = entropy_after(logits, token, dapo, dapo.plan(tokens), eta) - before
        assert abs(change) < 20 * eta**2
        assert abs(unweighted) > 0.01 * eta
