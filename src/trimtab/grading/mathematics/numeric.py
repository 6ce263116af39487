"""Floating-point values of expressions at points: cheap proof that two expressions are not equal.

The same evaluator serves Python floats here and mpmath's numbers in the worker; a backend holds either's functions.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from fractions import Fraction
from types import MappingProxyType, SimpleNamespace
from typing import Any

from trimtab.grading.mathematics.nodes import Node, literal_value
from trimtab.grading.mathematics.normal_form import NormalizeError
from trimtab.grading.mathematics.points import CONSTANTS, Points

TOLERANCE = 1e-9
MUST_NOT_OVERFLOW = 1e100  # a number of this size is not equal to one that overflows
MAX_ANGLE = 1e3  # beyond it the sine of a float has lost too many digits


def _gamma(x: Any) -> Any:
    argument = complex(x)
    if abs(argument.imag) > 0 or argument.real > 170:
        return math.inf
    return math.gamma(argument.real + 1)


def _double_factorial(x: Any) -> Any:
    argument = complex(x)
    if argument.imag or argument.real != int(argument.real) or not 0 <= argument.real <= 300:
        return math.nan
    return float(math.prod(range(int(argument.real), 0, -2)))


def _binomial(top: Any, low: Any) -> Any:
    n, k = complex(top), complex(low)
    if n.imag or k.imag or not (n.real.is_integer() and k.real.is_integer()) or max(abs(n.real), abs(k.real)) > 1000:
        return _gamma(top) / _gamma(low) / _gamma(top - low)
    return float(whole_binomial(int(n.real), int(k.real)))


def whole_binomial(n: int, k: int) -> int:
    """Return how many ways there are to choose k of n, and its continuation to negative n."""
    if k < 0:
        if n < 0:
            raise ValueError("a binomial of two negative numbers")
        return 0
    return math.comb(n, k) if n >= 0 else (-1) ** k * math.comb(k - n - 1, k)


def _floor(x: Any) -> float:
    """Round down; a float that only an error of rounding keeps from being whole counts as whole."""
    argument = complex(x)
    nearest = round(argument.real)
    away = abs(argument - nearest) / max(1.0, abs(argument.real))
    if argument.imag and abs(argument.imag) > 1e-9:
        return math.nan
    if away < 1e-12:
        return float(nearest)
    return math.nan if away < 1e-9 else float(math.floor(argument.real))


FLOAT_BACKEND = SimpleNamespace(
    cancels=1e-6,  # a sum below this share of its largest term has lost its digits; 0 turns the check off
    number=lambda value: float(value) if abs(value) < Fraction(10) ** 300 else math.inf,
    whole=float, irrational=lambda size, _: size,
    pi=math.pi, e=math.e, i=1j, infinity=math.inf, log=cmath.log, exp=cmath.exp, factorial=_gamma,
    double_factorial=_double_factorial, binom=_binomial,
    floor=_floor, ceil=lambda x: -_floor(-x), abs=abs,
    sin=cmath.sin, cos=cmath.cos, tan=cmath.tan, arcsin=cmath.asin, arccos=cmath.acos, arctan=cmath.atan,
    sinh=cmath.sinh, cosh=cmath.cosh, tanh=cmath.tanh,
)  # fmt: skip
_PERIODIC = frozenset(("sin", "cos", "tan", "cot", "sec", "csc"))
_RECIPROCALS = MappingProxyType({"cot": "tan", "sec": "cos", "csc": "sin"})


def evaluate(node: Node, values: Callable[[str], Any], backend: Any = FLOAT_BACKEND) -> Any:
    """Return the expression's value where its variables have these values, in the backend's numbers.

    Overflow is infinite; a function of infinity, or one over it, is not a number, because it could be anything.
    """
    if node.kind == "number":
        return backend.number(node.value)
    if node.kind == "symbol":
        if node.name in CONSTANTS:
            return backend.infinity if node.name == "oo" else getattr(backend, node.name)
        return values(node.name)
    parts = [evaluate(child, values, backend) for child in node.children]
    if node.kind == "sum":
        total = sum(parts[1:], parts[0])
        return math.nan if backend.cancels and abs(total) < backend.cancels * max(map(abs, parts)) else total
    if node.kind == "product":
        return math.prod(parts[1:], start=parts[0])
    if node.kind == "power":
        return _power(parts[0], parts[1], node)
    return _function(node.name, parts, values, backend)


def float_value(node: Node, values: Callable[[str], Any] = lambda name: 1.0) -> complex | None:
    """Return the expression's value in floating point; None where it cannot be computed."""
    try:
        return complex(evaluate(node, values))
    except (ArithmeticError, ValueError, TypeError, NormalizeError):
        return None


def _function(name: str, arguments: list[Any], values: Callable[[str], Any], backend: Any) -> Any:
    if any(_infinite(value) for value in arguments) and name != "factorial":
        return math.nan
    if backend.cancels and name in _PERIODIC and abs(arguments[0]) > MAX_ANGLE:
        return math.nan
    if name in _RECIPROCALS:
        return 1 / getattr(backend, _RECIPROCALS[name])(arguments[0])
    if name in ("log", "ln"):
        default = backend.log(backend.number(Fraction(10))) if name == "log" else 1
        return backend.log(arguments[0]) / (backend.log(arguments[1]) if len(arguments) > 1 else default)
    if name.endswith("()"):  # an unknown function: some polynomial of its own, another one at every point
        scale = values(name)
        return scale * arguments[0] ** 3 + arguments[0] ** 2 + scale**2
    if not hasattr(backend, name):
        raise NormalizeError(name)
    return getattr(backend, name)(*arguments)


def _power(base: Any, exponent: Any, node: Node) -> Any:
    if _infinite(base) or _infinite(exponent):
        real = complex(exponent).real
        return math.inf if real > 0 and (_infinite(base) or abs(complex(base)) > 1) else math.nan
    if isinstance(base, complex) and base.imag == 0:  # a negative zero would select the other branch of the root
        base = complex(base.real, 0.0)
    if complex(base).imag == 0 and complex(base).real < 0:
        root = literal_value(node.children[1])
        if root is not None and root.denominator > 1 and root.denominator % 2:  # the real root of a negative number
            return (-1) ** (root.numerator % 2) * (-base) ** exponent
    try:
        return base**exponent
    except OverflowError:
        return math.inf if complex(exponent).real > 0 and abs(complex(base)) > 1 else math.nan


def _infinite(value: Any) -> bool:
    context = getattr(value, "context", None)  # mpmath's numbers go far beyond floats
    try:
        return bool(context.isinf(value)) if context is not None else cmath.isinf(complex(value))
    except (TypeError, ValueError, OverflowError):
        return True


def numerically_different(points: Points, a: Node, b: Node) -> bool:
    """Return whether floating-point values at some point prove that two expressions are not equal."""
    for values in points.for_floats(FLOAT_BACKEND):
        x, y = float_value(a, values), float_value(b, values)
        if _differ(x, y, has_variables=bool(points.drawn)):
            return True
        if not points.drawn:
            return False
    return False


def _differ(x: complex | None, y: complex | None, has_variables: bool) -> bool:
    """Return whether two values are surely not the same."""
    if x is None or y is None or cmath.isnan(x) or cmath.isnan(y):
        return False
    left, right = math.hypot(x.real, x.imag), math.hypot(y.real, y.imag)  # abs() raises where it overflows
    if math.isinf(left) or math.isinf(right):  # a quotient of two that overflow may be small: other points tell
        return min(left, right) < MUST_NOT_OVERFLOW and not has_variables
    return abs(x - y) > TOLERANCE * max(left, right, 1e-3)
