"""What only a computer algebra system can tell. Runs in a worker: sympy and math-verify are never loaded by a trainer.

Expressions that we can read are compared at points, with so many digits that only equal ones agree. What we cannot read
(derivatives, sums, other notation) is left to math-verify.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

from trimtab.rewards.mathematics.algebra import evaluate
from trimtab.rewards.mathematics.answers import Shape, read
from trimtab.rewards.mathematics.compare import compare
from trimtab.rewards.mathematics.cost import bits
from trimtab.rewards.mathematics.nodes import Node

DIGITS = 50  # tell most apart, quickly; then more of them, so that the smallest numbers are told from nothing
POINTS = (
    (0.7137, 1.3771, 0.5393),
    (-0.8353, -1.1917, -0.4751),
    (1.6139, -0.6733, 2.0357),
    (-2341.71, -3813.37, -5091.17),
    (2719.13, 1931.71, 4127.93),
)


def prepare() -> None:
    """Load what every comparison needs, once, before workers are made from this process."""
    import math_verify  # noqa: F401
    import mpmath  # noqa: F401

    logging.disable(logging.CRITICAL)
    for text in (
        r"\frac{x}{2}+x^{2}_1",
        r"\sum_{i=1}^{n} i",
        r"\int_0^1 x\,dx",
        "(1, 2]",
        r"\{1,2\} \cup [3,4)",
        "y=2x",
    ):
        by_math_verify(text, text.replace("2", "3"))  # its grammar is learnt by use


def judge(found: str, answer: str) -> str:
    """The kind of verdict on an answer, where the parent could not tell."""
    return compare(read(answer), read(found), equal)


def equal(truth: Shape, found: Shape) -> bool:
    """Whether two answers are equal: values by their digits, other things by math-verify."""
    if truth.node is not None and found.node is not None:
        return agree(truth.node, found.node)
    return by_math_verify(truth.text, found.text)


def agree(a: Node, b: Node) -> bool:
    """Whether two expressions have the same value at every point, to many digits."""
    import mpmath

    for digits in (DIGITS, 4 * DIGITS + int(max(bits(a), bits(b)) / 2)):
        with mpmath.workdps(digits):
            kit = _kit(mpmath)  # its constants have the digits of now
            for point in POINTS:
                x, y = evaluate(a, point, kit), evaluate(b, point, kit)
                size = max(abs(x), abs(y), 1)
                if not mpmath.isfinite(size) or not abs(x - y) <= size * mpmath.mpf(10) ** (10 - digits):
                    return False
    return True


def by_math_verify(truth: str, found: str) -> bool:
    """Whether math-verify holds two LaTeX texts for equal. Its own time limits are off: the worker has some."""
    from math_verify import LatexExtractionConfig, parse, verify

    def parsed(text: str) -> Any:
        return parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)

    try:
        gold, guess = parsed(truth), parsed(found)
        if not gold or not guess:
            return False
        return bool(verify(gold, guess, float_rounding=15, numeric_precision=30, timeout_seconds=None))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # whatever a text makes of its parsers: it is not the truth
        return False


def _kit(mpmath: Any) -> SimpleNamespace:
    """mpmath's numbers and functions, by the names that `evaluate` asks for."""
    return SimpleNamespace(
        cancels=0,
        number=lambda value: mpmath.mpf(value.numerator) / value.denominator,
        pi=+mpmath.pi, e=+mpmath.e, i=mpmath.mpc(0, 1), infinity=mpmath.inf, log=mpmath.log, exp=mpmath.exp,
        factorial=mpmath.factorial, floor=mpmath.floor, ceil=mpmath.ceil, abs=abs, sin=mpmath.sin, cos=mpmath.cos,
        tan=mpmath.tan, arcsin=mpmath.asin, arccos=mpmath.acos, arctan=mpmath.atan, sinh=mpmath.sinh,
        cosh=mpmath.cosh, tanh=mpmath.tanh,
    )  # fmt: skip
