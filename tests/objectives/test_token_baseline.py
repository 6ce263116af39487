"""The optimal token baseline: worked by hand, from its properties, and against the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import trimtab as tt
from helpers.objectives import reference
from helpers.objectives.batches import batch, same, seeds
from helpers.objectives.reference_checks import SEEDS, assert_same, random_batch, token_batch


def pair(**changes: object) -> tt.TokenBatch:
    """A response of two tokens with reward 1 and one of one token with reward 0; W is 0.5, 1 and 0.1."""
    tokens = tt.TokenBatch(
        old_logp=torch.tensor([0.5, 0.5, 0.8]).log(),
        advantage=torch.tensor([0.5, 0.5, -0.5]),
        sequence=torch.tensor([0, 0, 1]),
        group=torch.tensor([4, 4]),
        sum_p2=torch.tensor([0.5, 0.5, 0.7]),
    )
    return replace(tokens, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ended", "second"), [("left_out", 0.5), ("kept", 1 - 1.0 / 1.1)])
def test_the_baseline_of_a_place_is_the_reward_weighted_by_the_gradients_so_far(ended: str, second: float) -> None:
    otb = tt.objective("otb", ended=ended)
    assert otb.advantages([1.0, 0.0], [4, 4]).tolist() == [0.5, -0.5]
    plan = otb.plan(pair())
    # The first place: B = (1 x 0.5 + 0 x 0.1) / 0.6 = 5/6. At the second the other response has ended.
    torch.testing.assert_close(plan.advantage, torch.tensor([1 - 5 / 6, second, -5 / 6]))
    _, grad_logp = otb.loss_and_grad(pair().old_logp, plan)
    torch.testing.assert_close(grad_logp, -plan.advantage / 3)


def test_a_plan_says_that_the_baseline_is_the_tokens_own() -> None:
    plan = tt.objective("otb").plan(pair())
    assert plan.why(0).startswith("advantage measured against a baseline of its own (advantage +0.167")
    assert plan.why(1).startswith("kept unchanged (advantage +0.5")


@pytest.mark.parametrize("ended", ["left_out", "kept"])
def test_groups_are_apart_and_a_response_alone_keeps_its_advantage(ended: str) -> None:
    apart = pair(group=torch.tensor([4, 5]))
    assert torch.equal(tt.objective("otb", ended=ended).plan(apart).advantage, apart.advantage)


def test_tokens_without_any_gradient_keep_their_advantage() -> None:
    certain = pair(old_logp=torch.zeros(3), sum_p2=torch.ones(3))
    assert torch.equal(tt.objective("otb").plan(certain).advantage, certain.advantage)


@pytest.mark.parametrize("ended", ["left_out", "kept"])
@given(seed=seeds)
@settings(max_examples=20)
def test_a_shift_of_a_groups_rewards_changes_nothing(ended: str, seed: int) -> None:
    tokens = replace(batch(seed, rows=8), group=torch.tensor([0, 0, 0, 1, 1, 1, 1, 1]))
    mask = torch.arange(11) < 9  # equally long, so that no token is alone
    rng = torch.Generator().manual_seed(seed)
    reward = torch.rand(8, generator=rng, dtype=torch.float64)
    logp = -torch.rand(8, 11, generator=rng, dtype=torch.float64) - 0.1
    tokens = tt.TokenBatch.from_padded(
        mask.expand(8, 11),
        old_logp=logp,
        advantage=reward,
        sum_p2=(2 * logp).exp(),
        group=tokens.group,
    )
    shifted = replace(tokens, advantage=tokens.advantage + torch.where(tokens.sequence < 3, 7.0, -3.0))
    plans = [tt.objective("otb", ended=ended).plan(each) for each in (tokens, shifted)]
    torch.testing.assert_close(plans[0].advantage, plans[1].advantage)


@given(seed=seeds)
@settings(max_examples=20)
def test_of_equal_gradients_it_is_the_groups_mean(seed: int) -> None:
    """With the same W everywhere and equally long responses B is the mean: DAPO with advantages without deviation."""
    rng = torch.Generator().manual_seed(seed)
    reward = torch.randint(0, 3, (6,), generator=rng).double()
    group = torch.arange(6) // 3
    even = torch.zeros(6, 5, dtype=torch.float64) - 0.7
    otb = tt.objective("otb")
    tokens = tt.TokenBatch.from_padded(
        torch.ones(6, 5), old_logp=even, advantage=otb.advantages(reward, group), group=group, sum_p2=even + 1.3
    )
    torch.testing.assert_close(otb.plan(tokens).advantage, tokens.advantage)


@pytest.mark.parametrize("host", ["otb", "dapo", "gspo", "sspo"])
@pytest.mark.parametrize("ended", ["left_out", "kept"])
def test_the_reference_agrees(host: str, ended: str) -> None:
    for seed in SEEDS:
        responses = random_batch(seed, current=seed % 2 == 1)
        for number, response in enumerate(responses):
            for token in response:
                token.group = number // 3
        rule = [] if host == "otb" else [reference.ATTACHMENTS["token_baseline"](ended=ended)]
        options = {"ended": ended} if host == "otb" else {}
        expected = getattr(reference, host)(responses, **options, also=[*rule, reference.kl(coef=0.3)])
        text = f"otb(ended={ended})" if host == "otb" else f"{host} + token_baseline(ended={ended})"
        objective = tt.objective(f"{text} + kl(coef=0.3)")
        plan = objective.plan(token_batch(responses))
        np.testing.assert_allclose(plan.advantage.numpy(), [t.advantage for t in expected.tokens], atol=1e-12)
        assert_same(objective, plan, responses, expected, seed)


@given(seed=seeds)
@settings(max_examples=20)
def test_it_does_not_matter_where_it_is_attached(seed: int) -> None:
    one = "dapo + token_baseline + entropy_bonus(coef=0.3) + s2t(tau_p=0.2)"
    other = "dapo + s2t(tau_p=0.2) + entropy_bonus(coef=0.3) + token_baseline"
    tokens = batch(seed)
    plans = [tt.objective(text).plan(tokens) for text in (one, other)]
    torch.testing.assert_close(plans[0].advantage, plans[1].advantage, rtol=1e-12, atol=1e-12)
    assert torch.equal(plans[0].weight, plans[1].weight)


def test_a_batch_without_groups_is_told_what_is_missing() -> None:
    with pytest.raises(ValueError, match="otb reads `group`, which this TokenBatch lacks: give each response"):
        tt.objective("otb").plan(pair(group=None))


def test_otb_is_dapo_with_its_rule_and_rewards_less_their_mean() -> None:
    same(tt.objective("otb"), tt.objective("dapo + token_baseline", advantage="group_centered"), batch(3))
