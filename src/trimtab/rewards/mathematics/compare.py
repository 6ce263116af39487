"""Whether an answer is the truth: structures member by member, values exactly.

The truth's own form decides what is asked: one value or several, an order or none, a per cent sign, how many digits.
Where exact algebra cannot tell, `equal` is asked; the parent asks nobody and a worker asks sympy, by the same code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

from trimtab.rewards.mathematics.algebra import Algebra, Form, TooHardError, differ, evaluate, rational
from trimtab.rewards.mathematics.answers import Shape, words
from trimtab.rewards.mathematics.nodes import Node, NotReadError, literal_value, negative
from trimtab.rewards.mathematics.parse import foreign
from trimtab.rewards.mathematics.units import agree
from trimtab.rewards.verdicts import VerdictKind

ROUNDED_DIGITS = 4  # a decimal truth of so many digits or more may be a rounded one

Equal = Callable[[Shape, Shape], bool]


def compare(truth: Shape, found: Shape, equal: Equal) -> VerdictKind:
    """`correct`, `wrong`, or `ambiguous` where several answers stand for one."""
    if same(truth, found, equal):
        return "correct"
    several = found.kind in ("list", "set", "chain", "union") or (found.kind == "equation" and not found.name)
    return "ambiguous" if several and truth.kind in ("value", "text", "base", "opaque") else "wrong"


def same(truth: Shape, found: Shape, equal: Equal) -> bool:
    """Whether two shapes are the same answer."""
    if "none" in (truth.kind, found.kind):
        return False
    if truth.text == found.text:
        return True
    if truth.kind == "text" or found.kind == "text":
        worded = truth.kind == "text" or (truth.text.isalpha() and (len(truth.text) > 1 or truth.text.isupper()))
        return worded and _words(truth) == _words(found) != ""
    truth, found = _unwrapped(truth, found)
    if truth.kind == "inequality" or found.kind == "inequality":
        return _ranges(truth, found, equal)
    if truth.kind == found.kind:
        return _ALIKE[truth.kind](truth, found, equal)
    if {truth.kind, found.kind} == {"list", "set"}:
        return _unordered(truth.parts, found.parts, equal)
    if truth.kind == "list" and found.kind == "tuple" and found.brackets == "()":
        return _ordered(truth.parts, found.parts, equal)
    if truth.kind == "chain":  # a truth that says the same twice
        return any(same(part, found, equal) for part in truth.parts)
    return _opaque(truth, found, equal)


def _unwrapped(truth: Shape, found: Shape) -> tuple[Shape, Shape]:
    """`x = 5` and `5` are the same answer, where x is a lone variable that the other side does not have."""
    if truth.kind == "equation" and truth.name and found.kind not in ("equation", "chain", "list", "inequality"):
        return truth.parts[1], found
    if found.kind == "equation" and found.name and truth.kind not in ("equation", "chain", "list", "inequality"):
        known = symbols(truth.node) if truth.node else set()
        if found.name not in known:
            return truth, found.parts[1]
    return truth, found


def _words(shape: Shape) -> str:
    if shape.kind == "text":
        return shape.name
    text = shape.text.strip("() .")
    return words(text) if len(text) > 1 or text.isupper() else shape.text


def _ordered(truth: Sequence[Shape], found: Sequence[Shape], equal: Equal) -> bool:
    return len(truth) == len(found) and all(same(t, f, equal) for t, f in zip(truth, found, strict=True))


def _unordered(truth: Sequence[Shape], found: Sequence[Shape], equal: Equal) -> bool:
    """Every member of one has its own in the other."""
    left = list(found)
    for member in truth:
        match = next((f for f in left if same(member, f, equal)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _sets(truth: Shape, found: Shape, equal: Equal) -> bool:
    """Sets, in which a repeat does not count."""
    return all(any(same(t, f, equal) for f in found.parts) for t in truth.parts) and all(
        any(same(t, f, equal) for t in truth.parts) for f in found.parts
    )


def _tuples(truth: Shape, found: Shape, equal: Equal) -> bool:
    return truth.brackets == found.brackets and _ordered(truth.parts, found.parts, equal)


def _ranges(truth: Shape, found: Shape, equal: Equal) -> bool:
    """Intervals and inequalities: `x >= 2` and `[2, oo)`."""
    pair = {truth.kind, found.kind}
    if not pair <= {"inequality", "tuple"} or (pair == {"inequality"} and truth.name != found.name):
        return False
    return _tuples(truth, found, equal)


def _equations(truth: Shape, found: Shape, equal: Equal) -> bool:
    """Equal sides, or the same equation up to a factor: `y = 2x + 3` is `2x - y + 3 = 0`."""
    if truth.name and found.name:
        return truth.name == found.name and same(truth.parts[1], found.parts[1], equal)
    sides = [side.node for side in (*truth.parts, *found.parts)]
    if any(side is None for side in sides) or any(p.unit or p.percent for p in (*truth.parts, *found.parts)):
        return _opaque(truth, found, equal)
    a, b, c, d = (side for side in sides if side is not None)
    try:
        left, right = (Algebra().form(Node("sum", (x, negative(y)))) for x, y in ((a, b), (c, d)))
    except (TooHardError, NotReadError):
        return equal(truth, found)
    if _proportional(left, right):
        return True
    return left.keys() == right.keys() and not _all_rational(left) and equal(truth, found)


def _proportional(left: Form, right: Form) -> bool:
    if left.keys() != right.keys() or not left:
        return False
    return len({coefficient / right[monomial] for monomial, coefficient in left.items()}) == 1


def _all_rational(form: Form) -> bool:
    return all(not isinstance(atom, tuple) for monomial in form for atom, _ in monomial)


def _opaque(truth: Shape, found: Shape, equal: Equal) -> bool:
    """Where one of the two could not be read, sympy may: but never for a truth that is a plain number."""
    if truth.kind == "value" and truth.node is not None and not symbols(truth.node):
        return False
    if "opaque" not in (truth.kind, found.kind) or (truth.kind != "opaque" and not foreign(found.text)):
        return False
    return found.kind not in ("list", "chain", "inequality", "set") and equal(truth, found)


def _values(truth: Shape, found: Shape, equal: Equal) -> bool:
    a, b = truth.node, found.node
    assert a is not None and b is not None
    if found.unit is None and not symbols(a) and (stripped := _letter_unit(b)) is not None:
        found = Shape("value", found.text, node=stripped[0], unit=stripped[1])
        b = stripped[0]
    if not agree(truth.unit, found.unit) or (found.percent and not truth.percent):
        return False
    if found.unit == "deg" and truth.unit is None and literal_value(a) is None:
        return False  # an angle in radians
    if "oo" in symbols(a) | symbols(b):
        return _infinity(a) == _infinity(b) != 0
    if unfinished(b) and not unfinished(a):
        return False
    return _equal_nodes(truth, found, a, b, equal)


def _equal_nodes(truth: Shape, found: Shape, a: Node, b: Node, equal: Equal) -> bool:
    x, y = literal_value(a), literal_value(b)
    if x is not None and y is not None:
        return x == y or _rounds_to(a, b, y)
    if x is not None and _rounds_to(a, b, None):
        return True
    if differ(a, b):
        return False
    try:
        left, right = Algebra().form(a), Algebra().form(b)
    except NotReadError:
        return False  # a division by nothing
    except TooHardError:
        return equal(truth, found)
    both_rational = rational(left) is not None and rational(right) is not None
    return left == right or (not both_rational and equal(truth, found))


def _rounds_to(truth: Node, found: Node, value: Fraction | None) -> bool:
    """Whether a decimal truth is what the answer rounds to in the truth's last place.

    Only where the truth has enough digits to be a rounded number, and the answer is exact and has no end as a decimal:
    3.142 is pi and 0.3333 a third, but 12.5 is not 12.46.
    """
    if truth.kind != "number" or truth.places is None or found.kind == "number":
        return False
    if abs(truth.value) * Fraction(10) ** truth.places < 10 ** (ROUNDED_DIGITS - 1):
        return False
    if value is None:
        if symbols(found) - {"pi", "e"} or unfinished(found):
            return False
        try:
            number = complex(evaluate(found, (1.0,)))
        except (ArithmeticError, ValueError, TypeError, TooHardError):
            return False
        if number.imag or not math.isfinite(number.real):
            return False
        value = Fraction(number.real)
    elif _ends(value):
        return False
    return abs(value - truth.value) <= Fraction(1, 2) / Fraction(10) ** truth.places


def _ends(value: Fraction) -> bool:
    """Whether a fraction is a decimal of finitely many places."""
    below = value.denominator
    for prime in (2, 5):
        while below % prime == 0:
            below //= prime
    return below == 1


def symbols(node: Node) -> set[str]:
    """The names in an expression, constants included."""
    own = {node.name} if node.kind == "symbol" else set()
    return own.union(*(symbols(part) for part in node.parts))


def unfinished(node: Node) -> bool:
    """Whether a sum or product of plain numbers is left to be worked out: such an answer says the question again."""
    if node.literal:
        return False
    if node.kind == "product" and node.name != "degrees" and sum(map(_factor, node.parts)) > 1:
        return True
    if node.kind == "sum" and sum(_is_rational(part) for part in node.parts) > 1:
        return True
    return any(unfinished(part) for part in node.parts)


def _factor(node: Node) -> bool:
    """Whether a part of a product is a number, and not one that it is divided by."""
    return literal_value(node) is not None and not (node.kind == "power" and node.parts[1].value == -1)


def _is_rational(node: Node) -> bool:
    if symbols(node):
        return False
    try:
        return rational(Algebra(100).form(node)) is not None
    except (TooHardError, NotReadError):
        return False


def _infinity(node: Node) -> int:
    """1 for infinity, -1 for minus infinity, 0 for anything else."""
    if node.kind == "symbol":
        return int(node.name == "oo")
    if node.kind == "product" and len(node.parts) == 2 and literal_value(node.parts[0]) == -1:
        return -_infinity(node.parts[1])
    return 0


def _letter_unit(node: Node) -> tuple[Node, str] | None:
    """`5 m` where no variable is asked for: the number, and its unit."""
    if node.kind == "product" and len(node.parts) == 2 and node.parts[1].kind == "symbol":
        first, second = node.parts
        if second.name in ("m", "g", "s", "h") and literal_value(first) is not None:
            return first, second.name
    return None


def _bases(truth: Shape, found: Shape, equal: Equal) -> bool:
    return truth.name == found.name


_ALIKE: dict[str, Callable[[Shape, Shape, Equal], bool]] = {
    "value": _values,
    "list": lambda truth, found, equal: _unordered(truth.parts, found.parts, equal),
    "set": _sets,
    "tuple": _tuples,
    "union": lambda truth, found, equal: _unordered(truth.parts, found.parts, equal),
    "matrix": lambda truth, found, equal: _ordered(truth.parts, found.parts, equal),
    "equation": _equations,
    "chain": lambda truth, found, equal: False,
    "base": _bases,
    "opaque": _opaque,
}
