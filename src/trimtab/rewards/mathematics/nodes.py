"""What an expression is: numbers, symbols, and what is made of them; and the two ways in which a text is none."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

NodeKind = Literal["number", "symbol", "sum", "product", "power", "function", "pm"]


class NotReadError(Exception):
    """The text is not an expression of this grammar."""


class TooCostlyError(Exception):
    """The text asks for more work than an answer is worth."""


@dataclass(frozen=True, slots=True)
class Node:
    """An expression. `value` of a number, `name` of a symbol or function; `places` of a number written as a decimal.

    `literal` marks what is written as one number (`-3`, `2/3`, `1\\frac45`, `4.5\\times10^{33}`): no work left.
    """

    kind: NodeKind
    parts: tuple[Node, ...] = ()
    name: str = ""
    value: Fraction = Fraction(0)
    places: int | None = None
    literal: bool = False


def number(value: Fraction | int, places: int | None = None) -> Node:
    """A number as an expression."""
    return Node("number", value=Fraction(value), places=places, literal=True)


def negative(node: Node) -> Node:
    """Minus the expression."""
    if node.kind == "number":
        return Node("number", value=-node.value, places=node.places, literal=True)
    return Node("product", (number(-1), node), literal=node.literal)


def reciprocal(node: Node) -> Node:
    """One over the expression."""
    return Node("power", (node, number(-1)), literal=node.literal)


def literal_value(node: Node) -> Fraction | None:
    """The value of what is written as one number; None for anything else, and for a division by nothing."""
    if node.kind == "number":
        return node.value
    if not node.literal:
        return None
    values = [literal_value(part) for part in node.parts]
    if any(value is None for value in values):
        return None
    if node.kind == "power":
        base, exponent = values[0] or Fraction(0), values[1] or Fraction(0)
        return base ** int(exponent) if base or exponent > 0 else None
    result = Fraction(1)
    for value in values:
        result *= value or Fraction(0)
    return result
