"""Exact algebra in bounded work: an expression as a sum of monomials with rational coefficients.

Two expressions with the same form are equal; with different forms they may still be (1/(√2-1) and √2+1), so that
floating-point values at a few points are asked whether they can be. What is left goes to a worker. Nothing here can
take long: every product is paid from a budget, and integers stay below a few thousand bits.
"""

from __future__ import annotations

import cmath
import math
from fractions import Fraction
from types import MappingProxyType, SimpleNamespace
from typing import Any

from trimtab.rewards.mathematics.nodes import Node, NotReadError

BUDGET = 2_000  # products of monomials
MOST_BITS = 2_000
LARGEST_POWER = 60
LARGEST_FACTOR = 1_000
LARGEST_FACTORIAL = 170
POINTS = ((0.71, 1.37, 0.53), (-0.83, -1.19, -0.47), (1.61, -0.67, 2.03), (-2311.7, -3874.3, -5019.1))
TOLERANCE = 1e-9
FARTHEST = 1e3  # from nought, where the sine of a float still has its digits

Monomial = tuple[tuple[Any, Fraction], ...]
Form = dict[Monomial, Fraction]


class TooHardError(Exception):
    """The expression is beyond this algebra: its budget or its powers."""


class Algebra:
    """One computation with its budget."""

    def __init__(self, budget: int = BUDGET) -> None:
        self.budget = budget

    def form(self, node: Node) -> Form:
        """The expression as a sum of monomials."""
        if node.kind == "number":
            return constant(node.value)
        if node.kind == "symbol":
            return {((node.name, Fraction(1)),): Fraction(1)}
        parts = [self.form(part) for part in node.parts]
        if node.kind == "sum":
            return _sum(parts)
        if node.kind == "product":
            return self.product(parts)
        if node.kind == "power":
            return self.power(parts[0], parts[1])
        if node.kind == "function":
            return self.function(node.name, parts)
        raise TooHardError(node.kind)

    def product(self, parts: list[Form]) -> Form:
        """The product of sums, multiplied out."""
        result = constant(1)
        for part in parts:
            self.budget -= len(result) * len(part)
            if self.budget < 0:
                raise TooHardError("many terms")
            result = _sum([self.times(a, p, b, q) for a, p in result.items() for b, q in part.items()])
        return result

    def times(self, a: Monomial, p: Fraction, b: Monomial, q: Fraction) -> Form:
        """The product of two monomials; groups that come to a whole power are multiplied out."""
        exponents = dict(a)
        for atom, exponent in b:
            exponents[atom] = exponents.get(atom, Fraction(0)) + exponent
        coefficient, groups = p * q, []
        for atom, exponent in list(exponents.items()):
            if atom == "i" and exponent.denominator == 1:
                coefficient *= -1 if int(exponent) % 4 in (2, 3) else 1
                exponents[atom] = exponent % 2
            elif isinstance(atom, int):
                coefficient *= _whole_power(Fraction(atom), exponent.__floor__())
                exponents[atom] = exponent % 1
            elif isinstance(atom, tuple) and atom[0] == "group" and exponent.denominator == 1 and exponent > 0:
                groups += [dict(atom[1])] * _small(exponent)
                exponents[atom] = Fraction(0)
        monomial = tuple(sorted(((a, e) for a, e in exponents.items() if e), key=repr))
        result: Form = {monomial: coefficient} if coefficient else {}
        return self.product([result, *groups]) if groups else result

    def power(self, base: Form, exponent: Form) -> Form:
        """A power: whole ones multiplied out, roots of rationals by their prime factors, others kept as they are."""
        value = rational(exponent)
        if value is None:
            if not base:
                raise NotReadError("a power of nothing")
            if () in exponent:  # 2^{n+1} is 2 times 2^n
                rest = {monomial: c for monomial, c in exponent.items() if monomial}
                return self.product([self.power(base, constant(exponent[()])), self.power(base, rest)])
            return {((("power", _key(base), _key(exponent)), Fraction(1)),): Fraction(1)}
        if not base:
            if value <= 0:
                raise NotReadError("a division by nothing")
            return {}
        if value.denominator == 1 and (len(base) == 1 or 0 <= value <= LARGEST_POWER):
            return self.whole(base, value)
        if len(base) == 1:
            ((monomial, coefficient),) = base.items()
            if all(isinstance(atom, int) or atom in ("pi", "e") for atom, _ in monomial):
                raised = {tuple((atom, e * value) for atom, e in monomial): Fraction(1)}
                return self.product([raised, self.root(coefficient, value)])
        leading = base[min(base, key=repr)]
        group = {monomial: c / leading for monomial, c in base.items()}
        scale = _whole_power(leading, value) if value.denominator == 1 else None
        if scale is None:
            group, scale = base, Fraction(1)
        return {((("group", _key(group)), value),): scale}

    def whole(self, base: Form, exponent: Fraction) -> Form:
        """A whole power of one monomial, or of a sum by multiplying it out."""
        if len(base) == 1:
            ((monomial, coefficient),) = base.items()
            raised = tuple((atom, e * exponent) for atom, e in monomial)
            return self.times(raised, _whole_power(coefficient, int(exponent)), (), Fraction(1))
        return self.product([base] * _small(exponent))

    def root(self, value: Fraction, exponent: Fraction) -> Form:
        """A broken power of a rational number: prime factors with exponents below one."""
        if value < 0:
            if exponent.denominator == 2:
                turned: Form = {(("i", Fraction(1)),): Fraction(-1 if exponent.numerator % 4 == 3 else 1)}
                return self.product([turned, self.root(-value, exponent)])
            if exponent.denominator % 2 == 0:
                raise TooHardError("a root of a negative number")
            sign = -1 if exponent.numerator % 2 else 1
            return {m: sign * c for m, c in self.root(-value, exponent).items()}
        monomial = [(p, n * exponent) for p, n in factors(value.numerator).items()]
        monomial += [(p, -n * exponent) for p, n in factors(value.denominator).items()]
        return self.product([self.times(((p, e),), Fraction(1), (), Fraction(1)) for p, e in monomial])

    def function(self, name: str, parts: list[Form]) -> Form:
        """A function of a form: of numbers computed where that is exact, else kept as it is."""
        values = [rational(part) for part in parts]
        exact = _exact(name, values) if all(value is not None for value in values) else None
        if exact is not None:
            return constant(exact)
        if name in ("ln", "log") and values[0] is not None and values[0] > 0:
            return self.logarithm(name, values[0], parts[1:])
        if name == "exp":
            return self.power({(("e", Fraction(1)),): Fraction(1)}, parts[0])
        return {(((name, *map(_key, parts)), Fraction(1)),): Fraction(1)}

    def logarithm(self, name: str, value: Fraction, base: list[Form]) -> Form:
        """The logarithm of a rational number as those of its prime factors, over that of the base."""
        if base:
            above, below = self.logarithm("ln", value, []), self.function("ln", base)
            return self.product([above, self.power(below, constant(-1))])
        powers = factors(value.numerator).items(), ((p, -n) for p, n in factors(value.denominator).items())
        return {(((name, p), Fraction(1)),): Fraction(n) for group in powers for p, n in group}


def constant(value: Fraction | int) -> Form:
    """A number as a form."""
    return {(): Fraction(value)} if value else {}


def rational(form: Form) -> Fraction | None:
    """The value of a form that is a rational number."""
    return Fraction(0) if not form else form[()] if list(form) == [()] else None


def factors(n: int) -> dict[int, int]:
    """Small prime factors of a number, and what is left of it."""
    found: dict[int, int] = {}
    for p in (2, *range(3, LARGEST_FACTOR, 2)):
        while n % p == 0:
            n //= p
            found[p] = found.get(p, 0) + 1
        if p * p > n:
            break
    if n > 1:
        root = math.isqrt(n)
        if root * root == n:
            found[root] = found.get(root, 0) + 2
        else:
            found[n] = found.get(n, 0) + 1
    return found


def _sum(parts: list[Form]) -> Form:
    total: Form = {}
    for part in parts:
        for monomial, coefficient in part.items():
            total[monomial] = total.get(monomial, Fraction(0)) + coefficient
    return {monomial: coefficient for monomial, coefficient in total.items() if coefficient}


def _key(form: Form) -> tuple[Any, ...]:
    return tuple(sorted(form.items(), key=repr))


def _small(exponent: Fraction) -> int:
    if exponent > LARGEST_POWER:
        raise TooHardError("a high power")
    return int(exponent)


def _whole_power(base: Fraction, exponent: Fraction | int) -> Fraction:
    bits = max(abs(base.numerator), base.denominator).bit_length() - 1
    if bits * abs(int(exponent)) > MOST_BITS:
        raise TooHardError("a large number")
    if not base and exponent < 0:
        raise NotReadError("a division by nothing")
    return base ** int(exponent)


def _exact(name: str, values: list[Fraction | None]) -> Fraction | None:
    x = values[0]
    assert x is not None
    if name in ("floor", "ceil", "abs"):
        return Fraction({"floor": x.__floor__(), "ceil": x.__ceil__()}.get(name, 0)) if name != "abs" else abs(x)
    if name == "factorial" and x.denominator == 1 and 0 <= x <= LARGEST_FACTORIAL:
        return Fraction(math.factorial(int(x)))
    if name == "binom":
        y = values[1]
        assert y is not None
        if x.denominator == y.denominator == 1 and 0 <= y <= x <= 2 * LARGEST_FACTORIAL:
            return Fraction(math.comb(int(x), int(y)))
    return Fraction(0) if (name in ("sin", "tan") and not x) or (name in ("ln", "log") and x == 1) else None


def _gamma(x: Any) -> Any:
    real = complex(x)
    if abs(real.imag) > 0 or real.real > 170:
        return math.inf
    return math.gamma(real.real + 1)


FLOATS = SimpleNamespace(
    cancels=1e-6,
    number=lambda value: float(value) if abs(value) < Fraction(10) ** 300 else math.inf,
    pi=math.pi, e=math.e, i=1j, infinity=math.inf, log=cmath.log, exp=cmath.exp, factorial=_gamma,
    floor=lambda x: float(math.floor(complex(x).real)), ceil=lambda x: float(math.ceil(complex(x).real)), abs=abs,
    sin=cmath.sin, cos=cmath.cos, tan=cmath.tan, arcsin=cmath.asin, arccos=cmath.acos, arctan=cmath.atan,
    sinh=cmath.sinh, cosh=cmath.cosh, tanh=cmath.tanh,
)  # fmt: skip
_WAVES = frozenset(("sin", "cos", "tan", "cot", "sec", "csc"))
_INVERSES = MappingProxyType({"cot": "tan", "sec": "cos", "csc": "sin"})


def evaluate(node: Node, point: tuple[float, ...], kit: Any = FLOATS) -> Any:
    """The expression's value where its symbols have values drawn from the point, in the kit's numbers.

    What overflows is infinite; a function of the infinite, or one over it, is not a number: it could be anything.
    """
    if node.kind == "number":
        return kit.number(node.value)
    if node.kind == "symbol":
        special = {"pi": kit.pi, "e": kit.e, "i": kit.i, "oo": kit.infinity}
        return special[node.name] if node.name in special else kit.number(Fraction(_at(node.name, point)))
    values = [evaluate(part, point, kit) for part in node.parts]
    if node.kind == "sum":
        total = sum(values[1:], values[0])
        # Where floats cancel, too few digits are left to tell anything.
        return math.nan if kit.cancels and abs(total) < kit.cancels * max(map(abs, values)) else total
    if node.kind == "product":
        total = values[0]
        for value in values[1:]:
            total = total * value
        return total
    if node.kind == "power":
        return _raise(values[0], values[1], node, kit)
    if any(_infinite(value) for value in values) and node.name != "factorial":
        return math.nan
    if kit.cancels and node.name in _WAVES and abs(values[0]) > FARTHEST:
        return math.nan  # the last digits of a float decide where on the wave it falls
    if node.name == "binom":
        top, low = values
        return kit.factorial(top) / kit.factorial(low) / kit.factorial(top - low)
    if node.name in _INVERSES:
        return 1 / getattr(kit, _INVERSES[node.name])(values[0])
    if node.name in ("log", "ln"):
        base = kit.log(values[1]) if len(values) > 1 else kit.log(kit.number(Fraction(10))) if node.name == "log" else 1
        return kit.log(values[0]) / base
    if not hasattr(kit, node.name):
        raise TooHardError(node.name)
    return getattr(kit, node.name)(values[0])


def _raise(base: Any, exponent: Any, node: Node, kit: Any) -> Any:
    if _infinite(base) or _infinite(exponent):
        real = complex(exponent).real
        return math.inf if real > 0 and (_infinite(base) or abs(complex(base)) > 1) else math.nan
    if isinstance(base, complex) and base.imag == 0:  # -0 would choose the other root
        base = complex(base.real, 0.0)
    root = node.parts[1]
    odd = node.parts[1].kind == "power" and root.parts[0].kind == "number" and root.parts[0].value % 2 == 1
    if odd and complex(base).imag == 0 and complex(base).real < 0:  # the real root of a negative number
        return -((-base) ** exponent)
    try:
        return base**exponent
    except OverflowError:
        return math.inf if complex(exponent).real > 0 and abs(complex(base)) > 1 else math.nan


def _infinite(value: Any) -> bool:
    try:
        return cmath.isinf(complex(value))
    except (TypeError, ValueError, OverflowError):
        return True


def _at(name: str, point: tuple[float, ...]) -> float:
    """A symbol's value: some number of the point, moved by the symbol's name so that no two symbols have the same."""
    mixed = 0
    for char in name:
        mixed = (mixed * 131 + ord(char)) % 65_521
    return point[mixed % len(point)] * (1 + mixed / 131_071)


def differ(a: Node, b: Node) -> bool:
    """Whether floating-point values at some points show that two expressions are not equal."""
    for point in POINTS:
        try:
            x, y = complex(evaluate(a, point)), complex(evaluate(b, point))
        except (ArithmeticError, ValueError, TypeError, TooHardError):
            continue
        if cmath.isnan(x) or cmath.isnan(y) or (cmath.isinf(x) and cmath.isinf(y)):
            continue
        if cmath.isinf(x) or cmath.isinf(y) or abs(x - y) > TOLERANCE * max(abs(x), abs(y), 1e-3):
            return True
    return False
