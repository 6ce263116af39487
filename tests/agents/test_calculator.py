"""The calculator: exact, and bounded whatever a model asks for."""

from __future__ import annotations

import contextlib
import operator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.agents.calculator import calculator, written

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2*3", "7"),
        ("-2**2", "-4"),
        ("2**-2", "0.25"),
        ("2**3**2", "512"),
        ("0.1 + 0.2", "0.3"),
        ("(1 + 2) * 3 / 7", "9/7 (about 1.285714286)"),
        ("10 // 3 + 10 % 4", "5"),
        ("-7 // 2", "-4"),
        ("12 × 3 − 4 ÷ 8", "35.5"),
        ("1.5*.5", "0.75"),
        ("-1/8", "-0.125"),
        ("(-1)**-99999999999999999999", "-1"),
        ("0**0", "1"),
        ("12345678901234567890*98765432109876543210", "1219326311370217952237463801111263526900"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("9**9**9", "too large"),
        ("9**9**9**9**9", "too large"),
        ("*".join(["9**2000"] * 9), "too large"),
        ("1/0", "division by zero"),
        ("0**-1", "division by zero"),
        ("2**0.5", "whole numbers"),
        ("__import__('os')", "cannot read"),
        ("1e400", "cannot read"),
        ("2(3)", "unexpected '\\('"),
        ("(1", "parenthesis is missing"),
        ("7*", "ends too early"),
        ("*7", "a number is missing"),
        ("", "ends too early"),
        ("(" * 100 + "1" + ")" * 100, "nested"),
        ("-" * 100 + "1", "nested"),
        ("1" * 1001, "characters"),
    ],
)
def test_what_it_refuses(expression: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        calculator(expression)


def _joined(parts: tuple[tuple[str, Fraction], str, tuple[str, Fraction]]) -> tuple[str, Fraction]:
    (left, a), sign, (right, b) = parts
    if sign == "/" and b == 0:
        sign = "+"
    return f"({left} {sign} {right})", Fraction(OPERATORS[sign](a, b))


leaves = st.integers(0, 999).map(lambda number: (str(number), Fraction(number)))
trees = st.recursive(
    leaves, lambda inner: st.tuples(inner, st.sampled_from(sorted(OPERATORS)), inner).map(_joined), max_leaves=8
)


@given(trees)
def test_it_calculates_as_fractions_do(tree: tuple[str, Fraction]) -> None:
    expression, value = tree
    assert calculator(expression) == written(value)
    if "about" not in written(value):
        assert Fraction(written(value)) == value


@given(st.text("0123456789.+-*/%^() e", max_size=60))
def test_any_text_gives_a_number_or_a_reason(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert len(calculator(text)) < 6_000
