"""A run has collapsed if what it had is lost for good, and not if it dips, learns slowly or has solved its task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

import pytest

from trimtab.record.collapse import HOLD_STEPS, Collapse, CollapseDetector, find_collapse, find_fall


def records(
    accuracy: Sequence[float] = (),
    entropy: Sequence[float] = (),
    mixed: Sequence[float] = (),
    reward: Sequence[float] = (),
    every: int = 5,
) -> list[dict[str, float]]:
    """Metrics of a run: held-out accuracy at step 0 and every few steps, the others at every step from 1."""
    rows: dict[int, dict[str, float]] = {}
    for number, value in enumerate(accuracy):
        rows.setdefault(number * every, {})["eval/accuracy"] = value
    for step, values in enumerate(zip_longest(entropy, mixed, reward), start=1):
        names = ("policy/entropy", "groups/mixed_share", "reward/accuracy")
        rows.setdefault(step, {}).update({n: v for n, v in zip(names, values, strict=True) if v is not None})
    return [{"step": step, **rows[step]} for step in sorted(rows)]


def test_accuracy_below_half_of_its_best_for_good_is_a_collapse() -> None:
    assert find_collapse(records([0.0, 0.3, 0.6, 0.2, 0.1, 0.1])) == Collapse(
        15, "lost", "accuracy is 0.10; its best was 0.60"
    )


@pytest.mark.parametrize(
    "accuracy",
    [
        [0.4, 0.1, 0.1, 0.3, 0.25],  # fell and came back
        [0.4, 0.3, 0.25, 0.22, 0.21, 0.21],  # lower, but not half
        [0.0, 0.01, 0.06, 0.02, 0.01, 0.02, 0.01],  # has not learned anything yet that it could lose
        [0.4, 0.4, 0.4, 0.4, 0.1],  # one low evaluation, after which the run has ended
    ],
)
def test_a_dip_a_decline_or_a_slow_start_is_no_collapse(accuracy: list[float]) -> None:
    assert find_collapse(records(accuracy)) is None


def test_one_low_evaluation_is_no_proof_however_long_ago() -> None:
    run = records([0.4, 0.1], every=20) + [{"step": step} for step in range(21, 39)]
    assert find_collapse(run) is None
    assert find_collapse([*run, {"step": 40, "eval/accuracy": 0.1}]) is not None


def test_a_run_that_ends_low_has_fallen_though_it_has_not_collapsed() -> None:
    assert find_fall(records([0.51, 0.0, 0.0, 0.0], every=3)) == Collapse(
        3, "low", "accuracy is 0.00; its best was 0.51"
    )
    assert find_fall(records([0.4, 0.1, 0.3])) is None
    lasting = records([0.0, 0.3, 0.6, 0.2, 0.1, 0.1])
    assert find_fall(lasting) == find_collapse(lasting)


def test_a_policy_stuck_with_wrong_answers_has_collapsed() -> None:
    mixed = [0.0] * 5 + [0.3] * 10 + [0.0] * 30
    found = find_collapse(records([], [], mixed, [0.15] * 45))
    assert found is not None and found.kind == "stuck"
    assert 15 < found.step <= 20
    assert "15%" in found.message


def test_a_solved_task_and_one_that_never_gave_a_signal_are_not_stuck() -> None:
    assert find_collapse(records([], [], [0.5] * 10 + [0.0] * 40, [0.99] * 50)) is None
    assert find_collapse(records([], [], [0.0] * 50, [0.0] * 50)) is None


def test_an_emptied_entropy_counts_only_while_accuracy_falls() -> None:
    entropy = [2.0] * 10 + [0.05] * 40
    assert find_collapse(records([0.1, 0.5, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6], entropy)) is None
    found = find_collapse(records([0.1, 0.5, 0.6, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4], entropy))
    assert found is not None and found.kind == "emptied"


def test_an_entropy_that_is_not_finite_hides_no_collapse() -> None:
    entropy = [*[math.nan] * 5, *[2.0] * 10, *[0.05] * 35]
    found = find_collapse(records([0.1, 0.5, 0.6, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4], entropy))
    assert found is not None and found.kind == "emptied"


def test_without_evaluations_the_training_accuracy_decides() -> None:
    assert find_collapse(records(reward=[0.5] * 20 + [0.1] * 20)) is not None
    assert find_collapse(records(reward=[0.5] * 20 + [0.1] * 3 + [0.5] * 20)) is None


def test_updates_that_are_never_finite_are_a_collapse() -> None:
    bad = [{"step": step, "update/skipped": 2.0} for step in range(1, HOLD_STEPS + 2)]
    found = find_collapse(bad)
    assert found is not None and (found.step, found.kind) == (1, "nonfinite")
    good = {"step": 12, "update/skipped": 1.0, "update/ratio_mean": 1.0}  # one of its two updates was taken
    assert find_collapse([*bad, good]) is None


def test_step_by_step_gives_what_the_whole_run_gives_and_keeps_little() -> None:
    run = records([0.0, 0.3, 0.6, 0.2, 0.1, 0.1, 0.1], [1.0] * 30, [0.3] * 30, [0.2] * 30)
    detector = CollapseDetector()
    found = [detector.add(record) for record in run]
    assert found[-1] == find_collapse(run)
    first = next(record["step"] for record, collapse in zip(run, found, strict=True) if collapse)
    assert first == 15 + HOLD_STEPS
    assert all(len(values) <= 5 for values in detector.recent.values())


def test_no_metrics_are_no_collapse() -> None:
    assert find_collapse([]) is None
