"""The rules: what is right, what is wrong, and what hostile output cannot do."""

from __future__ import annotations

import time
from fractions import Fraction
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trimtab.data import Problem, read_file
from trimtab.data.problems import user
from trimtab.grading import RULES, Verdict, grade, grade_many
from trimtab.grading.extract import last_box, last_number, parse_number
from trimtab.grading.verdicts import MAX_EXTRACTED_CHARS, VerdictKind

DATA = Path(__file__).parents[2].parent / "shared" / "data"
MEGABYTE = 2**20
CHEAP = tuple(rule for rule in RULES if ":" not in rule)
nested = st.recursive(st.text("ab,$ 1", max_size=5), lambda inner: st.lists(inner.map("{{{}}}".format)).map("".join))


@pytest.mark.parametrize(
    ("response", "rule", "answer", "kind"),
    [
        (" 46\n", "exact", "46", "correct"),
        ("46.0", "exact", "46", "wrong"),
        ("4 6", "exact", "46", "wrong"),
        (" \n", "exact", "46", "no_answer"),
        ("first 3, then 4.", "number", "4", "correct"),
        ("first 4, then 3.", "number", "4", "wrong"),
        ("It costs $1,234.50.", "number", "1234.5", "correct"),
        ("x = -5", "number", "-5", "correct"),
        ("x = −5", "number", "-5", "correct"),
        ("a loss of -$5", "number", "-5", "correct"),
        ("10-5", "number", "5", "correct"),
        ("10-5", "number", "-5", "wrong"),
        ("the ratio is 3/4", "number", "0.75", "correct"),
        ("the ratio is 3/4", "number", "4", "wrong"),
        ("1, 2, 3", "number", "3", "correct"),
        ("1,2,3", "number", "3", "wrong"),
        ("1,42", "number", "42", "wrong"),
        ("2e3", "number", "2000", "correct"),
        ("1/0", "number", "0", "wrong"),
        ("none", "number", "5", "no_answer"),
        ("5", "number", "five", "crashed"),
        (r"\boxed{1} and \boxed{2}", "boxed", "2", "correct"),
        (r"\boxed{1} and \boxed{2}", "boxed", "1", "wrong"),
        (r"\boxed{1} and \boxed{2", "boxed", "1", "correct"),
        (r"\boxed {7}", "boxed", "7", "correct"),
        (r"$\boxed{ $x + y$ }$", "boxed", "x+y", "correct"),
        (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", "boxed", r"\left(3,\frac{\pi}{2}\right)", "correct"),
        (r"\boxed{\{1\}}", "boxed", r"\{1\}", "correct"),
        (r"\boxed{\left\{ x \right.}", "boxed", r"\left\{x\right.", "correct"),
        (r"\boxed{1 2}", "boxed", "12", "wrong"),
        (r"\boxed{a b}", "boxed", "ab", "wrong"),
        (r"\boxed{0.5}", "boxed", r"\frac{1}{2}", "correct"),
        (r"\boxed{-\dfrac{1}{2}}", "boxed", "-1/2", "correct"),
        (r"\boxed{\frac{-1}{2}}", "boxed", "-0.50", "correct"),
        (r"\boxed{1\,000\,000}", "boxed", "1,000,000", "correct"),
        (r"\boxed{0.33}", "boxed", r"\frac{1}{3}", "wrong"),
        (r"\boxed{\frac{1}{0}}", "boxed", "0", "wrong"),
        (r"\boxed{204}", "boxed", r"\boxed{204}", "correct"),
        (r"\boxed{}", "boxed", "5", "no_answer"),
        ("5", "boxed", "5", "no_answer"),
        (r"\boxed 5", "boxed", "5", "no_answer"),
    ],
)
def test_a_response_gets_its_verdict(response: str, rule: str, answer: str, kind: str) -> None:
    assert grade(response, answer, rule).kind == kind


def test_a_verdict_says_what_was_found() -> None:
    assert grade(r"So \boxed{ 6 }.", "5", "boxed") == Verdict("wrong", "6")
    assert grade("So 1,000 or -7.", "5", "number") == Verdict("wrong", "-7")
    assert grade("", "5", "exact") == Verdict("no_answer", None)


# A backslash more would make it a line break and the word boxed.
@given(st.text().map(lambda text: text.rstrip("\\")), nested, st.text().filter(lambda text: "boxed" not in text))
def test_the_last_box_is_found_whatever_surrounds_it(before: str, content: str, after: str) -> None:
    assert last_box(f"{before}\\boxed{{{content}}}{after}") == content


@given(st.text("\\boxed{} 1", max_size=60) | st.lists(st.sampled_from(["\\boxed{", "}", "{", "\\{", "x"])).map("".join))
@example("\\boxed{\\boxed}{}")
def test_the_last_box_is_the_one_that_a_plain_search_finds(text: str) -> None:
    def by_search() -> str | None:
        for start in range(len(text), -1, -1):
            if not text.startswith("\\boxed", start):
                continue
            opening = start + len("\\boxed")
            while text[opening : opening + 1].isspace():
                opening += 1
            depth, at = 0, opening
            while at < len(text) and text[opening] == "{":
                if text[at : at + 2] in ("\\{", "\\}"):
                    at += 2
                    continue
                depth += {"{": 1, "}": -1}.get(text[at], 0)
                if depth == 0:
                    return text[opening + 1 : at]
                at += 1
        return None

    assert last_box(text) == by_search()


@given(st.fractions())
def test_a_fraction_is_read_however_it_is_written(number: Fraction) -> None:
    above, below = number.numerator, number.denominator
    assert parse_number(f"{above}/{below}") == parse_number(f"\\frac{{{above}}}{{{below}}}") == number
    sign = "-" if above < 0 else ""
    assert parse_number(f" ${sign}\\dfrac{{{abs(above):,}}}{{{below:,}}}$ ") == number


@given(st.decimals(allow_nan=False, allow_infinity=False, places=4))
def test_the_last_number_is_read_from_a_sentence(number: object) -> None:
    found = last_number(f"first 7, then the answer is {number}.")
    assert found is not None
    assert parse_number(found) == Fraction(str(number))


@given(st.text(), st.text(), st.sampled_from(CHEAP))
def test_no_text_makes_a_rule_raise(response: str, answer: str, rule: str) -> None:
    assert grade(response, answer, rule).kind in get_args(VerdictKind)


@given(st.text("0123456789.,/-+eE\\frac{}$ boxed()", max_size=80), st.sampled_from(CHEAP))
def test_nothing_near_a_number_makes_a_rule_raise(response: str, rule: str) -> None:
    boxed = f"\\boxed{{{response}}}"
    assert {grade(text, response, rule).kind for text in (response, boxed)} <= set(get_args(VerdictKind))


@pytest.mark.parametrize(
    "number", ["9" * MEGABYTE, "1e999999999", "-1e-999999999", "1" + ",000" * 1000, "9/" * 9999 + "7"]
)
@pytest.mark.parametrize("rule", ["number", "boxed"])
def test_a_huge_number_is_wrong_and_not_kept(number: str, rule: str) -> None:
    verdict = grade(f"\\boxed{{{number}}}", "9", rule)
    assert verdict.kind == "wrong"
    assert len(verdict.extracted or "") <= MAX_EXTRACTED_CHARS


@pytest.mark.parametrize("rule", CHEAP)
@pytest.mark.parametrize(
    "unit",
    [
        "{",
        "}",
        "{}",
        "\\boxed{",
        "\\boxed{}",
        "\\boxed{}}{",
        "\\boxed",
        "\\boxed ",
        "\\{",
        "9",
        "1,",
        "1,000",
        "-",
        "1e",
        " ",
        "é",
    ],
)
@pytest.mark.parametrize("frame", ["{}", "\\boxed{{{}}}", "\\boxed{{5}}{}", "\\boxed{{{}"])
def test_a_megabyte_is_graded_at_once(unit: str, frame: str, rule: str) -> None:
    response = frame.format(unit * (MEGABYTE // len(unit.encode())))

    def seconds() -> float:
        start = time.process_time()
        grade(response, "12", rule)
        return time.process_time() - start

    assert min(seconds() for _ in range(3)) < 0.05


def test_an_unknown_rule_lists_the_rules() -> None:
    with pytest.raises(
        ValueError,
        match="no rule 'bocksed'; the rules are math, strict-box, dapo, choice, number, boxed, exact, countdown, ",
    ):
        grade("5", "5", "bocksed")


def test_many_are_graded_each_by_its_own_rule() -> None:
    problems = [Problem(user("1+1?"), "2", rule, "sums") for rule in ("exact", "boxed")]
    verdicts = grade_many(("2", problem) for problem in problems)
    assert [verdict.kind for verdict in verdicts] == ["correct", "no_answer"]


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared data is not here")
@pytest.mark.parametrize(
    ("name", "numeric"),
    [("aime24", 30), ("aime25", 30), ("amc23", 40), ("math500", 371), ("minerva", 190), ("olympiadbench", 454)],
)
def test_the_benchmarks_own_answers_are_correct_in_a_box(name: str, numeric: int) -> None:
    pytest.importorskip("pyarrow")
    problems = read_file(str(DATA / f"{name}.parquet")).problems
    answers = [last_box(problem.answer) or problem.answer for problem in problems]
    verdicts = [grade(f"So \\boxed{{{a}}}.", p.answer, "boxed") for a, p in zip(answers, problems, strict=True)]
    assert {verdict.kind for verdict in verdicts} == {"correct"}
    assert sum(parse_number(answer) is not None for answer in answers) == numeric  # the others compare as text alone
