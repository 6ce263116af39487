"""Floating-point values of expressions at fixed points: cheap proof that two expressions are not equal.

The same evaluator serves Python floats here and mpmath's numbers in the worker; a backend holds either's functions.
"""

from __future__ import annotations

import cmath
import math
from fractions import Fraction
from types import MappingProxyType, SimpleNamespace
from typing import Any

from trimtab.rewards.mathematics.nodes import Node
from trimtab.rewards.mathematics.normal_form import NormalizeError

# One point is far from zero: expressions that nearly agree around zero do not there.
POINTS = ((0.71, 1.37, 0.53), (-0.83, -1.19, -0.47), (1.61, -0.67, 2.03), (-2311.7, -3874.3, -5019.1))
TOLERANCE = 1e-9
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


FLOAT_BACKEND = SimpleNamespace(
    cancels=1e-6,  # a sum below this share of its largest term has lost its digits; 0 turns the check off
    number=lambda value: float(value) if abs(value) < Fraction(10) ** 300 else math.inf,
    pi=math.pi, e=math.e, i=1j, infinity=math.inf, log=cmath.log, exp=cmath.exp, factorial=_gamma,
    double_factorial=_double_factorial,
    floor=lambda x: float(math.floor(complex(x).real)), ceil=lambda x: float(math.ceil(complex(x).real)), abs=abs,
    sin=cmath.sin, cos=cmath.cos, tan=cmath.tan, arcsin=cmath.asin, arccos=cmath.acos, arctan=cmath.atan,
    sinh=cmath.sinh, cosh=cmath.cosh, tanh=cmath.tanh,
)  # fmt: skip
_PERIODIC = frozenset(("sin", "cos", "tan", "cot", "sec", "csc"))
_RECIPROCALS = MappingProxyType({"cot": "tan", "sec": "cos", "csc": "sin"})


def evaluate(node: Node, point: tuple[float, ...], backend: Any = FLOAT_BACKEND) -> Any:
    """Return the expression's value where its symbols take values from the point, in the backend's numbers.

    Overflow is infinite; a function of infinity, or one over it, is not a number, because it could be anything.
    """
    if node.kind == "number":
        return backend.number(node.value)
    if node.kind == "symbol":
        special = {"pi": backend.pi, "e": backend.e, "i": backend.i, "oo": backend.infinity}
        return special[node.name] if node.name in special else backend.number(Fraction(_value_at(node.name, point)))
    values = [evaluate(child, point, backend) for child in node.children]
    if node.kind == "sum":
        total = sum(values[1:], values[0])
        return math.nan if backend.cancels and abs(total) < backend.cancels * max(map(abs, values)) else total
    if node.kind == "product":
        return math.prod(values[1:], start=values[0])
    if node.kind == "power":
        return _power(values[0], values[1], node)
    return _function(node.name, values, backend)


def float_value(node: Node, point: tuple[float, ...] = (1.0,)) -> complex | None:
    """Return the expression's value in floating point; None where it cannot be computed."""
    try:
        return complex(evaluate(node, point))
    except (ArithmeticError, ValueError, TypeError, NormalizeError):
        return None


def _function(name: str, values: list[Any], backend: Any) -> Any:
    if any(_infinite(value) for value in values) and name != "factorial":
        return math.nan
    if backend.cancels and name in _PERIODIC and abs(values[0]) > MAX_ANGLE:
        return math.nan
    if name == "binom":
        top, low = values
        return backend.factorial(top) / backend.factorial(low) / backend.factorial(top - low)
    if name in _RECIPROCALS:
        return 1 / getattr(backend, _RECIPROCALS[name])(values[0])
    if name in ("log", "ln"):
        default = backend.log(backend.number(Fraction(10))) if name == "log" else 1
        return backend.log(values[0]) / (backend.log(values[1]) if len(values) > 1 else default)
    if name.endswith("()"):  # an unknown function: some polynomial of its own
        scale = backend.number(Fraction(_value_at(name, (1.0, 1.7, 2.3))))
        return scale * values[0] ** 3 + values[0] ** 2 + scale**2
    if not hasattr(backend, name):
        raise NormalizeError(name)
    return getattr(backend, name)(values[0])


def _power(base: Any, exponent: Any, node: Node) -> Any:
    if _infinite(base) or _infinite(exponent):
        real = complex(exponent).real
        return math.inf if real > 0 and (_infinite(base) or abs(complex(base)) > 1) else math.nan
    if isinstance(base, complex) and base.imag == 0:  # a negative zero would select the other branch of the root
        base = complex(base.real, 0.0)
    root = node.children[1]
    odd = root.kind == "power" and root.children[0].kind == "number" and root.children[0].value % 2 == 1
    if odd and complex(base).imag == 0 and complex(base).real < 0:  # the real root of a negative number
        return -((-base) ** exponent)
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


def _value_at(name: str, point: tuple[float, ...]) -> float:
    """Return a symbol's value: a coordinate of the point, scaled by a hash of the name so that no two symbols agree."""
    mixed = 0
    for char in name:
        mixed = (mixed * 131 + ord(char)) % 65_521
    return point[mixed % len(point)] * (1 + mixed / 131_071)


def numerically_different(a: Node, b: Node) -> bool:
    """Return whether floating-point values at some point prove that two expressions are not equal."""
    for point in POINTS:
        x, y = float_value(a, point), float_value(b, point)
        if x is None or y is None or cmath.isnan(x) or cmath.isnan(y) or (cmath.isinf(x) and cmath.isinf(y)):
            continue
        if cmath.isinf(x) or cmath.isinf(y) or abs(x - y) > TOLERANCE * max(abs(x), abs(y), 1e-3):
            return True
    return False
