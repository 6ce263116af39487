"""The comparisons that need mpmath or math-verify (sympy). Runs in a worker; a trainer never loads either.

Expressions that we can parse are compared at points, with so many digits that only equal ones agree. Other notation
(derivatives, sums) is left to math-verify.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

from trimtab.rewards.mathematics.answer import parse_answer
from trimtab.rewards.mathematics.compare import compare
from trimtab.rewards.mathematics.cost import estimate_bits
from trimtab.rewards.mathematics.nodes import Node, ParsedAnswer
from trimtab.rewards.mathematics.normal_form import NormalizeError
from trimtab.rewards.mathematics.numeric import evaluate

DIGITS = 50  # of the first pass; the second has more than the smallest number in the expressions needs
POINTS = (
    (0.7137, 1.3771, 0.5393),
    (-0.8353, -1.1917, -0.4751),
    (1.6139, -0.6733, 2.0357),
    (-2341.71, -3813.37, -5091.17),
    (2719.13, 1931.71, 4127.93),
)


def warm_up() -> None:
    """Load mpmath and math-verify once, before worker processes are forked from this one."""
    import math_verify  # noqa: F401
    import mpmath  # noqa: F401

    logging.disable(logging.CRITICAL)
    # ANTLR fills its prediction tables by use; these texts fill most of them, and forked workers share them.
    texts = r"\frac{x}{2}+x^{2}_1", r"\sum_{i=1}^{n} i", r"\int_0^1 x\,dx", "(1, 2]", r"\{1,2\} \cup [3,4)", "y=2x"
    for text in texts:
        math_verify_equal(text, text.replace("2", "3"))


def grade_pair(extracted: str, truth: str) -> str:
    """Return the kind of verdict on an answer that the caller's exact algebra could not decide."""
    return compare(parse_answer(truth), parse_answer(extracted), equal)


def equal(truth: ParsedAnswer, extracted: ParsedAnswer) -> bool:
    """Return whether two answers are equal: values numerically, everything else by math-verify."""
    if truth.node is not None and extracted.node is not None:
        return equal_at_points(truth.node, extracted.node)
    return math_verify_equal(truth.text, extracted.text)


def equal_at_points(a: Node, b: Node) -> bool:
    """Return whether two expressions have the same value at every point, to many digits."""
    import mpmath

    for digits in (DIGITS, 4 * DIGITS + int(max(estimate_bits(a), estimate_bits(b)) / 2)):
        with mpmath.workdps(digits):
            backend = _mpmath_backend(mpmath)  # per precision: mpmath's constants are rounded when they are read
            for point in POINTS:
                try:
                    x, y = evaluate(a, point, backend), evaluate(b, point, backend)
                except (ArithmeticError, ValueError, NormalizeError):  # a pole, or a function that is not known
                    return False
                size = max(abs(x), abs(y), 1)
                if not mpmath.isfinite(size) or not abs(x - y) <= size * mpmath.mpf(10) ** (10 - digits):
                    return False
    return True


def math_verify_equal(truth: str, extracted: str) -> bool:
    """Return whether math-verify takes two LaTeX texts for equal."""
    from math_verify import LatexExtractionConfig, parse, verify

    def parsed(text: str) -> Any:
        # Its time limits use SIGALRM and are off: the worker's own limits hold.
        return parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)

    try:
        gold, target = parsed(truth), parsed(extracted)
        if not gold or not target:
            return False
        return bool(verify(gold, target, float_rounding=15, numeric_precision=30, timeout_seconds=None))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # a text that breaks its parsers is not the truth
        return False


def _mpmath_backend(mpmath: Any) -> SimpleNamespace:
    """Return mpmath's numbers and functions by the names that `evaluate` uses."""
    return SimpleNamespace(
        cancels=0,
        number=lambda value: mpmath.mpf(value.numerator) / value.denominator,
        pi=+mpmath.pi, e=+mpmath.e, i=mpmath.mpc(0, 1), infinity=mpmath.inf, log=mpmath.log, exp=mpmath.exp,
        factorial=mpmath.factorial, double_factorial=mpmath.fac2, floor=mpmath.floor, ceil=mpmath.ceil, abs=abs,
        sin=mpmath.sin, cos=mpmath.cos, tan=mpmath.tan, arcsin=mpmath.asin, arccos=mpmath.acos, arctan=mpmath.atan,
        sinh=mpmath.sinh, cosh=mpmath.cosh, tanh=mpmath.tanh,
    )  # fmt: skip
