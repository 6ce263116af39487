"""Expression trees, and the two errors of the parser."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

NodeKind = Literal["number", "symbol", "sum", "product", "power", "function", "pm"]


class ParseError(Exception):
    """The text is not an expression of this grammar."""


class TooCostlyError(Exception):
    """Evaluating the text would exceed the limits on work."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of an expression tree: `value` of a number, `name` of a symbol or function, `children` of the rest.

    `literal` marks what is written as one number (`-3`, `2/3`, `1\\frac45`, `4.5\\times10^{33}`): nothing to compute.
    """

    kind: NodeKind
    children: tuple[Node, ...] = ()
    name: str = ""
    value: Fraction = Fraction(0)
    decimals: int | None = None  # how many digits follow the point of a number written as a decimal
    literal: bool = False


def number(value: Fraction | int, decimals: int | None = None) -> Node:
    """Return the node of a number."""
    return Node("number", value=Fraction(value), decimals=decimals, literal=True)


def negate(node: Node) -> Node:
    """Return minus the expression."""
    if node.kind == "number":  # keeps -0.5 a decimal number, with its digits
        return Node("number", value=-node.value, decimals=node.decimals, literal=True)
    return Node("product", (number(-1), node), literal=node.literal)


def reciprocal(node: Node) -> Node:
    """Return one over the expression."""
    return Node("power", (node, number(-1)), literal=node.literal)


def literal_value(node: Node) -> Fraction | None:
    """Return the value of a literal number; None for anything else, and for a division by zero."""
    if node.kind == "number":
        return node.value
    if not node.literal:
        return None
    values = [literal_value(child) for child in node.children]
    if any(value is None for value in values):
        return None
    if node.kind == "power":
        base, exponent = values[0] or Fraction(0), values[1] or Fraction(0)
        return base ** int(exponent) if base or exponent > 0 else None
    return math.prod((value or Fraction(0) for value in values), start=Fraction(1))


def symbols(node: Node) -> set[str]:
    """Return the names in an expression, constants included."""
    own = {node.name} if node.kind == "symbol" else set()
    return own.union(*(symbols(child) for child in node.children))
