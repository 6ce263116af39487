"""Generated arithmetic: right, the same everywhere, and never the same in training and testing."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.data import Arithmetic, Problem
from trimtab.data.arithmetic import Family
from trimtab.grading import grade

FAMILIES = get_args(Family)
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}

tasks = st.builds(
    Arithmetic,
    family=st.sampled_from(FAMILIES),
    digits=st.integers(1, 6),
    terms=st.integers(2, 6),
    min_terms=st.sampled_from([None, 2]),
    form=st.sampled_from(["bare", "instruct"]),
    seed=st.integers(0, 2**40),
    split=st.sampled_from(["train", "test"]),
)
numbers = st.integers(0, 9_999)


def text(problem: Problem) -> str:
    return problem.prompt[0]["content"]


def left_to_right(question: str) -> int:
    total, *rest = re.findall(r"[-+*]?\d+", question)
    result = int(total)
    for term in rest:
        result = OPERATIONS[term[0]](result, int(term[1:]))
    return result


def told(story: str) -> int:
    """The story's result, by a reader of its own."""
    start, *_ = re.findall(r" has (\d+) ", story)
    got = sum(map(int, re.findall(r" gets (\d+) more", story)))
    gave = sum(map(int, re.findall(r" gives (\d+) away", story)))
    bought = sum(int(boxes) * int(each) for boxes, each in re.findall(r" buys (\d+) boxes of (\d+) ", story))
    return int(start) + got - gave + bought


@given(tasks, numbers)
def test_the_answer_is_the_value_of_the_question(task: Arithmetic, number: int) -> None:
    problem = task[number]
    expected = told(text(problem)) if task.family == "words" else left_to_right(text(problem))
    assert problem.answer == str(expected)


@given(tasks, numbers)
def test_the_worked_solution_is_graded_correct(task: Arithmetic, number: int) -> None:
    problem = task[number]
    assert problem.solution is not None
    assert grade(problem.solution, problem.answer, problem.rule).kind == "correct"


@given(tasks, numbers)
def test_every_line_of_the_working_is_true_and_the_last_one_is_the_answer(task: Arithmetic, number: int) -> None:
    problem = replace(task, form="instruct")[number]
    assert problem.solution is not None
    lines = re.findall(r"(\d+) ([-+*]) (\d+) = (-?\d+)\.", problem.solution)
    assert lines
    assert all(OPERATIONS[sign](int(a), int(b)) == int(result) for a, sign, b, result in lines)
    assert lines[-1][-1] == problem.answer


@given(tasks, numbers)
def test_numbers_have_at_most_so_many_digits_and_nothing_is_negative(task: Arithmetic, number: int) -> None:
    if task.family != "words":  # what is given away is split of a sum, and boxes are small
        question = text(replace(task, form="bare")[number])
        assert max(len(found) for found in re.findall(r"\d+", question)) <= task.digits
    assert int(task[number].answer) >= 0


@pytest.mark.parametrize("form", ["bare", "instruct"])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_and_testing_never_share_a_text_even_when_problems_are_few(family: Family, form: str) -> None:
    parts = {}
    for split in ("train", "test"):
        tasks = [Arithmetic(family, 1, 2, form=form, size=300, seed=seed, split=split) for seed in (0, 1)]  # type: ignore[arg-type]
        parts[split] = {text(task[n]) for task in tasks for n in range(300)}
    assert parts["train"] and parts["test"]
    assert not parts["train"] & parts["test"]


def test_a_question_is_in_the_same_part_in_both_forms_and_all_families() -> None:
    tested = {text(Arithmetic("addition", 1, size=300, split="test")[n]) for n in range(300)}
    chained = {text(Arithmetic("chain", 1, 2, size=2000)[n]) for n in range(2000)}
    assert any("+" in question for question in chained)
    assert not tested & chained


def test_an_epoch_is_varied() -> None:
    task = Arithmetic("addition", 3)
    assert len({text(task[n]) for n in range(1000)}) > 990
    assert {text(task[n]) for n in range(100)}.isdisjoint(text(replace(task, seed=1)[n]) for n in range(100))


@pytest.mark.parametrize("family", ["chain", "words"])
def test_with_min_terms_problems_of_all_lengths_come_about_equally_often(family: Family) -> None:
    task = Arithmetic(family, digits=2, terms=4, min_terms=2, size=3000)
    # A chain has a number per term, a story a sentence, and a last one with the question.
    pattern = r"\d+" if family == "chain" else r"[.?]"
    counts = [len(re.findall(pattern, text(task[n]))) - (family == "words") for n in range(3000)]
    shares = [counts.count(n) / len(counts) for n in (2, 3, 4)]
    assert set(counts) == {2, 3, 4} and all(abs(share - 1 / 3) < 0.05 for share in shares)
    assert task.name.endswith(f"{family}-2x2-4")


def test_families_without_terms_do_not_change_with_min_terms() -> None:
    plain, mixed = (Arithmetic("addition", min_terms=fewest) for fewest in (None, 2))
    assert [plain[n] for n in range(50)] == [mixed[n] for n in range(50)]


def test_bare_is_the_formula_and_the_number() -> None:
    problem = Arithmetic("multiplication", 2, form="bare")[0]
    assert re.fullmatch(r"\d+\*\d=", text(problem))
    assert problem.solution == problem.answer
    assert problem.rule == "exact"


def test_a_known_problem_stays_what_it_is() -> None:
    problem = Arithmetic("addition", 3)[5]
    assert (text(problem), problem.answer) == ("284+169=", "453")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "division"}, "family is 'division'; it is one of addition, subtraction"),
        ({"form": "poem"}, "form is 'poem'"),
        ({"split": "dev"}, "split is 'dev'"),
        ({"digits": 0}, "digits is 0; it is at least 1"),
        ({"terms": 1}, "terms is 1; it is at least 2"),
        ({"size": 0}, "size is 0; it is at least 1"),
        ({"terms": 3, "min_terms": 4}, "min_terms is 4; it is from 2 to terms, which is 3"),
        ({"min_terms": 1}, "min_terms is 1; it is from 2 to terms"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Arithmetic(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [-1, 10])
def test_there_is_no_problem_outside_the_epoch(number: int) -> None:
    with pytest.raises(IndexError, match="problems 0 to 9"):
        Arithmetic(size=10)[number]


def test_iterating_a_task_ends() -> None:
    assert len(list(Arithmetic(size=7))) == 7  # type: ignore[call-overload]
