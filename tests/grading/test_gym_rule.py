"""reasoning-gym's checkers, and what the fence in front of them keeps out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trimtab.data import GymTask, gym_dataset
from trimtab.data.gym import UNSUITABLE
from trimtab.grading import Verdict, grade
from trimtab.grading.puzzle_rules import ANSWER_FILTERS, ENTRY_FILTERS

pytest.importorskip("reasoning_gym")

COUNTDOWN = {"entry": {"metadata": {"numbers": [2, 3, 4], "target": 14}}}


def countdown(answer: str) -> str:
    return grade(f"So \\boxed{{{answer}}}", "", "gym:countdown", COUNTDOWN).kind


@pytest.mark.parametrize("answer", ["2+3*4", "(2 + (3*4))", " 4*3 + 2 "])
def test_any_expression_that_makes_the_target_is_correct(answer: str) -> None:
    assert countdown(answer) == "correct"


@pytest.mark.parametrize(
    "answer", ["14", "2*3*4", "2+3+4+5", "2+3*4=14", "two", "2+3*", "2+3*4+0*2", "4**2-3+1", "14+0*(2+3+4)"]
)
def test_an_expression_of_other_numbers_or_value_is_wrong(answer: str) -> None:
    assert countdown(answer) == "wrong"


def test_a_response_without_a_box_has_no_answer() -> None:
    assert grade("2+3*4", "", "gym:countdown", COUNTDOWN) == Verdict("no_answer")


@pytest.mark.parametrize("kind", ["countdown", "binary_matrix", "spiral_matrix", "string_insertion", "n_queens"])
def test_an_answer_is_never_run_as_code(kind: str, tmp_path: Path) -> None:
    problem = GymTask(kind, size=1)[0]
    made = tmp_path / "made"
    answer = f"__import__('pathlib').Path({str(made)!r}).touch()"
    assert grade(f"\\boxed{{{answer}}}", problem.answer, problem.rule, problem.extra).kind == "wrong"
    assert not made.exists()


@pytest.mark.parametrize("kind", sorted(ANSWER_FILTERS.keys() - {"rush_hour"}))  # which knows no answers
def test_the_fence_lets_right_answers_through(kind: str) -> None:
    task = GymTask(kind, size=10)
    for problem in (task[number] for number in range(10)):
        answer = problem.answer or problem.extra["entry"]["metadata"]["example_correct_answer"]
        assert grade(f"\\boxed{{{answer}}}", problem.answer, problem.rule, problem.extra).kind == "correct"


def test_the_fence_lets_moves_of_one_digit_through() -> None:
    assert ANSWER_FILTERS["rush_hour"].fullmatch("A+1 B-2 C+4")


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("countdown", "9**9**9**9**9"),
        ("coin_flip", "1e999999999"),
        ("rubiks_cube", "R999999999"),
        ("rush_hour", "A+999999999999"),
        ("spiral_matrix", "9**9**9**9**9"),
    ],
)
def test_an_answer_that_asks_for_endless_work_is_wrong_at_once(kind: str, answer: str) -> None:
    problem = GymTask(kind, size=1)[0]
    start = time.perf_counter()
    verdict = grade(f"\\boxed{{{answer}}}", problem.answer, problem.rule, problem.extra)
    assert verdict.kind == "wrong"
    assert time.perf_counter() - start < 1


def test_not_a_number_is_not_the_answer() -> None:
    sorting, imaginary = GymTask("number_sorting", size=1)[0], GymTask("complex_arithmetic", size=1)[0]
    count = sorting.answer.count(",") + 1
    nans = "[" + ", ".join(["NaN"] * count) + "]"
    assert grade(f"\\boxed{{{nans}}}", sorting.answer, sorting.rule, sorting.extra).kind == "wrong"
    assert grade("\\boxed{nan}", imaginary.answer, imaginary.rule, imaginary.extra).kind == "wrong"


def test_a_checker_that_fails_is_not_a_wrong_answer() -> None:
    problem = GymTask("prime_factorization", size=1)[0]
    assert grade(r"\boxed{2 times 3}", "", problem.rule, problem.extra) == Verdict("crashed", "2 times 3")


def test_the_checker_knows_the_tasks_options() -> None:
    near = {"min_num_decimal_places": 1, "max_num_decimal_places": 1}
    entry = {"answer": "1.0"}
    for options, kind in ((near, "correct"), ({}, "wrong")):
        extra = {"entry": entry, "options": options}
        assert grade(r"\boxed{1.1}", "1.0", "gym:decimal_arithmetic", extra).kind == kind


def test_an_answer_too_long_to_be_one_is_wrong_unread() -> None:
    problem = GymTask("chain_sum", size=1)[0]
    padded = "0" * 20_000 + problem.answer
    assert grade(f"\\boxed{{{padded}}}", problem.answer, problem.rule, problem.extra).kind == "wrong"


def test_the_rule_needs_the_entry() -> None:
    with pytest.raises(ValueError, match="gym:countdown needs the problem's `extra` with `entry`"):
        grade(r"\boxed{5}", "5", "gym:countdown")


@pytest.mark.parametrize("kind", ["nosuch", *sorted(UNSUITABLE)])
def test_a_kind_that_is_unknown_or_unsuitable_is_an_error(kind: str) -> None:
    with pytest.raises(ValueError, match=r"no task 'nosuch'|is not fit for training"):
        grade(r"\boxed{5}", "5", f"gym:{kind}", COUNTDOWN)


def coded(value: Any, code: str) -> Any:
    """A value with code for every text in it."""
    if isinstance(value, Mapping):
        return {key: coded(each, code) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [coded(each, code) for each in value]
    return code if isinstance(value, str) else value


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # reasoning-gym leaves files open
def test_no_text_of_an_entry_runs_as_code(tmp_path: Path) -> None:
    """Entries come from data files too, and some checkers call eval on them."""
    factory = pytest.importorskip("reasoning_gym.factory")
    kinds = sorted(factory.DATASETS.keys() - UNSUITABLE.keys())
    assert len(kinds) > 80
    for kind in kinds:
        entry = gym_dataset(kind, {})[0]
        right = str(entry["answer"])
        for part in ("answer", "metadata", "question"):
            bad = {**entry, part: coded(entry[part], f"open({str(tmp_path / kind)!r}, 'w').close()")}
            for answer in (right, "['1', '2']", "0x1"):
                grade(f"\\boxed{{{answer}}}", right, f"gym:{kind}", {"entry": bad})
    assert not [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize("kind", sorted(ENTRY_FILTERS))
def test_a_text_that_the_checker_would_run_has_reasoning_gyms_form_or_the_grader_fails(kind: str) -> None:
    hardest = {"difficulty": 10} if kind == "bitwise_arithmetic" else {"max_numbers": 50, "max_decimals": 6}
    for options in ({}, hardest):
        for problem in (GymTask(kind, size=20, options=options)[i] for i in range(20)):
            assert grade(f"\\boxed{{{problem.answer}}}", problem.answer, problem.rule, problem.extra).kind == "correct"
    entry = {"answer": "[__import__('os')]", "metadata": {"problem": "2**9**9", "direction": "ascending"}}
    for bad in (entry, {}, {"answer": 5, "metadata": 5}):
        assert grade(r"\boxed{[1, 2]}", "", f"gym:{kind}", {"entry": bad}).kind == "crashed"
