"""Parsed answers, their expression trees, and the two errors of the parser."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import Literal

AnswerKind = Literal[
    "value", "list", "set", "tuple", "union", "matrix", "equation", "inequality", "chain", "text", "base", "opaque",
    "none",
]  # fmt: skip
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


def make_sum(terms: list[Node]) -> Node:
    """Return the sum of some terms, or the only one."""
    return terms[0] if len(terms) == 1 else Node("sum", tuple(terms))


def make_product(factors: list[Node]) -> Node:
    """Return the product of some factors, or the only one."""
    return factors[0] if len(factors) == 1 else Node("product", tuple(factors), literal=_is_literal(factors))


def _is_literal(factors: list[Node]) -> bool:
    """Return whether a product is written as one number: a fraction, or a number times a power of ten."""
    if len(factors) != 2:
        return False
    first, second = factors
    if first.kind == "number" and second.kind == "power":
        base, exponent = second.children
        if second.literal and exponent.value == -1:
            return base.kind == "number" or (base.literal and base.kind == "product")
        whole = literal_value(exponent)
        small = whole is not None and abs(whole) <= 400 and whole == int(whole)
        return small and base.kind == "number" and base.value == 10
    return first.literal and first.kind == "product" and second.literal and second.kind == "power"


def is_number_or_reciprocal(node: Node) -> bool:
    """Return whether an expression is a number, or one over a number."""
    return node.kind == "number" or (node.kind == "power" and node.children[0].kind == "number")


def expand_plus_minus(node: Node) -> list[Node]:
    """Return the two values of an expression with one plus-or-minus, else the expression itself."""
    choices = [expand_plus_minus(part) for part in node.children]
    if sum(len(each) > 1 for each in choices) + (node.kind == "pm") > 1:
        raise ParseError("more than one plus-or-minus")
    if node.kind == "pm":
        a, b = node.children
        signed = [b, negate(b)]
        return signed if a.kind == "number" and a.value == 0 else [Node("sum", (a, each)) for each in signed]
    if all(len(each) == 1 for each in choices):
        return [node]
    return [replace(node, children=parts, literal=False) for parts in product(*choices)]


def derivative_name(above: Node, below: Node) -> str:
    """Return the name of the derivative that a fraction is (`dx/dt`), empty for any other fraction."""
    return f"{_as_name(above)}/{_as_name(below)}" if _leads_with_d(above) and _leads_with_d(below) else ""


def _leads_with_d(node: Node) -> bool:
    first = node.children[0] if node.kind == "product" else node
    if first.kind == "power":
        first = first.children[0]
    return first.kind == "symbol" and first.name in ("d", "partial")


def _as_name(node: Node) -> str:
    """Return an expression as the name of a symbol."""
    if node.kind == "number":
        return str(node.value)
    return f"{node.name or node.kind}({' '.join(map(_as_name, node.children))})" if node.children else node.name


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer: its kind, its members, and for a value its expression, unit and percent sign."""

    kind: AnswerKind
    text: str  # of the whole
    members: tuple[ParsedAnswer, ...] = ()
    node: Node | None = None
    unit: str | None = None
    percent: bool = False
    brackets: str = ""  # of a tuple, which includes intervals such as `[0,1)`
    name: str = ""  # the variable of an inequality or of a list's values, or the left side of a solved equation
    joint: str = ""  # `and` or `or` where that joins a list, `interval` for a tuple that is no point
    worded: bool = False  # has words that no grammar reads


INFINITY = ParsedAnswer("value", "oo", node=Node("symbol", name="oo"))
MINUS_INFINITY = ParsedAnswer("value", "-oo", node=negate(Node("symbol", name="oo")))


def negated(value: ParsedAnswer) -> ParsedAnswer:
    """Return minus a value."""
    if value is INFINITY or value is MINUS_INFINITY:
        return MINUS_INFINITY if value is INFINITY else INFINITY
    return replace(value, text=f"-({value.text})", node=None if value.node is None else negate(value.node))


def scaled(cell: ParsedAnswer, factor: Node, scale: str) -> ParsedAnswer:
    """Multiply a cell by what is written as `scale`; a product of two plain numbers is computed."""
    if literal_value(factor) == 1:
        return cell
    text = f"{scale} ({cell.text})"
    if cell.node is None or cell.unit or cell.percent:
        return ParsedAnswer("opaque", text)
    x, y = literal_value(factor), literal_value(cell.node)
    node = Node("product", (factor, cell.node)) if x is None or y is None else number(x * y)
    return replace(cell, text=text, node=node)


def intersect(members: list[ParsedAnswer], text: str) -> ParsedAnswer:
    """Return the interval of two inequalities, one of which bounds from below and the other from above."""
    low = [member for member in members if member.members[1] is INFINITY]
    high = [member for member in members if member.members[0] is MINUS_INFINITY]
    if len(members) != 2 or len(low) != 1 or len(high) != 1:
        return ParsedAnswer("list", text, tuple(members))
    ends = low[0].members[0], high[0].members[1]
    return ParsedAnswer("inequality", text, ends, brackets=low[0].brackets[0] + high[0].brackets[1], name=low[0].name)
