"""The rule `countdown`: what reaches the target is paid, and nothing else is, however it is written."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.grading.countdown import FOOLING, RIGHT, fraction_value, steps_value
from trimtab.grading import check_rule, grade
from trimtab.grading.puzzle_rules import MAX_CHARS, MAX_DEPTH

MILLION = 1_000_000
FORMS = ("expression", "steps")


def kind(response: str, answer: str) -> str:
    return grade(response, answer, "countdown").kind


@pytest.mark.parametrize(("answer", "response"), RIGHT)
def test_what_reaches_the_target_is_right(answer: str, response: str) -> None:
    assert kind(response, answer) == "correct"


@pytest.mark.parametrize(("why", "answer", "response"), FOOLING)
def test_what_only_looks_like_it_is_wrong(why: str, answer: str, response: str) -> None:
    assert kind(response, answer) == "wrong", why


def test_there_are_more_than_a_hundred_attempts_to_fool_it() -> None:
    assert len(set(FOOLING)) == len(FOOLING) > 100


@pytest.mark.parametrize("response", ["", " ", "\n\t ", "\u00a0"])
@pytest.mark.parametrize("form", FORMS)
def test_an_empty_response_is_no_answer(response: str, form: str) -> None:
    assert kind(response, f"3 7 5=16 +-* {form}") == "no_answer"


@pytest.mark.parametrize(
    "answer",
    ["", "16", "3 7 5", "3=3", "3 7 5=", "=16", "3 7 5=-16", "3 7 5=16 plus", "3,7,5=16", "03 7=10", "3 7=10 steps +"],
)
def test_a_ground_truth_that_is_none_is_a_crash_that_says_how_to_write_it(answer: str) -> None:
    verdict = grade("3*7-5", answer, "countdown")
    assert verdict.kind == "crashed"
    assert "is no countdown problem" in verdict.error and "`3 7 5=16 +-* steps`" in verdict.error


# Made of what expressions are made of, most of it nonsense; and of real expressions with one character changed.
signs = st.sampled_from(["3", "7", "5", "1", "0", "+", "-", "*", "/", "(", ")", " ", "=", ",", "21", "16"])
soup = st.lists(signs, min_size=1, max_size=12).map("".join)
given_numbers = st.lists(st.sampled_from([1, 3, 5, 7]), min_size=2, max_size=4)
operations = st.sampled_from(["+-*", "+-*/", "+", "-/"])


@st.composite
def expressions(draw: st.DrawFn, numbers: list[int]) -> str:
    texts = [str(number) for number in draw(st.permutations(numbers))]
    while len(texts) > 1:
        place = draw(st.integers(0, len(texts) - 2))
        joined = texts[place] + draw(st.sampled_from("+-*/")) + texts[place + 1]
        texts[place : place + 2] = [f"({joined})" if draw(st.booleans()) else joined]
    return texts[0]


@given(soup, given_numbers, operations, st.integers(0, 40))
def test_soup_of_signs_is_graded_as_pythons_parser_and_fractions_do(
    response: str, numbers: list[int], allowed: str, target: int
) -> None:
    question = " ".join(map(str, numbers))
    value = fraction_value(response, numbers, allowed) if response.strip() else None
    assert (kind(response, f"{question}={target} {allowed}") == "correct") == (value == target)


@given(st.data(), given_numbers, operations)
def test_an_expression_is_right_for_its_real_value_and_for_no_other(
    data: st.DataObject, numbers: list[int], allowed: str
) -> None:
    response, question = data.draw(expressions(numbers)), " ".join(map(str, numbers))
    value = fraction_value(response, numbers, allowed)
    if value is None or value < 0:
        assert all(kind(response, f"{question}={target} {allowed}") == "wrong" for target in range(50))
    else:
        assert kind(response, f"{question}={value} {allowed}") == "correct"
        assert kind(response, f"{question}={value + 1} {allowed}") == "wrong"


@given(st.data(), given_numbers)
def test_one_changed_character_is_graded_by_the_changed_value(data: st.DataObject, numbers: list[int]) -> None:
    response, question = data.draw(expressions(numbers)), " ".join(map(str, numbers))
    place = data.draw(st.integers(0, len(response) - 1))
    changed = response[:place] + data.draw(signs) + response[place + 1 :]
    value, target = fraction_value(changed, numbers, "+-*/"), data.draw(st.integers(0, 30))
    assert (kind(changed, f"{question}={target}") == "correct") == (value == target)


@given(st.lists(st.tuples(signs, signs, signs, signs), min_size=1, max_size=3), given_numbers, st.integers(0, 30))
def test_soup_of_steps_is_graded_as_fractions_do(
    parts: list[tuple[str, str, str, str]], numbers: list[int], target: int
) -> None:
    response = ",".join(f"{a}{sign}{b}={c}" for a, sign, b, c in parts).replace(" ", "")
    value = steps_value(response, numbers, "+-*/")
    question = " ".join(map(str, numbers))
    assert (kind(response, f"{question}={target} steps") == "correct") == (value == target)


@given(st.text(max_size=60), st.sampled_from(FORMS))
def test_no_text_raises(response: str, form: str) -> None:
    assert kind(response, f"3 7 5=16 +-* {form}") in {"wrong", "no_answer"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "unit", ["9", "(", ")", "()", "3*7-5", "3*7=21,", "-", " ", "3 ", ",", "=", "(3", "3)", "**9", "\x00", "３", "\n"]
)
def test_a_million_characters_are_wrong_at_once(unit: str, form: str) -> None:
    for frame in ("{}", "3*7-5{}", "{}3*7-5", "3*7-5 {} 3", "3*7=21,21-5=16{}3"):
        response = frame.format(unit * (MILLION // len(unit)))

        def seconds(response: str = response) -> float:
            start = time.process_time()
            right = response.strip() == "3*7-5" and form == "expression"  # blanks at the ends are ignored
            assert (kind(response, f"3 7 5=16 +-* {form}") == "correct") == right
            return time.process_time() - start

        assert min(seconds() for _ in range(3)) < 0.05


@pytest.mark.parametrize("unit", ["9", "(", "3*", "3 ", "(3+", " "])
def test_just_as_many_characters_as_are_looked_at_take_no_time(unit: str) -> None:
    for form in FORMS:
        response = (unit * MAX_CHARS)[: MAX_CHARS - 1] + "3"
        start = time.process_time()
        assert kind(response, f"3 7 5=16 +-* {form}") == "wrong"
        assert time.process_time() - start < 0.1


def test_parentheses_may_be_nested_so_deep_and_no_deeper() -> None:
    for depth, expected in ((MAX_DEPTH, "correct"), (MAX_DEPTH + 1, "wrong"), (400, "wrong")):
        assert kind("(" * depth + "3*7-5" + ")" * depth, "3 7 5=16") == expected


def test_huge_numbers_are_compared_without_an_error() -> None:
    """Python refuses to print integers of more than 4,300 digits: the limit on characters keeps products below."""
    nines = "9" * 330
    numbers = f"{nines} {nines} {nines}"
    product = int(nines) ** 3
    assert kind(f"{nines}*{nines}*{nines}", f"{numbers}={product}") == "correct"
    assert kind(f"{nines}*{nines}*{nines}", f"{numbers}=16") == "wrong"
    assert kind(f"{'9' * 900}*7=1,1-1=0", f"{'9' * 900} 7 5=0 steps") == "wrong"


def test_the_rule_can_be_named_in_a_recipe_and_on_the_command_line() -> None:
    check_rule("countdown")
    line = json.loads('{"response": "3*7-5", "answer": "3 7 5=16"}')
    verdict = grade(line["response"], line["answer"], "countdown")
    assert (verdict.kind, verdict.extracted) == ("correct", "3*7-5")
