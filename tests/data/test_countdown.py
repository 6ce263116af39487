"""Countdown: every target can be reached, attempts are valid and show no solution, and the splits share no question."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.grading.countdown import fraction_value, steps_value
from trimtab.data import Countdown, Problem
from trimtab.data.countdown import CountdownForm
from trimtab.data.problems import split_of
from trimtab.grading import grade
from trimtab.trainer.config import load
from trimtab.trainer.model import DEMO_MODELS

tasks = st.builds(
    Countdown,
    numbers=st.integers(2, 5),
    largest=st.integers(5, 30),
    operations=st.sampled_from(["+-*", "+-*/", "+*", "+-", "*/+"]),
    largest_target=st.sampled_from([60, 99, 999]),
    form=st.sampled_from(get_args(CountdownForm)),
    parentheses=st.booleans(),
    seed=st.integers(0, 2**40),
    split=st.sampled_from(["train", "test"]),
)
indices = st.integers(0, 9_999)


def question(problem: Problem) -> tuple[list[int], int]:
    numbers, target = problem.prompt[0]["content"].removesuffix(" ").split("=")
    return [int(number) for number in numbers.split()], int(target)


@cache
def reachable(numbers: tuple[Fraction, ...], operations: str, whole: bool) -> frozenset[Fraction]:
    """All values of the numbers, each used once, by trying everything; `whole`: through whole numbers from 0 on."""
    if len(numbers) == 1:
        return frozenset(numbers)
    found: set[Fraction] = set()
    for i, a in enumerate(numbers):
        for j, b in enumerate(numbers):
            if i == j:
                continue
            rest = tuple(each for place, each in enumerate(numbers) if place not in (i, j))
            values = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}
            for sign in operations:
                value = values[sign]
                if value is None or value.denominator != 1 or (whole and value < 0):
                    continue
                found |= reachable(tuple(sorted((*rest, value))), operations, whole)
    return frozenset(found)


def text_value(text: str, form: str, numbers: Sequence[int], operations: str) -> Fraction | None:
    return fraction_value(text, numbers, operations) if form == "expression" else steps_value(text, numbers, operations)


@settings(max_examples=60)
@given(tasks, indices)
def test_every_target_is_in_range_and_can_be_reached(task: Countdown, index: int) -> None:
    task = replace(task, numbers=min(task.numbers, 4))  # all values of five numbers take seconds
    numbers, target = question(task[index])
    assert len(numbers) == task.numbers and all(1 <= number <= task.largest for number in numbers)
    assert 0 <= target <= task.largest_target
    fractions = tuple(sorted(map(Fraction, numbers)))
    assert target in reachable(fractions, task.operations, whole=task.form == "steps")


@given(tasks, indices)
def test_every_attempt_is_valid_and_graded_by_its_real_value(task: Countdown, index: int) -> None:
    problem = task[index]
    numbers, target = question(problem)
    assert isinstance(problem.solution, str)
    value = text_value(problem.solution, task.form, numbers, task.operations)
    assert value is not None  # right numbers, each once, right syntax, and in steps right arithmetic
    verdict = grade(problem.solution, problem.answer, problem.rule)
    assert verdict.kind == ("correct" if value == target else "wrong")
    if value >= 0:  # graded against the value that it has, it is right
        told = problem.answer.replace(f"={target} ", f"={value} ")
        assert grade(problem.solution, told, "countdown").kind == "correct"


@given(tasks, indices)
def test_an_attempt_in_steps_never_writes_a_negative_number(task: Countdown, index: int) -> None:
    attempt = replace(task, form="steps")[index].solution
    assert isinstance(attempt, str)
    assert re.fullmatch(r"\d+[-+*/]\d+=\d+(,\d+[-+*/]\d+=\d+)*", attempt)


@pytest.mark.parametrize("form", get_args(CountdownForm))
def test_an_attempt_is_right_about_as_often_as_chance_has_it(form: CountdownForm) -> None:
    task = Countdown(form=form)
    problems = [task[index] for index in range(3000)]
    right = sum(grade(str(problem.solution), problem.answer, "countdown").kind == "correct" for problem in problems)
    assert 0.06 < right / 3000 < 0.12


@pytest.mark.parametrize("form", get_args(CountdownForm))
def test_training_and_testing_never_share_a_question(form: CountdownForm) -> None:
    def questions(split: str, **options: int) -> set[str]:
        task = Countdown(form=form, split=split, **options)  # type: ignore[arg-type]
        return {task[n].prompt[0]["content"] for n in range(2000)}

    for options in ({}, {"numbers": 2}, {"numbers": 4, "largest": 5}):
        seen = questions("train", **options) | questions("train", seed=1, **options)
        held_out = questions("test", **options)
        assert seen and held_out and not seen & held_out


def test_a_held_out_question_is_held_out_in_both_forms_and_with_other_operations() -> None:
    for operations in ("+-*", "+*"):
        for form in get_args(CountdownForm):
            task = Countdown(operations=operations, form=form, split="test")
            for index in range(300):
                assert split_of(task[index].prompt[0]["content"].removesuffix(" "), 10) == "test"


def test_parentheses_are_needed_only_where_they_are_asked_for() -> None:
    plain, nested = Countdown(), Countdown(parentheses=True)
    assert not any("(" in str(plain[index].solution) for index in range(300))
    assert any("(" in str(nested[index].solution) for index in range(300))


def test_the_same_index_is_the_same_problem_and_the_same_question_has_the_same_attempt() -> None:
    task = Countdown(numbers=2, largest=4, size=3000)
    assert [task[n] for n in range(50)] == [Countdown(numbers=2, largest=4)[n] for n in range(50)]
    attempts: dict[str, set[str]] = {}
    for index in range(3000):
        attempts.setdefault(task[index].answer, set()).add(str(task[index].solution))
    assert len(attempts) < 3000 and all(len(each) == 1 for each in attempts.values())


def test_problems_are_these() -> None:
    """Golden: a change of the generator would silently change every experiment."""
    first = Countdown()[0]
    assert (first.prompt[0]["content"], first.answer, first.solution) == (
        "3 6 9=6 ",
        "3 6 9=6 +-* expression",
        "6*9*3",
    )
    steps = Countdown(numbers=4, form="steps")[0]
    assert (steps.answer, steps.solution) == ("3 7 2 3=16 +-* steps", "2+3=5,5*7=35,3+35=38")


@pytest.mark.parametrize("form", get_args(CountdownForm))
def test_the_demo_model_knows_every_character_of_prompts_and_attempts(form: CountdownForm) -> None:
    task = Countdown(numbers=5, operations="+-*/", form=form)
    texts = [task[n].prompt[0]["content"] + str(task[n].solution) for n in range(300)]
    used = set("".join(texts))
    assert used <= set(DEMO_MODELS["demo-countdown"]) and used >= set("0123456789+-*/= ")


@pytest.mark.parametrize("recipe", ["countdown", "countdown-steps"])
def test_every_attempt_fits_into_the_tokens_of_its_recipe(recipe: str) -> None:
    config = load(recipe)
    task = Countdown(**config.task.arguments)
    problems = [task[index] for index in range(5000)]
    assert config.model.path == "demo-countdown"
    assert max(len(str(problem.solution)) for problem in problems) + 1 <= config.rollout.max_new_tokens
    assert max(len(problem.prompt[0]["content"]) for problem in problems) <= config.rollout.max_prompt_tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operations": ""}, r"operations is ''; it has one or more of \+ - \* /, each once"),
        ({"operations": "+-x"}, "operations is '\\+-x'"),
        ({"operations": "++"}, "each once"),
        ({"numbers": 1}, "numbers is 1; it is at least 2"),
        ({"largest": 0}, "largest is 0; it is at least 1"),
        ({"largest_target": -1}, "largest_target is -1; it is at least 0"),
        ({"size": 0}, "size is 0"),
        ({"form": "prose"}, "form is 'prose'; it is one of expression, steps"),
        ({"split": "dev"}, "split is 'dev'; it is one of train, test"),
    ],
)
def test_an_option_out_of_range_is_an_error_that_names_it(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"countdown: .*{message}"):
        Countdown(**options)  # type: ignore[arg-type]


def test_a_task_without_problems_says_what_to_change() -> None:
    lonely = {split: Countdown(numbers=2, largest=1, operations="+", split=split) for split in ("train", "test")}  # type: ignore[arg-type]
    empty = "test" if split_of("1 1=2", 10) == "train" else "train"
    with pytest.raises(ValueError, match=f"has no {empty} problem in 1000 attempts: raise largest"):
        lonely[empty][0]
