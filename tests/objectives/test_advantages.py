"""Advantages: the papers' numbers, and groups in which there is nothing to compare."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trimtab as tt
from trimtab import advantages


@pytest.mark.parametrize(("right", "expected"), list(enumerate([2.47, 1.62, 1.21, 0.94, 0.72, 0.54, 0.35], start=1)))
def test_eight_responses_give_the_values_printed_in_the_stapo_paper(right: int, expected: float) -> None:
    reward = torch.tensor([1.0] * right + [0.0] * (8 - right))
    advantage = advantages.group_normalized(reward, torch.zeros(8, dtype=torch.int64))
    assert round(advantage[0].item(), 2) == expected
    assert advantage.sum().abs() < 1e-5


def test_each_group_is_its_own_in_any_order() -> None:
    reward, group = torch.tensor([1.0, 10.0, 0.0, 20.0]), torch.tensor([7, -2, 7, -2])
    assert advantages.group_centered(reward, group).tolist() == [0.5, -5.0, -0.5, 5.0]
    assert advantages.leave_one_out(reward, group).tolist() == [1.0, -10.0, -1.0, 10.0]


def test_a_group_of_one_has_baseline_zero_and_deviation_one() -> None:
    reward, group = torch.tensor([3.0]), torch.tensor([0])
    assert advantages.group_centered(reward, group).item() == 3.0
    assert advantages.leave_one_out(reward, group).item() == 3.0
    assert advantages.group_normalized(reward, group).item() == pytest.approx(3 / (1 + 1e-6))


@given(value=st.floats(-1e3, 1e3, width=32), size=st.integers(2, 9))
@settings(max_examples=200)
def test_equal_rewards_give_exactly_zero(value: float, size: int) -> None:
    reward, group = torch.full((size,), value), torch.zeros(size, dtype=torch.int64)
    for estimator in advantages.ADVANTAGES.values():
        assert estimator(reward, group).abs().max() == 0


def test_maxrl_divides_by_the_mean_reward() -> None:
    """One of four right: 0.75 / 0.25 for the right one. Three of four: 0.25 / 0.75."""
    reward, group = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0]), torch.arange(8) // 4
    expected = torch.tensor([3.0, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1])
    torch.testing.assert_close(advantages.mean_normalized(reward, group), expected)
    assert advantages.mean_normalized([0.0, 0.0], [0, 0]).tolist() == [0.0, 0.0]
    assert advantages.mean_normalized([-2.0, -2.0, 3.0], [0, 0, 1]).tolist() == [0.0, 0.0, 3.0]


def test_maxrl_refuses_rewards_below_zero() -> None:
    with pytest.raises(ValueError, match="but the reward of response 2 is -1: pay 0 or more"):
        advantages.mean_normalized([1.0, 0.0, -1.0], [0, 0, 0])


def test_gdpo_normalises_each_reward_before_it_adds_them() -> None:
    """Right or wrong varies by 1, the format by 0.1; the right one without format and the wrong one with it differ."""
    both = torch.tensor([[1.0, 0.0], [0.0, 0.1], [0.0, 0.0]])
    # Of 1, 0, 0 the mean is 1/3 and the deviation sqrt(1/3), so right answers get 2 / sqrt(3) and others -1 / sqrt(3).
    high, low = 2 / 3**0.5, -1 / 3**0.5
    found = advantages.compute_advantages("decoupled", both, [0, 0, 0], weights=[1.0, 0.25])
    expected = [high + 0.25 * low, low + 0.25 * high, low + 0.25 * low]
    assert found.tolist() == pytest.approx(expected, abs=1e-4)
    whitened = advantages.compute_advantages("decoupled_whitened", both, [0, 0, 0], weights=[1.0, 0.25])
    assert whitened.tolist() == pytest.approx((found / (found.std() + 1e-6)).tolist())
    assert whitened.std().item() == pytest.approx(1, abs=1e-5)


def test_gdpo_of_one_reward_is_grpos_advantage() -> None:
    reward, group = torch.tensor([1.0, 0.0, 0.0, 0.5]), [0, 0, 0, 0]
    expected = advantages.group_normalized(reward, group)
    for values in (reward, reward.unsqueeze(1)):
        assert torch.equal(advantages.compute_advantages("decoupled", values, group), expected)


def test_gdpo_keeps_the_zeros_of_groups_without_signal() -> None:
    both = torch.tensor([[1.0, 0.3], [0.0, 0.1], [0.7, 0.2], [0.7, 0.2]])
    found = advantages.compute_advantages("decoupled_whitened", both, [0, 0, 1, 1])
    assert found[2:].tolist() == [0.0, 0.0]
    assert (found[:2] != 0).all()


def test_gdpo_counts_a_rollout_of_three_branches_once() -> None:
    both = torch.tensor([[1.0, 0.3], [1.0, 0.3], [1.0, 0.3], [0.0, 0.1]])
    branches = advantages.compute_advantages("decoupled_whitened", both, [0] * 4, [5, 5, 5, 6], [1.0, 2.0])
    alone = advantages.compute_advantages("decoupled_whitened", both[2:], [0, 0], None, [1.0, 2.0])
    assert torch.equal(branches, alone[[0, 0, 0, 1]])


def test_gdpo_wants_one_weight_per_reward() -> None:
    with pytest.raises(ValueError, match="there are 2 rewards per response, but 3 weights"):
        advantages.compute_advantages("decoupled", torch.ones(4, 2), [0] * 4, weights=[1.0, 1.0, 1.0])


def test_a_method_says_whether_it_wants_the_rewards_by_themselves() -> None:
    assert tt.objective("gdpo").separate_rewards and not tt.objective("grpo").separate_rewards
    both = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    found = tt.objective("gdpo", whiten=False).advantages(both, [0, 0], weights=[2.0, 1.0])
    assert found.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)


def test_lists_are_welcome_and_the_float_type_stays() -> None:
    assert advantages.group_centered([1, 0], [0, 0]).tolist() == [0.5, -0.5]
    assert advantages.group_centered(torch.tensor([1.0, 0.0], dtype=torch.float64), [0, 0]).dtype == torch.float64


def test_no_responses_give_no_advantages() -> None:
    assert advantages.group_normalized(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_a_reward_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="reward nan of response 1"):
        advantages.group_normalized(torch.tensor([1.0, float("nan")]), torch.tensor([0, 0]))


def test_lengths_that_do_not_match_are_named() -> None:
    with pytest.raises(ValueError, match=r"shapes \(2,\) and \(3,\)"):
        advantages.group_centered(torch.zeros(2), torch.zeros(3, dtype=torch.int64))
