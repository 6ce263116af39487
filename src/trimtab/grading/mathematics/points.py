"""The points at which two expressions are compared, and the numbers that their variables may stand for there.

The points are drawn by a hash of both answers as they are written. So a pair gets the same verdict in every process,
and no answer can be made to fit its points: any change to it moves them.

The evaluator serves Python floats here, for cheap proof that two expressions are not equal, and mpmath's numbers in the
worker; a backend holds either's functions.
"""

from __future__ import annotations

import cmath
import hashlib
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from types import MappingProxyType, SimpleNamespace
from typing import Any

from trimtab.grading.mathematics.nodes import Node, literal_value, symbols
from trimtab.grading.mathematics.normal_form import NormalizeError

GENERIC = 8  # points without a pattern
FLOAT = 4  # of these that are tried in floating point
WHOLE = 28  # points where every variable is a whole number
LARGE = range(18, 24)  # those of them where the variables are large powers
WIDE = range(24, WHOLE)  # and where they are any numbers up to a million: nobody can list them
COUNTED_BY = frozenset(("factorial", "double_factorial", "binom"))
ROUNDED_BY = frozenset(("floor", "ceil"))
CONSTANTS = frozenset(("pi", "e", "i", "oo"))
_WHOLE_LETTERS = frozenset("jklmnpqKLMN")  # by convention
_SIGNS = "+-?--?-+"  # of the generic points; ? is drawn for every name
_FAR = (3, 6, 7)  # expressions that nearly agree around zero do not there
_STEPS = (1, 5, 7, 11)
_EXPONENTS = (1, 2, 3, 6)
_LARGEST_LITERAL = 10**4
_LARGEST_PERIOD = 10**12
_WIDEST = 10**6
TOLERANCE = 1e-9
MUST_NOT_OVERFLOW = 1e100  # a number of this size is not equal to one that overflows
MAX_ANGLE = 1e3  # beyond it the sine of a float has lost too many digits
_PERIODIC = frozenset(("sin", "cos", "tan", "cot", "sec", "csc"))
_RECIPROCALS = MappingProxyType({"cot": "tan", "sec": "cos", "csc": "sin"})


def _read_domains(node: Node, counting: set[str], positive: set[str]) -> None:
    """Collect the variables of an expression that count (1, 2, 3, ...), and those that are positive.

    `n` counts in `n!`, `\\binom{n}{k}`, `(-1)^n` and `\\lfloor n/2\\rfloor`, and `x` is positive in `\\sqrt{x}`.
    """
    if node.name in COUNTED_BY:
        counting |= symbols(node) - CONSTANTS
    elif node.name in ROUNDED_BY:
        counting |= {name for name in symbols(node) - CONSTANTS if name[0] in _WHOLE_LETTERS}
    elif node.kind == "power":
        base, exponent = node.children
        turning, value = literal_value(base), literal_value(exponent)
        if value is not None and value.denominator % 2 == 0:
            positive.update(_odd_factors(base))
        elif value is None and (base.name == "i" or (turning is not None and turning < 0)):
            counting |= symbols(exponent) - CONSTANTS
    for child in node.children:
        if child.children:
            _read_domains(child, counting, positive)


def _odd_factors(node: Node) -> Iterator[str]:
    """Yield the variables that are factors of an expression by themselves, to an odd power."""
    if node.kind == "symbol":
        yield node.name
    elif node.kind == "product":
        for child in node.children:
            yield from _odd_factors(child)
    elif node.kind == "power":
        value = literal_value(node.children[1])
        if value is not None and value.denominator == 1 and value.numerator % 2:
            yield from _odd_factors(node.children[0])


def is_stepped(node: Node) -> bool:
    """Return whether an expression has a function that jumps, or that is made for whole numbers."""
    own = node.kind == "function" and (node.name in COUNTED_BY or node.name in ROUNDED_BY)
    return own or any(child.children and is_stepped(child) for child in node.children)


class Points:
    """The points of one comparison; the truth says which of its variables are whole or positive."""

    def __init__(self, truth: Node, extracted: Node, written: str) -> None:
        self.key = hashlib.blake2b(written.encode("utf-8", "surrogatepass"), digest_size=32).digest()
        self.counting: set[str] = set()
        self.positive: set[str] = set()
        _read_domains(truth, self.counting, self.positive)
        self.restricted = bool(self.counting)
        self.stepped = self.restricted or is_stepped(truth) or is_stepped(extracted)
        self.period = math.lcm(2, *_literals(truth), *_literals(extracted)) if self.stepped else 1
        self.period = self.period if self.period <= _LARGEST_PERIOD else 2
        self.drawn: dict[str, bytes] = {}

    def for_floats(self, backend: Any) -> Iterator[Callable[[str], Any]]:
        """Yield the points for the float pass, which sees only some of the generic ones."""
        for number in range(FLOAT):
            yield self.generic(number, backend)
        for number in range(WHOLE if self.stepped else 0):
            yield self.whole(number, backend)

    def generic(self, number: int, backend: Any) -> Callable[[str], Any]:
        """Return the values of names at a point without a pattern; those that count are whole there too."""

        def value(name: str) -> Any:
            if name in self.counting:
                return backend.whole(self._whole(name, number))
            drawn = self._draw(name)
            word = int.from_bytes(drawn[8 * number : 8 * number + 8], "little")
            size = (0.4 + 2.2 * (word >> 32) / 2**32) * (3000.0 if number in _FAR else 1.0)
            # An irrational part: functions with a period as small as a float's last digit vanish at all rationals.
            size = backend.irrational(size, word & 0xFFFF_FFFF)
            sign = _SIGNS[number]
            minus = sign == "-" or (sign == "?" and word & 1)
            return -size if minus and name not in self.positive else size

        return value

    def whole(self, number: int, backend: Any) -> Callable[[str], Any]:
        """Return the values of names at a point where all of them are whole numbers."""
        return lambda name: backend.whole(self._whole(name, number))

    def _whole(self, name: str, number: int) -> int:
        """Return a whole number: of a run with every remainder, a small or wide one, or beside a power of literals."""
        drawn = self._draw(name)
        if number in WIDE:
            start = 4 * (number - WIDE.start)
            return 1 + int.from_bytes(drawn[start : start + 4], "little") % _WIDEST
        if number in LARGE:
            exponent = 6 if number < 21 else _EXPONENTS[drawn[number] % 4]
            return int(self.period**exponent + number % 3 - 1)
        signed = name not in self.counting and name not in self.positive
        if number < 12:
            return 1 + drawn[0] % 8 + _STEPS[drawn[1] % 4] * number - 24 * signed
        return 1 + drawn[number] % 9 - 5 * signed

    def _draw(self, name: str) -> bytes:
        """Return 64 random bytes for a name."""
        if name not in self.drawn:
            encoded = name.encode("utf-8", "surrogatepass")
            self.drawn[name] = hashlib.blake2b(encoded, digest_size=64, key=self.key).digest()
        return self.drawn[name]


def _literals(node: Node) -> Iterator[int]:
    """Yield the whole numbers written in an expression that may be a step's length; a logarithm's base is ten."""
    if node.kind == "number" and node.value and abs(node.value) <= _LARGEST_LITERAL:
        yield abs(node.value.numerator)
        if node.value.denominator <= _LARGEST_LITERAL:
            yield node.value.denominator
    if node.name == "log" and len(node.children) == 1:
        yield 10
    for child in node.children:
        yield from _literals(child)


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
    """Return the expression's value in floating point; None if it cannot be computed."""
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
    left, right = math.hypot(x.real, x.imag), math.hypot(y.real, y.imag)  # abs() raises if it overflows
    if math.isinf(left) or math.isinf(right):  # a quotient of two that overflow may be small: other points tell
        return min(left, right) < MUST_NOT_OVERFLOW and not has_variables
    return abs(x - y) > TOLERANCE * max(left, right, 1e-3)
