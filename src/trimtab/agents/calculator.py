"""A calculator on integers, fractions and decimals: exact, bounded, and without `eval`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from fractions import Fraction

MAX_CHARS, MAX_DEPTH = 1_000, 50
MAX_PLACES = 30  # of a decimal; longer ones are written as fractions
MAX_BITS = 8_192  # of a numerator or denominator: 2,466 digits
_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*|\.\d+)|(\*\*|//|[-+*/%^()]))")
_SAME = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})
_OPERATORS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": lambda left, right: Fraction(left // right),
    "%": operator.mod,
}
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "%": 2}


def calculator(expression: str) -> str:
    """Calculate exactly with + - * / // % ** and parentheses.

    Args:
        expression: An arithmetic expression of whole numbers and decimals, such as (12.5 + 3) * 4 / 7.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression has {len(expression):,} characters, more than {MAX_CHARS:,}")
    parser = _Parser(expression.translate(_SAME))
    try:
        value = parser.sum(1, MAX_DEPTH)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    if parser.token:
        raise ValueError(f"unexpected {parser.token!r}")
    return written(value)


def written(value: Fraction) -> str:
    """Return a number as text: a whole number, a decimal if it ends, else a fraction and its first digits."""
    if value.denominator == 1:
        return str(value.numerator)
    for places in range(1, MAX_PLACES + 1):
        if (value * 10**places).denominator == 1:
            digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
            return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    digits = "" if abs(value) >= 10**15 or abs(value) < Fraction(1, 10**6) else f" (about {float(value):.10g})"
    return f"{value.numerator}/{value.denominator}{digits}"


class _Parser:
    """Recursive descent; `token` is the next one, empty at the end."""

    def __init__(self, text: str) -> None:
        self.text, self.position, self.token = text.strip(), 0, ""
        self.next()

    def next(self) -> str:
        """Return the token and go on to the one after it."""
        taken = self.token
        found = _TOKEN.match(self.text, self.position)
        if found is None and self.position < len(self.text):
            raise ValueError(f"cannot read {self.text[self.position :][:20]!r}: write numbers, + - * / // % ** and ()")
        self.token = found.group().strip() if found else ""
        self.position = found.end() if found else self.position
        return taken

    def sum(self, least: int, depth: int) -> Fraction:
        """Read operands joined by operators that bind at least so strongly."""
        value = self.operand(depth)
        while (strength := _PRECEDENCE.get(self.token, 0)) >= least:
            apply = _OPERATORS[self.next()]
            value = _bounded(apply(value, self.sum(strength + 1, depth - 1)))
        return value

    def operand(self, depth: int) -> Fraction:
        """Read a number, a sign, a sum in parentheses, and the power after it."""
        if depth == 0:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        token = self.next()
        if token in {"+", "-"}:  # binds less than a power: -2**2 is -4
            value = self.operand(depth - 1)
            return -value if token == "-" else value
        if token == "(":
            value = self.sum(1, depth - 1)
            if self.next() != ")":
                raise ValueError("a closing parenthesis is missing")
        elif token[:1].isdigit() or token[:1] == ".":
            value = Fraction(f"{token}0" if token.endswith(".") else token)
        else:
            raise ValueError(f"a number is missing before {token!r}" if token else "the expression ends too early")
        if self.token in {"**", "^"}:
            self.next()
            return _power(value, self.operand(depth - 1))
        return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("exponents must be whole numbers")
    # Known before it is computed: 9**9**9 has 370 million digits.
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) not in {0, 1} and abs(exponent) * (bits - 1) > MAX_BITS:
        raise ValueError("the number is too large")
    count = int(exponent)
    if abs(base) in {0, 1}:  # these may have exponents of any size, of which only the sign and parity matter
        count = (2 + count % 2) * (1 if count > 0 else -1) if count else 0
    return _bounded(Fraction(base**count))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("the number is too large")
    return value
