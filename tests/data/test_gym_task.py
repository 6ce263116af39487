"""Tasks of reasoning-gym."""

from __future__ import annotations

import re
import sys

import pytest

from trimtab.data import GymTask, Problem

pytest.importorskip("reasoning_gym")


def text(problem: Problem) -> str:
    return problem.prompt[0]["content"]


def test_a_problem_asks_for_a_box_and_carries_what_its_checker_needs() -> None:
    problem = GymTask("countdown")[0]
    assert text(problem).endswith("\\boxed{}.")
    assert problem.rule == "gym:countdown"
    assert problem.extra["entry"]["metadata"]["target"] > 0


def test_options_reach_the_generator() -> None:
    task = GymTask("countdown", options={"min_numbers": 3, "max_numbers": 3})
    assert all(len(task[n].extra["entry"]["metadata"]["numbers"]) == 3 for n in range(10))


def test_training_and_testing_never_share_a_text_even_when_problems_are_few() -> None:
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    train, test = (
        {text(GymTask("chain_sum", seed=seed, options=options, split=split)[n]) for seed in (0, 1) for n in range(100)}
        for split in ("train", "test")
    )
    assert train and test
    assert not train & test


def test_neighbouring_seeds_do_not_share_their_problems() -> None:
    first, second = ({text(GymTask("chain_sum", seed=seed)[n]) for n in range(100)} for seed in (0, 1))
    assert not first & second


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("countdwn", {}, "has no task 'countdwn'; it has ab, "),
        ("countdown", {"min_numbers": 0}, "min_numbers must be greater than 1"),
        ("countdown", {"numbers": 4}, "unexpected keyword argument 'numbers'"),
        ("countdown", {"operators": {1}}, "options must be plain values"),
        ("puzzle24", {}, "not fit for training: its checker does not look at the puzzle's numbers"),
    ],
)
def test_what_cannot_be_made_is_an_error_at_once(kind: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        GymTask(kind, options=options)


def test_without_reasoning_gym_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    needed = r"the task gym:maze needs the package reasoning-gym: .*pip install .*\[gym\]'"
    with pytest.raises(ValueError, match=needed):
        GymTask("maze", size=3)


def test_there_is_no_problem_outside_the_epoch() -> None:
    with pytest.raises(IndexError, match="problems 0 to 4"):
        GymTask("countdown", size=5)[5]
