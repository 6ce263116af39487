"""Finding the answer in a response: which box, line or number, and in time that grows with the length alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.grading import grade
from trimtab.grading.extract import answer_box, answer_line, last_box, last_number, tidy

MEGABYTE = 2**20
SHAPES: dict[str, Callable[[int], str]] = {
    "open braces": lambda n: "{" * n,
    "open boxes": lambda n: "\\boxed{" * (n // 7),
    "empty boxes": lambda n: "\\boxed{}" * (n // 8),
    "boxes in boxes": lambda n: "\\boxed{" * (n // 8) + "}" * (n // 8),
    "one long box": lambda n: "\\boxed{" + "{}" * (n // 2) + "}",
    "a box, then braces": lambda n: "\\boxed{42}" + "{}" * (n // 2),
    "digits": lambda n: "9" * n,
    "grouped digits": lambda n: "1,000" * (n // 5),
    "answers": lambda n: "answer " * (n // 7),
    "answer lines": lambda n: "Answer: 41\n" * (n // 11),
    "mixed answers": lambda n: "answer Answer ANSWER " * (n // 21),
    "a long answer line": lambda n: "Answer: " + "x" * n,
    "escapes": lambda n: "\\{\\}" * (n // 4),
    "dollars": lambda n: "\\boxed{" + "$" * n + "}",
    "spaces": lambda n: "\\boxed" + " " * n,
    "letters of another script": lambda n: "答" * (n // 3),
}
RULES = ("math", "strict-box", "dapo", "choice", "number", "boxed")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{42}", "42"),
        (r"\boxed{41} then \boxed{42}", "42"),
        (r"\boxed{41, \boxed{42}}", r"41, \boxed{42}"),
        (r"\boxed{\boxed{42}}", "42"),
        (r"\boxed{ \boxed{ \boxed{42} } }", "42"),
        (r"\boxed{\boxed{41} \boxed{42}}", r"\boxed{41} \boxed{42}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{42} and \boxed{", "42"),
        (r"\boxed{41} {\boxed{42}}", "42"),
        (r"\fbox{42}", None),
        ("42", None),
        ("", None),
    ],
)
def test_the_answers_box_is_the_last_that_is_in_no_other(text: str, found: str | None) -> None:
    assert answer_box(text) == found


@given(st.text("ab{}\\ ", max_size=30), st.text("xyz 12", max_size=10))
def test_a_last_box_by_itself_is_found_whatever_comes_before(before: str, content: str) -> None:
    assert last_box(f"{before}\n\\boxed{{{content}}}") == content


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Answer: 42", "42"),
        ("answer: 42\nthank you", "42"),
        ("Answer: 41\nAnswer: 42", "42"),
        ("Answer: 42. Answer: 41", "41"),
        ("**Answer:** 42", "42"),
        ("**Answer**: 42", "42"),
        ("Final ANSWER : 42", "42"),
        ("Answer: 42\nAnswer:", ""),
        ("The answer is 42", None),
        ("Answer: 42. The answer is clear.", "42. The answer is clear."),
        ("", None),
    ],
)
def test_the_answers_line_is_what_stands_behind_the_last_anchor(text: str, found: str | None) -> None:
    assert answer_line(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("first 3, then 5", "5"),
        ("1,234", "1,234"),
        ("1,42", "1,42"),
        ("a 1,23,4", "1,23,4"),
        ("41, 42", "42"),
        ("x=-7.", "-7"),
        ("3/4", "3/4"),
        ("none", None),
    ],
)
def test_the_last_number_is_taken_whole(text: str, found: str | None) -> None:
    assert last_number(text) == found


def test_dollars_part_what_they_stand_between() -> None:
    assert tidy("$x$ + $y$") == "x+y"
    assert tidy("4$2") == "4 2"


def seconds(work: Callable[[], object]) -> float:
    """The median of several measurements of processor time."""
    times = []
    for _ in range(5):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return median(times)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_a_megabyte_is_scanned_in_50_milliseconds(shape: str, rule: str) -> None:
    text = SHAPES[shape](MEGABYTE)
    assert seconds(lambda: grade(text, "12" if rule != "choice" else "A", rule)) < 0.05


@pytest.mark.parametrize("shape", SHAPES)
def test_time_grows_no_faster_than_the_length(shape: str) -> None:
    def all_rules(size: int) -> float:
        text = SHAPES[shape](size)
        return seconds(lambda: [grade(text, "A" if rule == "choice" else "12", rule) for rule in RULES])

    times = [all_rules(size * MEGABYTE // 4) for size in (1, 2, 4, 8)]
    # Eight times the length takes at most eight times as long, with room for a noisy clock.
    assert times[-1] < 16 * max(times[0], 0.002), times
