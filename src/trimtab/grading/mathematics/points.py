"""The points at which two expressions are compared, and the numbers that their variables may stand for there.

The points are drawn by a hash of both answers as they are written. So a pair gets the same verdict in every process,
and no answer can be made to fit its points: whatever is changed about it moves them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from trimtab.grading.mathematics.nodes import Node, literal_value, symbols

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


@dataclass
class Domains:
    """The variables of an expression that count (1, 2, 3, ...), and those that are positive.

    `n` counts in `n!`, `\\binom{n}{k}`, `(-1)^n` and `\\lfloor n/2\\rfloor`, and `x` is positive in `\\sqrt{x}`.
    """

    counting: set[str] = field(default_factory=set)
    positive: set[str] = field(default_factory=set)

    def read(self, node: Node) -> None:
        """Add what an expression says about its variables."""
        if node.kind == "function":
            if node.name in COUNTED_BY:
                self.counting |= symbols(node) - CONSTANTS
            elif node.name in ROUNDED_BY:
                self.counting |= {name for name in symbols(node) if name[0] in _WHOLE_LETTERS and name not in CONSTANTS}
        elif node.kind == "power":
            self._read_power(*node.children)
        for child in node.children:
            if child.children:
                self.read(child)

    def _read_power(self, base: Node, exponent: Node) -> None:
        value = literal_value(exponent)
        if value is None:
            turning = literal_value(base)
            if (turning is not None and turning < 0) or base.name == "i":
                self.counting |= symbols(exponent) - CONSTANTS
        elif value.denominator % 2 == 0:
            self.positive.update(_odd_factors(base))


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
        self.domains = Domains()
        self.domains.read(truth)
        self.restricted = bool(self.domains.counting)
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
            if name in self.domains.counting:
                return backend.whole(self._whole(name, number))
            drawn = self._draw(name)
            word = int.from_bytes(drawn[8 * number : 8 * number + 8], "little")
            size = (0.4 + 2.2 * (word >> 32) / 2**32) * (3000.0 if number in _FAR else 1.0)
            # An irrational part: functions with a period as small as a float's last digit vanish at all rationals.
            size = backend.irrational(size, word & 0xFFFF_FFFF)
            sign = _SIGNS[number]
            minus = sign == "-" or (sign == "?" and word & 1)
            return -size if minus and name not in self.domains.positive else size

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
        signed = name not in self.domains.counting and name not in self.domains.positive
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
