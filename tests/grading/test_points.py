r"""Where two expressions are compared: at points that no answer can be made to fit, whole ones for what counts.

The wrong answers of this kind stand among the exploits.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from trimtab.grading import grade
from trimtab.grading.mathematics.nodes import Node
from trimtab.grading.mathematics.parser import parse_expression
from trimtab.grading.mathematics.points import FLOAT_BACKEND, GENERIC, Points
from trimtab.grading.mathematics.tokenizer import tokenize


def node(text: str) -> Node:
    return parse_expression(tokenize(text))


def kind(answer: str, truth: str) -> str:
    return grade(rf"\boxed{{{answer}}}", truth).kind


def values_of_x(truth: str, answer: str) -> list[float]:
    points = Points(node(truth), node(answer), f"{truth}\0{answer}")
    return [points.generic(number, FLOAT_BACKEND)("x") for number in range(GENERIC)]


@pytest.mark.parametrize("truth", ["x+1", r"\sin x", r"\sqrt{x^2+1}", r"\frac{1}{x+3}", r"|x|", "e^{x}"])
@pytest.mark.parametrize("factor", ["", "|x|", r"\cos x"])
def test_what_vanishes_at_the_points_of_another_answer_is_not_paid(truth: str, factor: str) -> None:
    zeros = "".join(f"(x-({value:.9f}))" for value in values_of_x(truth, truth))
    assert kind(f"{truth}+{zeros}{factor}", truth) == "wrong"


def test_any_change_of_an_answer_moves_its_points() -> None:
    one, other = values_of_x("x", "x+1-1"), values_of_x("x", "x+2-2")
    assert not set(one) & set(other)
    assert one == values_of_x("x", "x+1-1")


def test_the_points_are_the_same_in_every_process() -> None:
    code = "import test_points; print(test_points.values_of_x('x', '2x'))"
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=__file__.rpartition("/")[0], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == str(values_of_x("x", "2x")), shown.stderr


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        (r"\lceil n/2\rceil", r"\lfloor (n+1)/2\rfloor"),
        (r"\lceil \frac{n}{k} \rceil", r"\left\lfloor \frac{n+k-1}{k} \right\rfloor"),
        (r"\lceil \frac{n}{k} \rceil", r"\left\lfloor \frac{n-1}{k} \right\rfloor + 1"),
        (r"\lfloor n/2\rfloor", r"\frac{2n-1+(-1)^n}{4}"),
        (r"\frac{1-(-1)^n}{2}", r"n-2\lfloor n/2\rfloor"),
        (r"\lfloor n^2/4 \rfloor", r"\lfloor n/2\rfloor \lceil n/2\rceil"),
        (r"\lfloor \log_2 n\rfloor+1", r"\lceil \log_2 (n+1)\rceil"),
        (r"n \bmod 3", r"n - 3\lfloor n/3 \rfloor"),
        (r"\lfloor -x\rfloor", r"-\lceil x\rceil"),
        (r"\lfloor x+3\rfloor", r"\lfloor x\rfloor+3"),
        (r"\lfloor 2x\rfloor", r"\lfloor x\rfloor + \lfloor x+\frac12\rfloor"),
        (r"2^n n!", "(2n)!!"),
        (r"(2n-1)!!", r"\frac{(2n)!}{2^n n!}"),
        (r"(2n+1)!!\,(2n)!!", "(2n+1)!"),
        (r"\binom{n}{k}", r"\frac{n!}{k!(n-k)!}"),
        (r"\binom{n}{k}", r"\binom{n-1}{k-1}+\binom{n-1}{k}"),
        (r"\binom{n}{k}", r"\binom{n}{n-k}"),
        (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
        (r"\binom{2n}{n}", r"\frac{2^n (2n-1)!!}{n!}"),
        (r"(-1)^k\binom{n+k-1}{k}", r"\binom{-n}{k}"),
        (r"n\binom{n-1}{k-1}", r"k\binom{n}{k}"),
        (r"(n+1)!-n!", r"n\cdot n!"),
        (r"i^{2n}", "(-1)^n"),
    ],
)
def test_what_is_equal_for_whole_numbers_is_paid_where_the_truth_counts(truth: str, answer: str) -> None:
    assert (kind(answer, truth), kind(truth, answer)) == ("correct", "correct")


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        (r"\sqrt[3]{x}", "x^{1/3}"),
        (r"\sqrt[3]{x}", r"x^{\frac{1}{3}}"),
        (r"\sqrt[5]{2x+1}", "(2x+1)^{0.2}"),
        (r"\sqrt[3]{x^2}", "x^{2/3}"),
        (r"x^{2/3}", r"(\sqrt[3]{x})^2"),
        (r"x\sqrt[3]{x^2}", "x^{5/3}"),
        (r"\frac{1}{\sqrt[3]{x}}", "x^{-1/3}"),
        (r"\frac{1}{3\sqrt[3]{x}^2}", r"\frac{1}{3x^{2/3}}"),
        (r"-\sqrt[3]{x}", r"\sqrt[3]{-x}"),
        (r"\sqrt[3]{xy}", r"x^{1/3}y^{1/3}"),
        (r"\sqrt[7]{a^3 b}", r"a^{3/7}b^{1/7}"),
        (r"x\sqrt{x}", "x^{3/2}"),
        (r"\sqrt{x^3}", r"x\sqrt{x}"),
        (r"\sqrt{xy}", r"\sqrt{x}\sqrt{y}"),
        (r"\sqrt{\frac{a}{b}}", r"\frac{\sqrt{ab}}{b}"),
        (r"\sqrt[4]{x}", r"\sqrt{\sqrt{x}}"),
        (r"\sqrt[6]{x^2}", r"\sqrt[3]{|x|}"),
    ],
)
def test_radicals_and_powers_are_the_same(truth: str, answer: str) -> None:
    assert (kind(answer, truth), kind(truth, answer)) == ("correct", "correct")
