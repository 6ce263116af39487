"""The comparisons that need mpmath or math-verify (sympy). Runs in a worker; a trainer never loads either.

Expressions that we can parse are compared at points, with so many digits that only equal ones agree. Other notation
(derivatives, sums) is left to math-verify.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, product
from types import SimpleNamespace
from typing import Any

import mpmath
from math_verify import LatexExtractionConfig, parse, verify

from trimtab.grading.mathematics.answer import parse_answer
from trimtab.grading.mathematics.compare import compare
from trimtab.grading.mathematics.math_rule import estimate_bits
from trimtab.grading.mathematics.nodes import Node, ParsedAnswer, symbols
from trimtab.grading.mathematics.normal_form import NormalizeError
from trimtab.grading.mathematics.points import CONSTANTS, GENERIC, ROUNDED_BY, WHOLE, Points, evaluate, whole_binomial

DIGITS = 50  # of the first pass; the second has more than the smallest number in the expressions needs
FEWEST_POINTS = 6  # at which both expressions must have a value
MOST_JUMPS = 64  # searches for a point at which a floor or a ceiling jumps
SECANTS = 30  # steps of such a search
LARGEST_REACH = 2_000  # digits of the largest number beyond which expressions are compared


def warm_up() -> None:
    """Prepare math-verify once, before worker processes are forked from this one."""
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
        return equal_at_points(truth.node, extracted.node, f"{truth.text}\0{extracted.text}")
    return math_verify_equal(truth.text, extracted.text)


def equal_at_points(a: Node, b: Node, written: str) -> bool:
    """Return whether two expressions have the same value at every point, to many digits."""
    points = Points(a, b, written)
    for digits in (DIGITS, 4 * DIGITS + int(max(estimate_bits(a), estimate_bits(b)) / 2)):
        with mpmath.workdps(digits):
            backend = _mpmath_backend()  # per precision: mpmath's constants are rounded when they are read
            agreed = 0
            for values, whole in _values(points, a, b, backend):
                same = _agree(a, b, values, backend)
                if same is False or (same is None and not whole and not points.restricted):
                    return False
                agreed += same is True
                if not points.drawn:  # without variables all points are one
                    break
            if agreed < (FEWEST_POINTS if points.drawn else 1):
                return False
    return _agree_beyond_their_numbers(points, a, b) and not _has_idle_part(points, a, b)


def _has_idle_part(points: Points, a: Node, b: Node) -> bool:
    """Return whether the answer b would agree just as well without one of its parts.

    At every point `n! + \\binom{n}{200}` is `n!`, and `x + e^{-10^5 x^2}` is `x`, or so near to it that no digit tells.
    """
    with mpmath.workdps(DIGITS):
        backend = _mpmath_backend()
        compared = [values for values, _ in _values(points, a, b, backend) if _agree(a, b, values, backend)]
        return any(all(_agree(a, rest, values, backend) for values in compared) for rest in _without_a_part(b))


def _without_a_part(node: Node) -> Iterator[Node]:
    """Yield an expression without one term or factor that has a variable, for each of them."""
    parts = node.children
    for at, part in enumerate(parts):
        rest = parts[:at] + parts[at + 1 :]
        if rest and node.kind in ("sum", "product") and symbols(part) - CONSTANTS:
            yield replace(node, children=rest)
        for smaller in _without_a_part(part):
            yield replace(node, children=(*parts[:at], smaller, *parts[at + 1 :]))


def _values(points: Points, a: Node, b: Node, backend: Any) -> Iterator[tuple[Callable[[str], Any], bool]]:
    """Yield the values of variables at every point, and whether expressions may have no value there."""
    for number in range(1, GENERIC):
        yield points.generic(number, backend), False
    for number in range(WHOLE if points.stepped else 0):
        yield points.whole(number, backend), True
    for values in _at_jumps(points, a, b, backend):
        yield values, True


def _at_jumps(points: Points, a: Node, b: Node, backend: Any) -> Iterator[Callable[[str], Any]]:
    """Yield points at which a real variable makes the argument of a floor or a ceiling whole.

    Only there do `\\lfloor x + 1/2 \\rfloor` and `\\lceil x - 1/2 \\rceil` differ.
    """
    # The generic points 0 and 1 have different signs, and neighbouring whole numbers are even and odd.
    searches = product((0, 1), (0, 1), [*_rounded(a), *_rounded(b)])
    for number, step, argument in islice(searches, MOST_JUMPS):
        start = points.generic(number, backend)
        for name in sorted(symbols(argument) - CONSTANTS - points.counting):
            x = _where_whole(argument, name, start, step, backend)
            if x is not None and (x > 0 or name not in points.positive):
                yield _with(name, x, start)


def _with(name: str, x: Any, others: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return the values of variables, of which one has another value."""
    return lambda other: x if other == name else others(other)


def _rounded(node: Node) -> Iterator[Node]:
    """Yield the arguments of the floors and ceilings in an expression."""
    if node.kind == "function" and node.name in ROUNDED_BY:
        yield node.children[0]
    for child in node.children:
        yield from _rounded(child)


def _where_whole(argument: Node, name: str, start: Callable[[str], Any], step: int, backend: Any) -> Any:
    """Return the value of a variable near its start that makes an argument whole; None if the secants find none."""

    def value(x: Any) -> Any:
        found = mpmath.mpmathify(evaluate(argument, _with(name, x, start), backend))
        if found.imag or not mpmath.isfinite(found):
            raise ValueError("not a real number")
        return found.real

    try:
        target = mpmath.nint(value(start(name))) + step
        tolerance = max(1, abs(target)) * mpmath.mpf(10) ** (5 - mpmath.mp.dps)
        ends = start(name), start(name) * 9 / 8
        return mpmath.findroot(lambda x: value(x) - target, ends, "secant", tolerance**2, maxsteps=SECANTS)
    except (ArithmeticError, ValueError, NormalizeError):
        return None


def _agree(a: Node, b: Node, values: Callable[[str], Any], backend: Any) -> bool | None:
    """Return whether two expressions agree at a point; None if one has no value there."""
    try:
        x, y = evaluate(a, values, backend), evaluate(b, values, backend)
    except (ArithmeticError, ValueError, NormalizeError):  # a pole, or a function that is not known
        return None
    if not mpmath.isfinite(x) or not mpmath.isfinite(y):
        return None
    return bool(abs(x - y) <= max(abs(x), abs(y), 1) * mpmath.mpf(10) ** (10 - mpmath.mp.dps))


def _agree_beyond_their_numbers(points: Points, a: Node, b: Node) -> bool:
    """Return whether two expressions agree where the variables are larger than all numbers in them.

    `|x + 10^9| - 10^9` is x up to there.
    """
    backend = _mpmath_backend()
    reach = max(_largest_number(a, backend), _largest_number(b, backend))
    if not 1000 < reach < mpmath.mpf(10) ** LARGEST_REACH:
        return True
    with mpmath.workdps(DIGITS + 2 * int(mpmath.log10(reach))):
        backend = _mpmath_backend()
        for number in (1, 2, 4, 5):

            def values(name: str, number: int = number) -> Any:
                return 4 * reach * points.generic(number, backend)(name)

            if _agree(a, b, values, backend) is False:
                return False
    return True


def _largest_number(node: Node, backend: Any) -> Any:
    """Return the size of the largest part of an expression, or of one over it, that has no variables."""
    if symbols(node) - CONSTANTS:
        return max(_largest_number(child, backend) for child in node.children) if node.children else 0
    try:
        value = abs(evaluate(node, lambda name: backend.whole(1), backend))
        return max(value, 1 / value) if value else 0
    except (ArithmeticError, ValueError, NormalizeError):
        return 0


def math_verify_equal(truth: str, extracted: str) -> bool:
    """Return whether math-verify takes two LaTeX texts for equal."""

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


def _mpmath_backend() -> SimpleNamespace:
    """Return mpmath's numbers and functions by the names that `evaluate` uses."""

    def whole_part(rounded: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Round as `rounded` does; what only an error of rounding keeps from being whole counts as whole."""

        def part(x: Any) -> Any:
            x = mpmath.mpmathify(x)
            error = mpmath.mpf(10) ** (10 - mpmath.mp.dps) * max(1, abs(x))
            if abs(x.imag) > error:
                raise ValueError("a complex number is not rounded")
            nearest = mpmath.nint(x.real)
            return nearest if abs(x.real - nearest) <= error else rounded(x.real)

        return part

    def binomial(n: Any, k: Any) -> Any:
        small = mpmath.isint(n) and mpmath.isint(k) and max(abs(n), abs(k)) < 1000
        return mpmath.mpf(whole_binomial(int(n), int(k))) if small else mpmath.binomial(n, k)

    return SimpleNamespace(
        cancels=0,
        number=lambda value: mpmath.mpf(value.numerator) / value.denominator,
        whole=mpmath.mpf, irrational=lambda size, drawn: mpmath.mpf(size) + mpmath.sqrt(drawn) / 2**40,
        pi=+mpmath.pi, e=+mpmath.e, i=mpmath.mpc(0, 1), infinity=mpmath.inf, log=mpmath.log, exp=mpmath.exp,
        factorial=mpmath.factorial, double_factorial=mpmath.fac2, binom=binomial,
        floor=whole_part(mpmath.floor), ceil=whole_part(mpmath.ceil), abs=abs,
        sin=mpmath.sin, cos=mpmath.cos, tan=mpmath.tan, arcsin=mpmath.asin, arccos=mpmath.acos, arctan=mpmath.atan,
        sinh=mpmath.sinh, cosh=mpmath.cosh, tanh=mpmath.tanh,
    )  # fmt: skip
