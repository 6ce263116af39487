"""The theory against real softmaxes: norms, bounds, and the entropy change that a step really causes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trimtab as tt
from trimtab import theory
from trimtab.objectives.theory import Quadrant


def distributions(count: int, vocabulary: int, sharpness: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of random distributions and one token drawn from each."""
    rng = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(count, vocabulary, generator=rng, dtype=torch.float64)
    return logits, torch.multinomial(logits.softmax(-1), 1, generator=rng).squeeze(1)


def entropy(logits: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Categorical(logits=logits).entropy()


@pytest.mark.parametrize("vocabulary", [2, 17, 300])
@pytest.mark.parametrize("sharpness", [0.1, 2.0, 8.0])
def test_moments_are_what_they_say(vocabulary: int, sharpness: float) -> None:
    logits, token = distributions(50, vocabulary, sharpness)
    m, p = theory.moments(logits, token), logits.softmax(-1)
    torch.testing.assert_close(m.logp.exp(), p[torch.arange(50), token])
    torch.testing.assert_close(m.entropy, entropy(logits))
    torch.testing.assert_close(m.sum_p2, (p**2).sum(-1))
    torch.testing.assert_close(m.sum_p2_logp, (p**2 * p.log()).sum(-1))


def test_moments_survive_impossible_tokens() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0]])
    m = theory.moments(logits, torch.tensor([0]))
    assert m.entropy.item() == pytest.approx(torch.log(torch.tensor(2.0)).item())
    assert torch.isfinite(m.sum_p2_logp).all()


@pytest.mark.parametrize("sharpness", [0.1, 2.0, 8.0])
def test_the_gradient_norm_is_exact(sharpness: float) -> None:
    logits, token = distributions(200, 40, sharpness)
    leaf = logits.clone().requires_grad_()
    coefficient = torch.linspace(-3, 3, 200, dtype=torch.float64)
    drawn = leaf.log_softmax(-1).gather(1, token[:, None]).squeeze(1)
    (gradient,) = torch.autograd.grad((coefficient * drawn).sum(), leaf)
    m = theory.moments(logits, token)
    norm = theory.gradient_norm_squared(m.logp, m.sum_p2, coefficient)
    torch.testing.assert_close(norm, gradient.square().sum(-1))


@pytest.mark.parametrize("vocabulary", [2, 10, 500])
@pytest.mark.parametrize("sharpness", [0.01, 1.0, 3.0, 10.0])
def test_the_bounds_hold_for_thousands_of_distributions(vocabulary: int, sharpness: float) -> None:
    logits, token = distributions(2000, vocabulary, sharpness)
    m = theory.moments(logits, token)
    norm = theory.gradient_norm_squared(m.logp, m.sum_p2)
    low, high = theory.gradient_norm_bounds(m.logp, m.entropy, vocabulary)
    assert (low <= norm + 1e-12).all()
    assert (norm <= high + 1e-12).all()


def test_a_vocabulary_of_one_has_no_bounds() -> None:
    with pytest.raises(ValueError, match="vocabulary=1"):
        theory.gradient_norm_bounds(torch.zeros(1), torch.zeros(1), 1)


@pytest.mark.parametrize("sharpness", [0.5, 2.0, 4.0])
@pytest.mark.parametrize("advantage", [-1.5, 1.0])
def test_a_step_changes_the_entropy_by_minus_a_phi(sharpness: float, advantage: float) -> None:
    logits, token = distributions(300, 30, sharpness)
    m = theory.moments(logits, token)
    drive = theory.phi(m.logp, m.entropy, m.sum_p2, m.sum_p2_logp)
    eta = 1e-6
    direction = advantage * (torch.nn.functional.one_hot(token, 30) - logits.softmax(-1))
    measured = (entropy(logits + eta * direction) - entropy(logits - eta * direction)) / (2 * eta)
    torch.testing.assert_close(measured, -advantage * drive, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("sharpness", [0.5, 3.0])
def test_phi_is_neutral_in_expectation(sharpness: float) -> None:
    logits, _ = distributions(100, 30, sharpness)
    p = logits.softmax(-1)
    m = theory.moments(logits, torch.zeros(100, dtype=torch.int64))
    drive = theory.phi(p.log(), *(value[:, None] for value in m[1:]))
    torch.testing.assert_close((p * drive).sum(-1), torch.zeros(100, dtype=torch.float64))


@given(seed=st.integers(0, 10_000), sharpness=st.floats(0.0, 12.0), vocabulary=st.integers(2, 200))
@settings(max_examples=100)
def test_at_the_critical_surprisal_phi_is_zero(seed: int, sharpness: float, vocabulary: int) -> None:
    logits, token = distributions(20, vocabulary, sharpness, seed)
    m = theory.moments(logits, token)
    s_star = theory.critical_surprisal(m.entropy, m.sum_p2, m.sum_p2_logp)
    at = theory.phi(-s_star, m.entropy, m.sum_p2, m.sum_p2_logp)
    assert at.abs().max() < 1e-10
    above = theory.phi(-s_star - 1e-3, m.entropy, m.sum_p2, m.sum_p2_logp)
    below = theory.phi(-s_star + 1e-3, m.entropy, m.sum_p2, m.sum_p2_logp)
    assert (above < 1e-12).all()
    assert (below > -1e-12).all()


def test_the_critical_probability_of_a_coin_is_known() -> None:
    """p = (0.9, 0.1): Phi(p) = 0 has one root, found here by bisection."""
    p = torch.tensor([0.9, 0.1], dtype=torch.float64)
    m = theory.moments(p.log()[None], torch.tensor([0]))

    def drive(q: float) -> float:
        return theory.phi(torch.tensor([q], dtype=torch.float64).log(), *m[1:]).item()

    low, high = m.entropy.neg().exp().item(), 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if drive(middle) > 0 else (middle, high)
    s_star = theory.critical_surprisal(*m[1:]).item()
    assert s_star == pytest.approx(-torch.log(torch.tensor(low)).item(), rel=1e-6)
    assert 0.1 < low < 0.9


def test_a_uniform_distribution_is_at_its_critical_point() -> None:
    m = theory.moments(torch.zeros(1, 8, dtype=torch.float64), torch.tensor([3]))
    assert theory.critical_surprisal(*m[1:]).item() == pytest.approx(torch.log(torch.tensor(8.0)).item())


def test_quadrants_say_which_way_the_entropy_goes() -> None:
    logits, token = distributions(500, 30, 3.0)
    m = theory.moments(logits, token)
    s_star = theory.critical_surprisal(m.entropy, m.sum_p2, m.sum_p2_logp)
    advantage = torch.where(torch.arange(500) % 2 == 0, 1.0, -1.0).double()
    change = -advantage * theory.phi(m.logp, m.entropy, m.sum_p2, m.sum_p2_logp)
    codes = theory.quadrant(advantage, m.logp, s_star)
    for code, sign in {
        Quadrant.REWARDED_EXPECTED: -1,
        Quadrant.REWARDED_SURPRISING: 1,
        Quadrant.PUNISHED_EXPECTED: 1,
        Quadrant.PUNISHED_SURPRISING: -1,
    }.items():
        assert (codes == code).any()
        assert (change[codes == code] * sign > 0).all()
    assert theory.quadrant(torch.zeros(1), m.logp[:1], s_star[:1]).item() == Quadrant.NEUTRAL


def real_batch(count: int = 400) -> tuple[tt.TokenBatch, torch.Tensor, torch.Tensor]:
    """Tokens of random softmaxes, with their logits."""
    logits, token = distributions(count, 25, 2.5)
    m = theory.moments(logits, token)
    rng = torch.Generator().manual_seed(1)
    sequence = torch.arange(count) // 20
    advantage = torch.randn(count // 20, generator=rng, dtype=torch.float64)[sequence]
    tokens = tt.TokenBatch(
        old_logp=m.logp,
        entropy=m.entropy,
        sum_p2=m.sum_p2,
        sum_p2_logp=m.sum_p2_logp,
        advantage=advantage,
        sequence=sequence,
        segment=torch.arange(count) // 5,
    )
    return tokens, logits, token


@pytest.mark.parametrize("name", ["dapo", "stapo(tau_p=0.1)", "stare(variant=C3, gate=none)", "sspo", "cispo"])
def test_the_predicted_change_of_a_plan_is_what_a_small_step_does(name: str) -> None:
    tokens, logits, token = real_batch()
    objective = tt.objective(name)
    plan = objective.plan(tokens)
    predicted = theory.entropy_change(objective, tokens, plan)
    leaf = logits.clone().requires_grad_()
    new = leaf.log_softmax(-1).gather(1, token[:, None]).squeeze(1)
    (gradient,) = torch.autograd.grad(objective.loss(new, plan).loss, leaf)
    eta = 1e-4
    measured = (entropy(logits - eta * gradient) - entropy(logits + eta * gradient)) / (2 * eta)
    torch.testing.assert_close(predicted, measured, rtol=1e-4, atol=1e-9)
    assert predicted.abs().sum() > 0


def test_at_the_critical_weight_an_update_leaves_the_entropy_alone() -> None:
    tokens, _, _ = real_batch()
    boosted = tt.objective("stare", gate="none").plan(tokens).weight > 1
    drive = theory.batch_phi(tokens)
    w = theory.critical_weight(tokens.advantage, drive, boosted).item()
    change = -(tokens.advantage * drive * (1 + (w - 1) * boosted.double())).sum() / tokens.tokens
    assert change.abs() < 1e-12
    unweighted = -(tokens.advantage * drive).sum() / tokens.tokens
    assert unweighted.abs() > 1e-6


def test_silenced_tokens_change_no_entropy() -> None:
    tokens, _, _ = real_batch()
    objective = tt.objective("stapo", tau_p=0.2)
    plan = objective.plan(tokens)
    change = theory.entropy_change(objective, tokens, plan)
    assert (change[plan.weight == 0] == 0).all()
    assert (plan.weight == 0).any()


def test_the_missing_moment_is_named() -> None:
    tokens = tt.TokenBatch(
        old_logp=torch.zeros(1), advantage=torch.zeros(1), sequence=torch.zeros(1), entropy=torch.zeros(1)
    )
    with pytest.raises(ValueError, match="needs `sum_p2`"):
        theory.batch_phi(tokens)
