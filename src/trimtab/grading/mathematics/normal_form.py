"""Exact algebra in bounded work: the normal form of an expression, a sum of monomials with rational coefficients.

Expressions with the same normal form are equal; with different ones they may still be (1/(√2-1) and √2+1). Every
product is paid from a budget and integers stay below a few thousand bits, so no expression can take long.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from trimtab.grading.mathematics.nodes import Node, ParseError

BUDGET = 2_000  # products of monomials
MAX_BITS = 2_000
MAX_POWER = 60  # of a sum that is multiplied out
MAX_FACTOR = 1_000  # trial division stops here
MAX_FACTORIAL = 170

# An atom is a symbol's name, a prime, or a tuple of a function (or "power", "group") and the keys of its arguments.
Monomial = tuple[tuple[Any, Fraction], ...]  # (atom, exponent) pairs
NormalForm = dict[Monomial, Fraction]  # monomial to coefficient


class NormalizeError(Exception):
    """The expression is beyond this algebra: its budget, its powers, or its functions."""


class NormalFormBuilder:
    """One normalization with its budget."""

    def __init__(self, budget: int = BUDGET) -> None:
        self.budget = budget

    def normalize(self, node: Node) -> NormalForm:
        """Return the expression as a sum of monomials."""
        if node.kind == "number":
            return constant(node.value)
        if node.kind == "symbol":
            return {((node.name, Fraction(1)),): Fraction(1)}
        children = [self.normalize(child) for child in node.children]
        if node.kind == "sum":
            return _sum(children)
        if node.kind == "product":
            return self.product(children)
        if node.kind == "power":
            return self.power(children[0], children[1])
        if node.kind == "function":
            return self.function(node.name, children)
        raise NormalizeError(node.kind)

    def product(self, forms: list[NormalForm]) -> NormalForm:
        """Multiply sums out."""
        result = constant(1)
        for form in forms:
            self.budget -= len(result) * len(form)
            if self.budget < 0:
                raise NormalizeError("too many terms")
            result = _sum([self.times(a, p, b, q) for a, p in result.items() for b, q in form.items()])
        return result

    def times(self, a: Monomial, p: Fraction, b: Monomial, q: Fraction) -> NormalForm:
        """Multiply two monomials `p a` and `q b`; groups that come to a whole power are multiplied out."""
        exponents = dict(a)
        for atom, exponent in b:
            exponents[atom] = exponents.get(atom, Fraction(0)) + exponent
        coefficient, groups = p * q, []
        for atom, exponent in list(exponents.items()):
            if atom == "i" and exponent.denominator == 1:
                coefficient *= -1 if int(exponent) % 4 in (2, 3) else 1
                exponents[atom] = exponent % 2
            elif isinstance(atom, int):  # primes keep exponents in [0, 1): 2^{3/2} is 2 times 2^{1/2}
                coefficient *= _whole_power(Fraction(atom), exponent.__floor__())
                exponents[atom] = exponent % 1
            elif isinstance(atom, tuple) and atom[0] == "group" and exponent.denominator == 1 and exponent > 0:
                groups += [dict(atom[1])] * _small(exponent)
                exponents[atom] = Fraction(0)
        monomial = tuple(sorted(((a, e) for a, e in exponents.items() if e), key=repr))
        result: NormalForm = {monomial: coefficient} if coefficient else {}
        return self.product([result, *groups]) if groups else result

    def power(self, base: NormalForm, exponent: NormalForm) -> NormalForm:
        """Raise to a power: whole powers are multiplied out, roots of rationals factored, others kept as an atom."""
        value = rational(exponent)
        if value is None:
            if not base:
                raise ParseError("zero to an unknown power")
            if () in exponent:  # 2^{n+1} is 2 times 2^n
                rest = {monomial: c for monomial, c in exponent.items() if monomial}
                return self.product([self.power(base, constant(exponent[()])), self.power(base, rest)])
            return {((("power", _key(base), _key(exponent)), Fraction(1)),): Fraction(1)}
        if not base:
            if value <= 0:
                raise ParseError("division by zero")
            return {}
        if value.denominator == 1 and (len(base) == 1 or 0 <= value <= MAX_POWER):
            return self.whole_power(base, value)
        if len(base) == 1:
            ((monomial, coefficient),) = base.items()
            if all(isinstance(atom, int) or atom in ("pi", "e") for atom, _ in monomial):
                raised = {tuple((atom, e * value) for atom, e in monomial): Fraction(1)}
                return self.product([raised, self.root(coefficient, value)])
        # A sum to a negative or fractional power becomes a group, scaled so that 2x+2 and x+1 share one.
        leading = base[min(base, key=repr)]
        group = {monomial: c / leading for monomial, c in base.items()}
        scale = _whole_power(leading, value) if value.denominator == 1 else None
        if scale is None:
            group, scale = base, Fraction(1)
        return {((("group", _key(group)), value),): scale}

    def whole_power(self, base: NormalForm, exponent: Fraction) -> NormalForm:
        """Raise one monomial, or a sum by multiplying it out, to a whole power."""
        if len(base) == 1:
            ((monomial, coefficient),) = base.items()
            raised = tuple((atom, e * exponent) for atom, e in monomial)
            return self.times(raised, _whole_power(coefficient, int(exponent)), (), Fraction(1))
        return self.product([base] * _small(exponent))

    def root(self, value: Fraction, exponent: Fraction) -> NormalForm:
        """Raise a rational number to a fractional power: prime factors with exponents below one."""
        if value < 0:
            if exponent.denominator == 2:
                unit: NormalForm = {(("i", Fraction(1)),): Fraction(-1 if exponent.numerator % 4 == 3 else 1)}
                return self.product([unit, self.root(-value, exponent)])
            if exponent.denominator % 2 == 0:
                raise NormalizeError("an even root of a negative number")
            sign = -1 if exponent.numerator % 2 else 1
            return {m: sign * c for m, c in self.root(-value, exponent).items()}
        monomial = [(p, n * exponent) for p, n in factorize(value.numerator).items()]
        monomial += [(p, -n * exponent) for p, n in factorize(value.denominator).items()]
        return self.product([self.times(((p, e),), Fraction(1), (), Fraction(1)) for p, e in monomial])

    def function(self, name: str, arguments: list[NormalForm]) -> NormalForm:
        """Apply a function: computed if the result is exact, else kept as an atom."""
        values = [rational(argument) for argument in arguments]
        exact = _exact(name, values) if all(value is not None for value in values) else None
        if exact is not None:
            return constant(exact)
        if name in ("ln", "log") and values[0] is not None and values[0] > 0:
            return self.logarithm(name, values[0], arguments[1:])
        if name == "exp":
            return self.power({(("e", Fraction(1)),): Fraction(1)}, arguments[0])
        return {(((name, *map(_key, arguments)), Fraction(1)),): Fraction(1)}

    def logarithm(self, name: str, value: Fraction, base: list[NormalForm]) -> NormalForm:
        """Expand the logarithm of a rational number into those of its prime factors, over that of the base."""
        if base:
            above, below = self.logarithm("ln", value, []), self.function("ln", base)
            return self.product([above, self.power(below, constant(-1))])
        powers = factorize(value.numerator).items(), ((p, -n) for p, n in factorize(value.denominator).items())
        return {(((name, p), Fraction(1)),): Fraction(n) for group in powers for p, n in group}


def constant(value: Fraction | int) -> NormalForm:
    """Return the normal form of a number."""
    return {(): Fraction(value)} if value else {}


def rational(form: NormalForm) -> Fraction | None:
    """Return the value of a normal form that is a rational number, else None."""
    return Fraction(0) if not form else form[()] if list(form) == [()] else None


def factorize(n: int) -> dict[int, int]:
    """Return the small prime factors of a number and its cofactor, which may be composite, with their exponents."""
    found: dict[int, int] = {}
    for p in (2, *range(3, MAX_FACTOR, 2)):
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


def _sum(forms: list[NormalForm]) -> NormalForm:
    total: NormalForm = {}
    for form in forms:
        for monomial, coefficient in form.items():
            total[monomial] = total.get(monomial, Fraction(0)) + coefficient
    return {monomial: coefficient for monomial, coefficient in total.items() if coefficient}


def _key(form: NormalForm) -> tuple[Any, ...]:
    """Return a hashable form; sorted by repr, because atoms of several types do not compare."""
    return tuple(sorted(form.items(), key=repr))


def _small(exponent: Fraction) -> int:
    if exponent > MAX_POWER:
        raise NormalizeError("a high power")
    return int(exponent)


def _whole_power(base: Fraction, exponent: Fraction | int) -> Fraction:
    bits = max(abs(base.numerator), base.denominator).bit_length() - 1
    if bits * abs(int(exponent)) > MAX_BITS:
        raise NormalizeError("a large number")
    if not base and exponent < 0:
        raise ParseError("division by zero")
    return base ** int(exponent)


def _exact(name: str, values: list[Fraction | None]) -> Fraction | None:
    x = values[0]
    assert x is not None
    if name in ("floor", "ceil", "abs"):
        return Fraction({"floor": x.__floor__(), "ceil": x.__ceil__()}.get(name, 0)) if name != "abs" else abs(x)
    if name == "factorial" and x.denominator == 1 and 0 <= x <= MAX_FACTORIAL:
        return Fraction(math.factorial(int(x)))
    if name == "double_factorial" and x.denominator == 1 and 0 <= x <= MAX_FACTORIAL:
        return Fraction(math.prod(range(int(x), 0, -2)))
    if name == "binom":
        y = values[1]
        assert y is not None
        if x.denominator == y.denominator == 1 and 0 <= y <= x <= 2 * MAX_FACTORIAL:
            return Fraction(math.comb(int(x), int(y)))
    return Fraction(0) if (name in ("sin", "tan") and not x) or (name in ("ln", "log") and x == 1) else None
