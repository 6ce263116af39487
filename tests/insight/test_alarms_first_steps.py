"""A run that breaks in its first updates is compared with its first step, which is sampled before them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from helpers.insight.made_metrics import Curve, after, alarms_of, first_rings, made_run
from trimtab.record import find_collapse, start_values


def broken(**more: Curve) -> list[dict[str, float]]:
    """Entropy and reward leave their start at step 2, and come back a little."""
    curves: dict[str, Curve] = {
        "policy__entropy": lambda step: 0.32 if step == 1 else max(0.5, 6.2 * 0.95**step),
        "reward__accuracy": lambda step: 0.54 if step == 1 else min(0.05 + max(step - 30, 0) * 0.01, 0.25),
        "reward__mean": lambda step: 0.54 if step == 1 else min(0.05 + max(step - 30, 0) * 0.01, 0.25),
    }
    return made_run(80, **{**curves, "eval__accuracy": None, **more})


def test_an_explosion_in_the_first_update_rings_within_a_few_steps_and_nothing_false_does() -> None:
    rung = first_rings(broken())
    assert rung["entropy_explosion"] == 8
    assert rung["reward_drop"] <= 8
    assert "entropy_collapse" not in rung and "reward_hacking" not in rung
    (message,) = {alarm.message for alarm in alarms_of(broken()) if alarm.alarm == "entropy_explosion"}
    assert "at the start" in message and "from 0.3" in message


def test_an_explosion_over_the_first_few_steps_rings_too() -> None:
    rising = [0.32, 0.5, 1.2, 3.0, 6.0]
    rung = first_rings(broken(policy__entropy=lambda step: rising[min(step, len(rising)) - 1]))
    assert rung["entropy_explosion"] <= 8


def test_a_fall_of_the_first_steps_is_a_collapse_of_the_training_accuracy_too() -> None:
    records = [{k: v for k, v in record.items() if k != "eval/accuracy"} for record in broken()]
    found = find_collapse(records[:40])
    assert found is not None and found.kind == "lost" and found.step <= 6


def test_an_explosion_does_not_make_the_entropy_after_it_look_emptied() -> None:
    def entropy(step: int) -> float:
        return 0.32 if step == 1 else 6.2 if step < 15 else 0.3

    curves: dict[str, Curve] = {"policy__entropy": entropy, "reward__accuracy": lambda step: 0.5 if step < 30 else 0.32}
    records = [{k: v for k, v in record.items() if k != "eval/accuracy"} for record in made_run(60, **curves)]
    assert find_collapse(records) is None


@pytest.mark.parametrize(
    "curve",
    [
        after(1, 0.3, 0.02),  # learns at once
        lambda step: 0.4,
        lambda step: 0.15 if step == 1 else 0.25,
    ],
)
def test_a_reward_that_rises_from_its_first_step_is_learning(curve: Callable[[int], float]) -> None:
    rung = first_rings(made_run(reward__accuracy=curve, reward__mean=curve))
    assert {"reward_drop", "reward_hacking"} & rung.keys() == set()


def test_the_start_is_the_first_value_only_if_the_next_ones_leave_it() -> None:
    assert start_values([0.3, 6.0, 5.0, 5.5, 4.0, 3.0], 10) == [0.3]
    assert start_values([0.3, 0.5, 1.2, 3.0, 6.0, 6.0], 10) == [0.3]
    assert start_values([0.5, 0.1, 0.0, 0.0, 0.0, 0.1], 10) == [0.5]
    assert start_values([0.1, 0.5, 0.5, 0.5, 0.5, 0.5], 10, may_rise=False) == []
    noisy = [0.5, 0.2, 0.6, 0.2, 0.2, 0.2, 0.5, 0.5]  # the third is above the first
    assert start_values(noisy, 10) == [] and start_values(noisy, 6) == noisy[:6]
    assert start_values([1.0, 0.6, 0.6, 0.6, 0.6, 0.6], 6) == [1.0, 0.6, 0.6, 0.6, 0.6, 0.6]
    assert start_values([0.0] * 6, 6) == [0.0] * 6
    assert start_values([], 1) == []
