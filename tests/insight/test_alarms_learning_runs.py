"""Alarms leave a run alone that starts badly and learns, and ring where the same signs come without a gain."""

from __future__ import annotations

from collections.abc import Callable

from helpers.insight.made_metrics import after, first_rings, made_run

TROUBLE = 40  # the step after which a run goes wrong


def evaluated(records: list[dict[str, float]], accuracy: Callable[[int], float]) -> list[dict[str, float]]:
    """Return the records with an evaluation every other step."""
    return [{**r, "eval/accuracy": accuracy(int(r["step"]))} if r["step"] % 2 == 0 else r for r in records]


def test_a_base_model_that_learns_its_task_rings_nothing() -> None:
    """RL from nothing: at first no answer is right, most responses are cut off, and the entropy is 2.2."""

    def learned(step: int) -> float:
        return min(1.0, max(0.0, (step - 5) / 25))

    curves = {
        "reward__accuracy": lambda step: 0.65 * learned(step),
        "reward__mean": lambda step: 0.65 * learned(step),
        "policy__entropy": lambda step: 2.2 - 2.1 * learned(step),
        "groups__mixed_share": lambda step: 2 * learned(step) * (1 - learned(step)),
        "response__truncated_share": lambda step: 0.7 * (1 - learned(step)),
        "response__length_mean": lambda step: 140 - 110 * learned(step),
        "response__repetition_share": lambda step: 0.04 + 0.08 * learned(step),
        "tokens__top_gradient_share": lambda step: 0.03 + 0.9 * learned(step),
    }
    assert first_rings(evaluated(made_run(100, **curves), lambda step: 0.65 * learned(step))) == {}


def test_few_groups_with_spread_are_trouble_unless_most_answers_became_right() -> None:
    few = {"groups__mixed_share": after(TROUBLE, 0.05, 0.3), "eval__accuracy": None}
    stuck = made_run(**few, reward__accuracy=after(20, 0.15, 0.01))
    solved = made_run(**few, reward__accuracy=after(20, 0.65, 0.01), response__length_mean=None)
    right_all_along = made_run(**few, reward__accuracy=0.9)
    assert "no_signal" in first_rings(stuck) and "no_signal" not in first_rings(solved)
    assert "no_signal" in first_rings(right_all_along, min_spreads=0)


def test_truncation_that_falls_is_left_alone_until_it_stays() -> None:
    assert "truncation" not in first_rings(made_run(response__truncated_share=lambda step: max(0.0, 0.9 - 0.02 * step)))
    assert first_rings(made_run(response__truncated_share=0.7))["truncation"] == 17


def test_a_reward_that_jumps_is_no_hacking_where_held_out_accuracy_follows() -> None:
    jump = {"reward__accuracy": after(TROUBLE, 0.8, 0.3), "response__length_mean": after(TROUBLE, 150.0, 400.0)}
    follows, stays = after(TROUBLE, 0.8, 0.4), after(TROUBLE, 0.4, 0.4)
    assert "reward_hacking" not in first_rings(evaluated(made_run(**jump), follows))
    assert "reward_hacking" in first_rings(evaluated(made_run(**jump), stays))
    never_evaluated = [{k: v for k, v in r.items() if k != "eval/accuracy"} for r in made_run(**jump)]
    assert "reward_hacking" in first_rings(never_evaluated)


def test_a_gain_does_not_excuse_an_entropy_far_below_the_objectives_target() -> None:
    learned = {"eval__accuracy": after(20, 0.8, 0.4), "policy__entropy": after(TROUBLE, 0.05, 0.6)}
    assert "entropy_collapse" not in first_rings(made_run(**learned))
    assert "entropy_collapse" in first_rings(made_run(**learned), target=0.3)
