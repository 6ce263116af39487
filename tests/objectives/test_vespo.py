"""VESPO: a smooth weight on a response by the product of its token ratios."""

from __future__ import annotations

import math

import pytest
import torch

import trimtab as tt
from helpers.objectives.batches import batch, moved


def phi(log_ratios: list[float], advantage: float, **options: object) -> list[float]:
    """The weight of the policy gradient of the tokens of one response."""
    n = len(log_ratios)
    old = torch.full((n,), -30.0, dtype=torch.float64)
    packed = tt.TokenBatch(
        old_logp=old, advantage=torch.full_like(old, advantage), sequence=torch.zeros(n, dtype=torch.int64)
    )
    objective = tt.objective("vespo", **options)
    new = old + torch.tensor(log_ratios, dtype=torch.float64)
    _, gradient = objective.loss_and_grad(new, objective.plan(packed))
    return (gradient * n / -advantage).tolist()


def test_the_weight_follows_the_product_of_the_ratios() -> None:
    w = math.exp(0.3)
    assert phi([0.2, 0.2, -0.1], 1.0) == pytest.approx([w**2 * math.exp(3 - 3 * w)] * 3)
    assert phi([0.2, 0.2, -0.1], -1.0) == pytest.approx([w**3 * math.exp(2 - 2 * w)] * 3)
    assert phi([0.2, 0.2, -0.1], 2.0, k_pos=1.0, lambda_pos=0.5) == pytest.approx([w * math.exp(0.5 - 0.5 * w)] * 3)


def test_a_response_that_has_not_moved_has_the_weight_one() -> None:
    assert phi([0.0, 0.0], 1.0) == [1.0, 1.0]
    assert phi([0.25, -0.25], -1.0) == [1.0, 1.0]  # the moves cancel in the product
    assert phi([0.0], 1.0, k_pos=7.3, lambda_pos=11.1) == [1.0]


@pytest.mark.parametrize(("advantage", "k", "lam"), [(1.0, 2.0, 3.0), (-1.0, 3.0, 2.0)])
def test_the_weight_is_largest_where_w_is_k_over_lambda(advantage: float, k: float, lam: float) -> None:
    top = phi([math.log(k / lam)], advantage)[0]
    assert top == pytest.approx(math.exp(lam - k) * (k / lam) ** k)
    assert all(phi([math.log(k / lam) + step], advantage)[0] < top for step in (-0.01, 0.01))


def test_responses_far_from_the_old_policy_lose_their_weight() -> None:
    assert phi([20.0], 1.0) == [0.0]
    assert phi([-25.0], 1.0) == pytest.approx([1e-16 * math.exp(3)])  # ln w is at least ln 1e-8
    assert phi([-15.0, -15.0], -1.0) == pytest.approx([1e-24 * math.exp(2)] * 2)
    assert phi([15.0, 15.0], -1.0, lambda_neg=0.0, k_neg=0.5) == pytest.approx([math.exp(10)] * 2)  # and at most 20


def test_no_options_make_a_weight_that_is_not_finite() -> None:
    for k in (0.0, 100.0):
        for lam in (0.0, 100.0):
            found = [phi([log_w], 1.0, k_pos=k, lambda_pos=lam)[0] for log_w in (-40.0, -1.0, 0.0, 1.0, 40.0)]
            assert all(0 <= value <= math.exp(20) * (1 + 1e-12) for value in found)


def test_a_response_without_signal_has_no_gradient() -> None:
    tokens = batch(0)
    objective = tt.objective("vespo")
    _, gradient = objective.loss_and_grad(moved(tokens), objective.plan(tokens))
    assert gradient.all()
    silent = tt.TokenBatch(old_logp=-torch.ones(2), advantage=torch.zeros(2), sequence=torch.zeros(2))
    _, gradient = objective.loss_and_grad(torch.tensor([-0.1, -torch.inf]), objective.plan(silent))
    assert not gradient.any()


def test_a_silenced_token_stays_in_the_product_of_its_response() -> None:
    tokens = batch(1)
    plain, silencing = tt.objective("vespo"), tt.objective("vespo + s2t(tau_p=0.3, mask=rare)")
    plan, new = silencing.plan(tokens), moved(tokens)
    kept = plan.weight > 0
    assert 0 < int(kept.sum()) < tokens.tokens
    _, before = plain.loss_and_grad(new, plain.plan(tokens))
    _, after = silencing.loss_and_grad(new, plan)
    torch.testing.assert_close(after, before * kept * tokens.tokens / kept.sum())


def test_the_ratio_metrics_are_those_of_tokens() -> None:
    tokens = batch(2)
    new = moved(tokens)
    outs = [objective.loss(new, objective.plan(tokens)) for objective in map(tt.objective, ("vespo", "dapo"))]
    for metric in ("update/ratio_max", "update/ratio_mean", "update/approx_kl"):
        assert torch.equal(outs[0].metrics[metric], outs[1].metrics[metric]), metric
