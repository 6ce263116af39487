"""DPPO: a mask on how far a probability has moved in the direction of the push, in place of a clip of the ratio."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings

import trimtab as tt
from helpers.objectives.batches import batch, dtypes, moved, seeds
from trimtab.objectives.surrogates import binary_kl


def weights(
    old: list[float], new: list[float], advantage: float, dtype: torch.dtype = torch.float64, **options: object
) -> list[float]:
    """The weight of the policy gradient of tokens that had the probabilities `old` and now have `new`."""
    n = len(old)
    packed = tt.TokenBatch(
        old_logp=torch.tensor(old, dtype=dtype).log(),
        advantage=torch.full((n,), advantage, dtype=dtype),
        sequence=torch.zeros(n, dtype=torch.int64),
    )
    objective = tt.objective("dppo", **options)
    plan = objective.plan(packed)
    out, gradient = objective.loss_and_grad(torch.tensor(new, dtype=dtype).log(), plan)
    assert out.clipped is not None
    assert torch.equal(out.clipped, gradient == 0)
    return (gradient * n / -advantage).tolist()


@pytest.mark.parametrize(
    ("divergence", "old", "new", "advantage", "weight"),
    [
        ("tv", 0.5, 0.69, 1.0, 1.38),
        ("tv", 0.5, 0.71, 1.0, 0.0),
        ("tv", 0.5, 0.71, -1.0, 1.42),
        ("tv", 0.5, 0.31, -1.0, 0.62),
        ("tv", 0.5, 0.29, -1.0, 0.0),
        ("tv", 0.5, 0.29, 1.0, 0.58),
        ("tv", 0.01, 0.1, 1.0, 10.0),  # PPO would clip this ratio
        ("tv", 0.001, 0.1, 1.0, 20.0),  # a ratio of 100, at the cap
        ("kl", 0.5, 0.78, 1.0, 1.56),  # binary KL 0.188
        ("kl", 0.5, 0.79, 1.0, 0.0),  # 0.205
        ("kl", 0.5, 0.79, -1.0, 1.58),
        ("kl", 0.5, 0.22, -1.0, 0.44),
        ("kl", 0.5, 0.21, -1.0, 0.0),
        ("kl", 0.5, 0.21, 1.0, 0.42),
        ("kl", 0.001, 0.1, 1.0, 20.0),  # 0.0997
    ],
)
def test_a_token_is_masked_once_its_probability_has_moved_too_far(
    divergence: str, old: float, new: float, advantage: float, weight: float
) -> None:
    assert weights([old], [new], advantage, divergence=divergence) == pytest.approx([weight])


def test_the_limits_of_rise_and_fall_are_separate() -> None:
    assert weights([0.5, 0.5], [0.6, 0.4], 1.0, shift_high=0.05) == pytest.approx([0.0, 0.8])
    assert weights([0.5, 0.5], [0.6, 0.4], -1.0, shift_high=0.05) == pytest.approx([1.2, 0.8])
    assert weights([0.5, 0.5], [0.6, 0.4], -1.0, shift_low=0.05) == pytest.approx([1.2, 0.0])


@pytest.mark.parametrize("divergence", ["tv", "kl"])
@given(seed=seeds, dtype=dtypes)
@settings(max_examples=20)
def test_no_token_is_masked_for_moving_against_its_advantage(divergence: str, seed: int, dtype: torch.dtype) -> None:
    tokens = batch(seed, dtype=dtype)
    objective = tt.objective("dppo", divergence=divergence, shift_low=0.0, shift_high=0.0, cap=1e9)
    new = moved(tokens)
    out, gradient = objective.loss_and_grad(new, objective.plan(tokens))
    against = (new.detach() - tokens.old_logp) * tokens.advantage < 0
    torch.testing.assert_close(gradient[against], -(out.ratio * tokens.advantage / tokens.tokens)[against])
    # Neither rare nor certain, and moved by more than fp32 rounds.
    along = (new.detach() > tokens.old_logp + 0.05) & (tokens.old_logp > -5) & (tokens.old_logp < -0.5)
    along &= tokens.advantage > 0
    assert not gradient[along].any()


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_an_unmoved_token_is_kept_whatever_the_limits(divergence: str) -> None:
    probabilities = [1e-9, 0.3, 0.999, 1.0]
    for dtype in (torch.float32, torch.float64):
        found = weights(probabilities, probabilities, 1.0, dtype, divergence=divergence, shift_low=0.0, shift_high=0.0)
        assert found == [1.0] * 4


def test_a_probability_that_was_rounded_to_one_has_not_moved_far() -> None:
    """In fp32 the log-probabilities of a certain token are 0 or a few 1e-7, by chance."""
    old = torch.tensor([-2e-6, 0.0, -1e-7], dtype=torch.float32)
    new = torch.tensor([0.0, -2e-6, 0.0], dtype=torch.float32)
    assert binary_kl(old, new).abs().max() < 1e-4
    assert weights([0.95], [1.0], 1.0, torch.float32, divergence="kl") == [0.0]


def test_the_binary_kl_is_that_of_two_coins() -> None:
    p = torch.tensor([1e-6, 0.2, 0.5, 0.9, 1 - 1e-6], dtype=torch.float64)
    old, new = (values.reshape(-1) for values in torch.meshgrid(p, p, indexing="ij"))
    coins = [torch.distributions.Bernoulli(probs) for probs in (old, new)]
    torch.testing.assert_close(binary_kl(old.log(), new.log()), torch.distributions.kl_divergence(*coins))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_binary_kl_of_impossible_and_certain_tokens_is_finite(dtype: torch.dtype) -> None:
    ends = torch.tensor([-1e4, -30.0, -1e-9, 0.0], dtype=dtype)
    old, new = (values.reshape(-1) for values in torch.meshgrid(ends, ends, indexing="ij"))
    found = binary_kl(old, new)
    assert torch.isfinite(found).all()
    assert (found > -1e-6).all()
    assert binary_kl(ends[:1], ends[-1:]).item() == pytest.approx(math.log(1e8), rel=1e-5)  # impossible, now certain
    assert binary_kl(ends[-1:], ends[:1]).item() == pytest.approx(1e4, rel=1e-5)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_a_token_without_signal_has_no_gradient(divergence: str) -> None:
    tokens = tt.TokenBatch(old_logp=torch.tensor([-1.0, -3.0]), advantage=torch.zeros(2), sequence=torch.zeros(2))
    objective = tt.objective("dppo", divergence=divergence)
    _, gradient = objective.loss_and_grad(torch.tensor([-0.1, -torch.inf]), objective.plan(tokens))
    assert not gradient.any()
