"""The rule for mathematics: how an answer is read, what is equal, and what is decided without a worker."""

from __future__ import annotations

import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.data import Problem
from trimtab.data.problems import user
from trimtab.grading import grade, grade_many
from trimtab.grading.mathematics.answer import parse_answer
from trimtab.grading.mathematics.math_rule import check_text_cost, estimate_bits, grade_extracted
from trimtab.grading.mathematics.nodes import Node, ParseError, TooCostlyError, literal_value
from trimtab.grading.mathematics.normal_form import NormalForm, NormalFormBuilder, NormalizeError, factorize
from trimtab.grading.mathematics.parser import parse_expression
from trimtab.grading.mathematics.points import Points, numerically_different
from trimtab.grading.mathematics.tokenizer import normalize_latex, tokenize
from trimtab.grading.mathematics.units import compatible_units, parse_unit
from trimtab.grading.verdicts import VERDICT_KINDS, Verdict


def node(text: str) -> Node:
    return parse_expression(tokenize(text))


def normalized(text: str) -> NormalForm:
    return NormalFormBuilder().normalize(node(text))


def at_once(found: str, truth: str) -> str:
    """The verdict's kind, where no worker was needed for it."""
    verdict = grade_extracted(found, truth)
    assert isinstance(verdict, Verdict), "this was to be decided at once"
    return verdict.kind


def boxed(found: str, truth: str) -> str:
    return grade(f"So \\boxed{{{found}}}.", truth).kind


@pytest.mark.parametrize(
    ("found", "truth"),
    [
        ("0.5", r"\frac{1}{2}"),
        (r"\tfrac12", "0.5"),
        ("1,234,567", "1234567"),
        (r"12{,}345", "12345"),
        (r"1\frac{4}{5}", r"\frac95"),
        ("1 4/5", "1.8"),
        (r"-2\frac{1}{2}", "-2.5"),
        (r"0.1\overline{6}", r"\frac{1}{6}"),
        (r"4.5 \times 10^{33}", "4.5e33"),
        ("1e-5", "0.00001"),
        ("-1/3", "-1./3"),
        (r"\sqrt{117}", r"3\sqrt{13}"),
        (r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt{3}}{3}"),
        ("-5i + 6", "6 - 5i"),
        (r"2(k+1)", "2k+2"),
        (r"(a+5)(b+2)", "ab+2a+5b+10"),
        (r"\frac{-1}{\omega^2-4}", r"\frac{1}{4-\omega^{2}}"),
        (r"2^{10}", "1024"),
        (r"\ln 8", r"3\ln 2"),
        (r"4 \cdot 2^n", "2^{n+2}"),
        (r"\sin(81x^2)", r"\sin((9x)^2)"),
        (r"\sqrt{\cos(y^2) + x - x}", r"\sqrt{\cos(y \cdot y)}"),
        (r"(x-1)^{12}", r"((x-1)^3)^4"),
        (r"\frac{\ln 7}{\ln 2}", r"\log_{2} 7"),
        (r"5!", "120"),
        (r"\binom{10}{3}", "120"),
        (r"\lfloor 7/2 \rfloor", "3"),
        (r"1 - \sqrt{19}, 1 + \sqrt{19}", r"1 \pm \sqrt{19}"),
        (r"x = 3 \text{ or } x = -2", "-2, 3"),
        ("-2 and 1", "1,-2"),
        (r"\{2, 1\}", r"\{1, 2\}"),
        (r"\{1, 1, 2\}", r"\{1, 2\}"),
        (r"[-2, 7]", r"x \in [-2,7]"),
        (r"-2 \le x \le 7", r"[-2,7]"),
        (r"[2, \infty)", r"k \geqslant 2"),
        (r"(3, \infty) \cup (-\infty, 2)", r"(-\infty, 2) \cup (3, \infty)"),
        (r"\begin{bmatrix} -1/3 \\ 2/3 \end{bmatrix}", r"\begin{pmatrix} -\frac{1}{3} \\ \frac{2}{3} \end{pmatrix}"),
        ("2x - y + 3 = 0", "y = 2x + 3"),
        ("-5x + 7y - 11z - 4 = 0", "5x - 7y + 11z + 4 = 0"),
        ("2x + 3", "y = 2x + 3"),
        ("f(x) = x + 1", "x+1"),
        (r"\angle ABC = 30^\circ", "30"),
        (r"90", r"90^\circ"),
        (r"15\text{ cm}^2", "15"),
        (r"15\text{ square centimeters}", r"15\mbox{ cm}^2"),
        (r"32348", r"\$32,\!348"),
        (r"5.4 \text{ cents}", "5.4"),
        (r"62.5\%", "62.5%"),
        ("62.5", "62.5%"),
        (r"\text{(C)}", "C"),
        ("C", r"\text{(C)}"),
        (r"\textbf{evelyn}", r"\text{Evelyn}"),
        (r"\varnothing", r"\emptyset"),
        (r"\{\}", r"\text{no solution}"),
        ("52_{8}", "52_8"),
        (r"52_{\text{eight}}", "52_8"),
        ("3:30", r"3:30"),
        (r"3.142", "3.142"),
        (r"\pi", "3.142"),
        (r"\frac{1}{3}", "0.3333"),
        (r"\arcsin(10/13)", "np.arcsin(10/13)"),
        (r"\tan^{-1} 2", r"\arctan(2)"),
        (r"\frac{dx}{dt} = kx - a", r"\frac{d x}{d t}=k x-a"),
    ],
)
def test_what_is_equal_is_right_at_once(found: str, truth: str) -> None:
    assert at_once(found, truth) == "correct"


@pytest.mark.parametrize(
    ("found", "truth", "kind"),
    [
        ("41", "42", "wrong"),
        ("41 = 42", "42", "ambiguous"),
        ("42 = 42", "42", "ambiguous"),
        ("41, 42", "42", "ambiguous"),
        (r"41 \text{ or } 42", "42", "ambiguous"),
        (r"42 \pm 1", "42", "ambiguous"),
        (r"\{42\}", "42", "ambiguous"),
        ("x = y = 42", "42", "ambiguous"),
        ("y = 5", "x = 5", "wrong"),
        ("40 + 2", "42", "wrong"),
        (r"6 \cdot 7", "42", "wrong"),
        (r"2^5 + 10", "42", "wrong"),
        ("0.333", r"\frac{1}{3}", "wrong"),
        ("12.46", "12.5", "wrong"),
        (r"\sqrt{156}", "12.5", "wrong"),
        ("3.14159", r"\pi", "wrong"),
        ("(2, 1)", "(1, 2)", "wrong"),
        ("[1, 2]", "(1, 2)", "wrong"),
        ("1, 1, 2", "1, 2", "wrong"),
        (r"50\%", "0.5", "wrong"),
        (r"50\%", "50", "wrong"),
        ("0.5", r"50\%", "wrong"),
        (r"15\text{ m}^2", r"15\text{ cm}^2", "wrong"),
        (r"42\text{ hundred}", "42", "wrong"),
        (r"\frac{\pi}{2}^\circ", r"\frac{\pi}{2}", "wrong"),
        ("42", "52_8", "wrong"),
        ("52", "52_8", "wrong"),
        ("52_9", "52_8", "wrong"),
        (r"10^{400}", r"\infty", "wrong"),
        (r"0 \cdot \infty", "0", "wrong"),
        (r"\frac{42}{0}", "42", "wrong"),
        ("|x|", "x", "wrong"),
        (r"\frac{dy}{dt}", r"\frac{dx}{dt}", "wrong"),
        ("0", "I(0)", "wrong"),
        ("the answer is 42, I think", "42", "ambiguous"),
        (r"\$", "42", "wrong"),
    ],
)
def test_unequal_answers_are_decided_without_a_worker(found: str, truth: str, kind: str) -> None:
    assert at_once(found, truth) == kind


@pytest.mark.parametrize(
    ("found", "truth"),
    [
        (r"\frac{1}{\sqrt{2}-1}", r"\sqrt{2}+1"),
        (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}"),
        (r"2\sin x \cos x", r"\sin 2x"),
        (r"\sqrt{\cos(1-x)}", r"\sqrt{\cos(x-1)}"),
        (r"\frac{x^2-1}{x-1}", "x+1"),
        (r"(1, 2\sin x\cos x)", r"(1, \sin 2x)"),
        (r"\cos 36^\circ", r"\frac{1+\sqrt{5}}{4}"),
    ],
)
def test_what_algebra_cannot_tell_a_worker_can(found: str, truth: str) -> None:
    assert not isinstance(grade_extracted(found, truth), Verdict)
    assert boxed(found, truth) == "correct"


@pytest.mark.parametrize(
    ("found", "truth"),
    [(r"\tanh(50)", "1"), (r"1 + e^{-99}", "1"), (r"e^{-1000}", "0"), (r"e^{\pi\sqrt{163}}", "262537412640768744")],
)
def test_a_worker_tells_the_nearly_equal_apart(found: str, truth: str) -> None:
    assert not isinstance(grade_extracted(found, truth), Verdict)
    assert boxed(found, truth) == "wrong"


@pytest.mark.parametrize(
    "found",
    [
        r"x^{9^{9^{9}}}",
        r"x + 10^{-9^{9^{9}}}",
        r"(x+1)^{100000}",
        r"x + \binom{999999}{7} - \binom{999999}{8}",
        r"x \cdot 1" + "0" * 500,
        "(" * 50 + "x" + ")" * 50,
        "x+" * 1500 + "x",
        r"\sqrt" * 40 + "x",
        "-" * 60 + "x",
    ],
)
def test_what_asks_for_endless_work_is_turned_away_before_any(found: str) -> None:
    start = time.process_time()
    kind = at_once(found, "x")
    assert kind in ("too_costly", "wrong", "ambiguous")
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    "text",
    [
        r"\hat{x}^{9^{9^9}}",
        r"\vec{x}^{99999}",
        r"\prod_{i=1}^{99999999} i \vec{x}!",
        r"\sum_{a}\sum_{b}\sum_{c}\sum_{d} 1",
        "9**9**9 \\vec{x}",
        r"\vec{x}" * 200,
        r"\vec{x}" + "{" * 30,
    ],
)
def test_the_same_holds_for_what_only_another_grammar_reads(text: str) -> None:
    with pytest.raises(TooCostlyError):
        check_text_cost(text)


@pytest.mark.parametrize(
    "text", [r"\hat{x}+1", r"\vec{v} = \frac{d^2 x}{dt^2}", r"\sum_{i=1}^{n} i^2", r"\bar{x}^{10}"]
)
def test_honest_notation_is_not_turned_away(text: str) -> None:
    check_text_cost(text)


def test_the_costs_of_honest_answers_are_small() -> None:
    assert estimate_bits(node(r"2^{1009}")) < 2_100
    assert estimate_bits(node(r"\frac{100!}{2^{50}}")) < 2_000
    assert estimate_bits(node(r"\frac{n(n+1)(2n+1)}{6}")) < 30


@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
def test_two_fractions_are_the_same_answer_exactly_where_they_are_equal(a: Fraction, b: Fraction) -> None:
    def text(x: Fraction) -> str:
        return f"\\frac{{{x.numerator}}}{{{x.denominator}}}"

    assert at_once(text(a), text(a)) == "correct"
    assert (at_once(text(a), text(b)) == "correct") == (a == b)


@given(st.lists(st.integers(-9, 9), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_a_polynomial_is_the_same_in_any_order_and_no_other(coefficients: list[int], rng: object) -> None:
    def text(numbers: list[int], order: list[int]) -> str:
        return " + ".join(f"({numbers[k]}) x^{{{k}}}" for k in order)

    order = list(range(len(coefficients)))
    shuffled = sorted(order, key=lambda k: (k * 7) % 5)
    other = [coefficients[0] + 1, *coefficients[1:]]
    normal_form = normalized(text(coefficients, order))
    assert normal_form == normalized(text(coefficients, shuffled))
    assert normal_form != normalized(text(other, order))
    pair = node(text(coefficients, order)), node(text(other, order))
    assert numerically_different(Points(*pair, "a pair"), *pair)


@given(st.text("0123456789+-*/^(){}[]|!.,=<>\\ xyiefracsqrtpm%$&_~'", max_size=60))
def test_nothing_that_looks_like_mathematics_makes_the_rule_fail(found: str) -> None:
    for truth in ("42", "x+1", "(1,2)", "y = 2x", r"\sqrt{2}"):
        verdict = grade_extracted(found, truth)
        assert not isinstance(verdict, Verdict) or (verdict.kind in VERDICT_KINDS and verdict.kind != "crashed")


@given(st.text(max_size=80))
def test_no_text_at_all_makes_the_rule_fail(found: str) -> None:
    verdict = grade_extracted(found, "42")
    assert not isinstance(verdict, Verdict) or verdict.kind != "crashed"


@given(st.integers(1, 10**9))
def test_factors_multiply_to_the_number(n: int) -> None:
    product = 1
    for prime, power in factorize(n).items():
        product *= prime**power
    assert product == n


def test_algebra_gives_up_where_it_would_take_long() -> None:
    for text in (r"(x+y+z)^{50}", r"(a+b)^{20}(c+d)^{20}(e+f)^{20}", r"3^{99999}"):
        start = time.process_time()
        with pytest.raises(NormalizeError):
            normalized(text)
        assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    "text", ["4 2", "42'", "x^2^2", "1/2x", "2 x 3", r"\frac{1}", "42?", r"\sin", "[", "+", "a_{b^c}"]
)
def test_what_can_be_read_in_two_ways_is_not_read(text: str) -> None:
    with pytest.raises(ParseError):
        node(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("-3", -3),
        (r"\frac{2}{-3}", Fraction(-2, 3)),
        (r"3 \times 10^{8}", None),
        (r"40+2", None),
        ("x", None),
    ],
)
def test_a_literal_number_is_not_an_unevaluated_expression(text: str, value: Fraction | None) -> None:
    assert literal_value(node(text)) == value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\dfrac{\pi}{2})"),
        (r"11,\! 111,\! 100", "11111100"),
        (r"\text{ east }", r"\mbox{east}"),
        (r"x\,+\,y", "x+y"),
        ("−5", "-5"),
        ("90°", r"90^\circ"),
    ],
)
def test_one_spelling(one: str, other: str) -> None:
    assert normalize_latex(one) == normalize_latex(other)


@pytest.mark.parametrize("text", ["4 2", "4$2", r"4\quad2", r"4\left.2", r"4\hspace{1cm}2", "4{}2", r"4\phantom{1}2"])
def test_digits_that_stand_apart_stay_apart(text: str) -> None:
    assert normalize_latex(text) != "42"
    assert at_once(text, "42") != "correct"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("42", "value"),
        ("1, 2", "list"),
        (r"\{1\}", "set"),
        ("(1, 2)", "tuple"),
        ("[0, 1)", "tuple"),
        (r"(0,1) \cup \{2\}", "union"),
        (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", "matrix"),
        ("x = 5", "equation"),
        ("1 < x", "inequality"),
        ("1 = 2 = 3", "chain"),
        (r"\text{east}", "text"),
        ("52_8", "base"),
        (r"\vec{v}", "opaque"),
        (" ", "none"),
    ],
)
def test_an_answer_has_one_shape(text: str, kind: str) -> None:
    assert parse_answer(text).kind == kind


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("cm^2", "cm^2"),
        ("square centimeters", "cm^2"),
        ("meters per second", "m s^-1"),
        ("km/h", "h^-1 km"),
        ("apples", "#apple"),
        ("distinct integers", "#distinct number"),
        ("daps", "?dap"),
        ("cents per dollar", "?cent per dollar"),
        ("hundred", None),
        ("is wrong", None),
        ("(42)", None),
        ("", None),
    ],
)
def test_units_have_one_name(words: str, name: str | None) -> None:
    assert parse_unit(words) == name


def test_a_unit_may_be_missing_but_not_another() -> None:
    assert compatible_units("cm", None)
    assert compatible_units(None, "cm")
    assert compatible_units("#right triangle", "#triangle")
    assert not compatible_units("#apple", "#orange")
    assert not compatible_units("cm", "m")


def test_an_unknown_word_is_the_truths_or_refused() -> None:
    assert compatible_units("?dap", "?dap")
    assert compatible_units("?dap", None)
    assert not compatible_units(None, "?dap")


def test_equal_responses_are_worked_on_once(tmp_path: Path) -> None:
    """The grading function notes every call in a file."""
    log = tmp_path / "calls"
    log.touch()
    rule = "python:helpers.grading.python_rules:logs_its_call"
    problem = Problem(user("?"), "42", rule, "test", extra={"log": str(log)})
    verdicts = grade_many([("it is 42", problem)] * 5 + [("it is 41", problem)])
    assert [verdict.kind for verdict in verdicts] == ["correct"] * 5 + ["wrong"]
    assert sorted(log.read_text().splitlines()) == ["it is 41", "it is 42"]


def test_the_answer_to_a_box_in_a_box_is_the_outer_one() -> None:
    assert boxed(r"\boxed{42}", "42") == "correct"
    assert boxed(r"41, \boxed{42}", "42") == "ambiguous"
    assert grade(r"\boxed{41} \boxed{42}", "42").kind == "correct"


def test_an_empty_box_is_no_answer() -> None:
    assert {boxed(text, "42") for text in ("", " ", r"\,", "$$", "{}", r"\text{}")} <= {"no_answer", "wrong"}


def test_a_power_of_ten_is_the_number_with_as_many_zeros() -> None:
    for zeros in (20, 300):
        response = rf"\boxed{{10^{{{zeros}}}}}"
        assert grade(response, "1" + "0" * zeros).kind == "correct"
        assert grade(response, "1" + "0" * (zeros - 1)).kind == "wrong"
        assert grade(response, "1" + "0" * (zeros - 1) + "1").kind == "wrong"
