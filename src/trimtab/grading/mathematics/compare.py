"""Compare an extracted answer with the ground truth: structures member by member, values exactly.

The truth's structure decides what is accepted: one value or several, ordered or not, a percent sign, how many digits.
Where exact algebra cannot decide, `fallback` is called; the trainer's process notes such pairs, a worker runs sympy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from trimtab.grading.mathematics.answer import normalize_words
from trimtab.grading.mathematics.nodes import Node, ParsedAnswer, ParseError, literal_value, negate, symbols
from trimtab.grading.mathematics.normal_form import MAX_FACTOR, NormalForm, NormalFormBuilder, NormalizeError, rational
from trimtab.grading.mathematics.points import CONSTANTS, Points, float_value, numerically_different
from trimtab.grading.mathematics.tokenizer import has_foreign_commands
from trimtab.grading.mathematics.units import compatible_units, parse_unit
from trimtab.grading.verdicts import VerdictKind

_LETTER_UNITS = frozenset("m g s h N J W V L".split())  # not K, k, M, G, T, B, which scale
ROUNDED_DIGITS = 4  # a decimal truth with at least so many digits may be a rounded one
DOUBLE_DIGITS = 15  # a decimal answer with at least so many digits may be a fraction

Fallback = Callable[[ParsedAnswer, ParsedAnswer], bool]


def compare(truth: ParsedAnswer, extracted: ParsedAnswer, fallback: Fallback) -> VerdictKind:
    """Return `correct`, `wrong`, or `ambiguous` where several answers were given and the truth is one."""
    if equivalent(truth, extracted, fallback):
        return "correct"
    nameless = extracted.kind == "equation" and not extracted.name
    several = nameless or extracted.joint in ("and", "or") or extracted.kind in ("list", "set", "chain", "union")
    return "ambiguous" if several and truth.kind in ("value", "text", "base", "opaque") else "wrong"


def equivalent(truth: ParsedAnswer, extracted: ParsedAnswer, fallback: Fallback) -> bool:
    """Return whether two parsed answers are the same."""
    if "none" in (truth.kind, extracted.kind):
        return False
    truth, extracted = _unwrap_equation(truth, extracted)
    if truth.text == extracted.text:
        return True
    if truth.kind == "text" or extracted.kind == "text":
        worded = truth.kind == "text" or (truth.text.isalpha() and (len(truth.text) > 1 or truth.text.isupper()))
        return worded and _words(truth) == _words(extracted) != ""
    if truth.kind == "inequality" or extracted.kind == "inequality":
        return _equal_ranges(truth, extracted, fallback)
    if truth.kind == extracted.kind:
        return _COMPARATORS[truth.kind](truth, extracted, fallback)
    if {truth.kind, extracted.kind} == {"list", "set"}:
        # Repeated members do not count if the truth is a set.
        equal = _equal_sets if truth.kind == "set" else _equal_unordered
        return _labelled(truth) <= _labelled(extracted) and equal(truth, extracted, fallback)
    if truth.kind == "list" and extracted.kind == "tuple" and extracted.brackets == "()" and not extracted.joint:
        return _equal_ordered(truth, extracted, fallback)
    if truth.kind == "tuple" and truth.brackets == "()" and extracted.kind == "list":  # x = 1, y = 2 for (1, 2)
        return _named_in_order(extracted) and _equal_ordered(truth, extracted, fallback)
    if truth.kind == "chain":  # a truth that gives the same value in several ways
        return any(equivalent(member, extracted, fallback) for member in truth.members)
    return _equal_opaque(truth, extracted, fallback)


def _unwrap_equation(truth: ParsedAnswer, extracted: ParsedAnswer) -> tuple[ParsedAnswer, ParsedAnswer]:
    """Take `x = 5` for `5` where x is a single variable that the other answer does not contain."""
    if "equation" not in (truth.kind, extracted.kind):
        return truth, extracted
    relations = ("equation", "chain", "list", "inequality")
    if truth.kind == "equation" and truth.name and extracted.kind not in relations:
        return truth.members[1], extracted
    if extracted.kind == "equation" and extracted.name and truth.kind not in relations:
        known = symbols(truth.node) if truth.node else set()
        if extracted.name not in known:
            return truth, extracted.members[1]
    return truth, extracted


def _words(answer: ParsedAnswer) -> str:
    if answer.kind == "text":
        return answer.name
    text = answer.text.strip("() .")
    return normalize_words(text) if len(text) > 1 or text.isupper() else answer.text


def _equal_ordered(truth: ParsedAnswer, extracted: ParsedAnswer, fallback: Fallback) -> bool:
    pairs = zip(truth.members, extracted.members, strict=False)
    return len(truth.members) == len(extracted.members) and all(equivalent(t, e, fallback) for t, e in pairs)


def _equal_unordered(truth: ParsedAnswer, extracted: ParsedAnswer, fallback: Fallback) -> bool:
    """Match every member of one with a different member of the other."""
    left = list(extracted.members)
    for member in truth.members:
        match = next((e for e in left if equivalent(member, e, fallback)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _equal_lists(truth: ParsedAnswer, extracted: ParsedAnswer, fallback: Fallback) -> bool:
    """Compare lists: values in any order, those of several variables by name, or without names in the truth's order."""
    if truth.name and extracted.name and truth.name != extracted.name:
        return False
    if _labelled(truth):
        if extracted.name or (truth.joint == "or") != (extracted.joint == "or"):
            return False
        if not _labelled(extracted):
            return _equal_ordered(truth, extracted, fallback)
    elif _labelled(extracted) and _has_variables(extracted):
        # The names may stand for positions, but not beside the truth's own: `x = 1, y = 2` is not `x = 1 or x = 2`.
        return not truth.name and _named_in_order(extracted) and _equal_ordered(truth, extracted, fallback)
    elif {member.kind for member in truth.members} == {"tuple"} and len(extracted.members) > len(truth.members):
        distinct = len({member.text for member in truth.members}) == len(truth.members)
        return distinct and _equal_sets(truth, extracted, fallback)  # a solution that is given twice
    return _equal_unordered(truth, extracted, fallback)


def _labelled(answer: ParsedAnswer) -> bool:
    """Return whether the members have different names (`x = 1, y = 2`) or units (`7 apples, 8 pears`), each its own."""
    labels = {member.name or member.unit for member in answer.members}
    return len(labels) > 1 and not labels & {"", None}


def _has_variables(answer: ParsedAnswer) -> bool:
    """Return whether a list has equations of several variables, apart from their subscripts."""
    names = {member.name.partition("_")[0] for member in answer.members if member.kind == "equation"}
    return len(names - {""}) > 1


def _named_in_order(answer: ParsedAnswer) -> bool:
    """Return whether a list gives different variables in the order of the alphabet."""
    names = [member.name if member.kind == "equation" else "" for member in answer.members]
    return all(names) and names == sorted(set(names))


def _equal_sets(truth: ParsedAnswer, extracted: ParsedAnswer, fallback: Fallback) -> bool:
    """Compare sets, in which repeated members do not count."""
    return all(any(equivalent(t, e, fallback) for e in extracted.members) for t in truth.members) and all(
        any(equivalent(t, e, fallback) for t in truth.members) for e in extracted.members
    )


def _equal_tuples(truth: ParsedAnswer, extracted: ParsedAnswer, fallback: Fallback) -> bool:
    return truth.brackets == extracted.brackets and _equal_ordered(truth, extracted, fallback)


def _equal_ranges(truth: ParsedAnswer, extracted: ParsedAnswer, fallback: Fallback) -> bool:
    """Compare intervals and inequalities: `x >= 2` and `[2, oo)`."""
    pair = {truth.kind, extracted.kind}
    if not pair <= {"inequality", "tuple"} or (pair == {"inequality"} and truth.name != extracted.name):
        return False
    return _equal_tuples(truth, extracted, fallback)


def _equal_equations(truth: ParsedAnswer, extracted: ParsedAnswer, fallback: Fallback) -> bool:
    """Compare equations by their sides, or up to a factor: `y = 2x + 3` is `2x - y + 3 = 0`."""
    if truth.name and extracted.name:
        return truth.name == extracted.name and equivalent(truth.members[1], extracted.members[1], fallback)
    solution = truth.members[1].node
    if truth.name and solution is not None and not symbols(solution):
        return False  # `2x = 6` for `x = 3` repeats the question
    sides = (*truth.members, *extracted.members)
    nodes = [side.node for side in sides if side.node is not None]
    if len(nodes) < len(sides) or any(side.unit or side.percent for side in sides):
        return _equal_opaque(truth, extracted, fallback)
    a, b, c, d = nodes
    try:
        left, right = (NormalFormBuilder().normalize(Node("sum", (x, negate(y)))) for x, y in ((a, b), (c, d)))
    except (NormalizeError, ParseError):
        return fallback(truth, extracted)
    if left.keys() != right.keys():
        return False
    # Both sides are brought to the left; the sign and a common factor are free.
    if len({coefficient / right[monomial] for monomial, coefficient in left.items()}) == 1:
        return True
    # If all atoms are symbols and primes, different normal forms are different functions.
    return any(isinstance(atom, tuple) for monomial in left for atom, _ in monomial) and fallback(truth, extracted)


def _is_polynomial(form: NormalForm) -> bool:
    """Return whether all atoms are variables and roots of numbers that are surely prime."""
    return all(
        atom < MAX_FACTOR**2 if isinstance(atom, int) else isinstance(atom, str) and atom not in CONSTANTS
        for monomial in form
        for atom, _ in monomial
    )


def _equal_opaque(truth: ParsedAnswer, extracted: ParsedAnswer, fallback: Fallback) -> bool:
    """Let the fallback decide if one of the two was not parsed, but never for a truth that is a plain number."""
    if truth.kind == "value" and truth.node is not None and not symbols(truth.node):
        return False
    if "opaque" not in (truth.kind, extracted.kind):
        return False
    if truth.worded or extracted.worded or not all(map(has_foreign_commands, (truth.text, extracted.text))):
        return False
    return extracted.kind not in ("list", "chain", "inequality", "set") and fallback(truth, extracted)


def _equal_values(truth: ParsedAnswer, extracted: ParsedAnswer, fallback: Fallback) -> bool:
    a, b = truth.node, extracted.node
    assert a is not None and b is not None
    if extracted.unit is None and not symbols(a) and (stripped := _letter_unit(b)) is not None:
        extracted = ParsedAnswer("value", extracted.text, node=stripped[0], unit=stripped[1])
        b = stripped[0]
    if not compatible_units(truth.unit, extracted.unit) or (extracted.percent and not truth.percent):
        return False
    if truth.percent and extracted.unit is not None:
        return False
    if extracted.unit == "deg" and truth.unit is None and literal_value(a) is None:
        return False  # the truth is an angle in radians
    if "oo" in symbols(a) | symbols(b):  # infinity obeys no algebra: only the plain symbol counts
        return _infinity(a) == _infinity(b) != 0
    if unevaluated(b) and not unevaluated(a):
        return False
    return _equal_nodes(truth, extracted, a, b, fallback)


def _equal_nodes(truth: ParsedAnswer, extracted: ParsedAnswer, a: Node, b: Node, fallback: Fallback) -> bool:
    x, y = literal_value(a), literal_value(b)
    if x is not None and y is not None:
        return x == y or _rounds_to(a, b, y) or _writes_out(a, x, b)
    if x is not None and _rounds_to(a, b, None):
        return True
    points = Points(a, b, f"{truth.text}\0{extracted.text}")
    if numerically_different(points, a, b):  # cheaper than exact algebra, and wrong answers end here
        return False
    try:
        left, right = NormalFormBuilder().normalize(a), NormalFormBuilder().normalize(b)
    except ParseError:
        return False  # a division by zero
    except NormalizeError:
        return fallback(truth, extracted)
    # Different polynomials are different functions, however many points they agree at.
    decided = not points.restricted and _is_polynomial(left) and _is_polynomial(right)
    return left == right or (not decided and fallback(truth, extracted))


def _rounds_to(truth: Node, extracted: Node, value: Fraction | None) -> bool:
    """Return whether a decimal truth is the answer rounded to the truth's last digit.

    Only if the truth has enough digits to be a rounded number, and the answer is exact with no finite decimal:
    3.142 is pi and 0.3333 is 1/3, but 12.5 is not 12.46.
    """
    if truth.kind != "number" or truth.decimals is None or extracted.kind == "number":
        return False
    if abs(truth.value) * Fraction(10) ** truth.decimals < 10 ** (ROUNDED_DIGITS - 1):
        return False
    if value is None:
        if symbols(extracted) - {"pi", "e"} or unevaluated(extracted):
            return False
        number = float_value(extracted)
        if number is None or number.imag or not math.isfinite(number.real):
            return False
        value = Fraction(number.real)  # exact from here on; a float's error is far below half a digit
    elif _is_finite_decimal(value):
        return False
    return abs(value - truth.value) <= Fraction(1, 2) / Fraction(10) ** truth.decimals


def _writes_out(truth: Node, value: Fraction, extracted: Node) -> bool:
    """Return whether an answer writes out a fraction with endless decimals to at least a double's 15 digits."""
    if truth.kind == "number" or extracted.kind != "number" or extracted.decimals is None:
        return False
    digits, exact = (number * Fraction(10) ** extracted.decimals for number in (extracted.value, value))
    if abs(digits) < 10 ** (DOUBLE_DIGITS - 1) or _is_finite_decimal(value):
        return False
    return digits in (round(exact), math.trunc(exact))


def _is_finite_decimal(value: Fraction) -> bool:
    """Return whether only 2 and 5 divide the denominator."""
    return pow(10, value.denominator.bit_length(), value.denominator) == 0


def unevaluated(node: Node) -> bool:
    """Return whether a sum or product of plain numbers is left to compute: such an answer repeats the question."""
    if node.literal:
        return False
    if node.kind == "product" and node.name != "degrees" and sum(map(_is_factor, node.children)) > 1:
        return True
    if node.kind == "sum" and sum(_is_rational(child) for child in node.children) > 1:
        return True
    return any(unevaluated(child) for child in node.children)


def _is_factor(node: Node) -> bool:
    """Return whether a child of a product is a number that is multiplied, not divided by."""
    return literal_value(node) is not None and not (node.kind == "power" and node.children[1].value == -1)


def _is_rational(node: Node) -> bool:
    if symbols(node):
        return False
    try:
        return rational(NormalFormBuilder(100).normalize(node)) is not None
    except (NormalizeError, ParseError):
        return False


def _infinity(node: Node) -> int:
    """Return 1 for infinity, -1 for minus infinity, 0 for anything else."""
    if node.kind == "symbol":
        return int(node.name == "oo")
    if node.kind == "product" and len(node.children) == 2 and literal_value(node.children[0]) == -1:
        return -_infinity(node.children[1])
    return 0


def _letter_unit(node: Node) -> tuple[Node, str] | None:
    """Split `5 m/s` into the number and its unit, for truths without variables."""
    if node.kind != "product" or literal_value(node.children[0]) is None or node.literal:
        return None
    words = []
    for factor in node.children[1:]:
        base, power = factor.children if factor.kind == "power" else (factor, None)
        exponent = Fraction(1) if power is None else literal_value(power)
        if base.kind != "symbol" or base.name not in _LETTER_UNITS or exponent is None:
            return None
        words.append(f"{base.name}^{exponent}")
    unit = parse_unit(" ".join(words))
    return None if unit is None else (node.children[0], unit)


_COMPARATORS: dict[str, Callable[[ParsedAnswer, ParsedAnswer, Fallback], bool]] = {
    "value": _equal_values,
    "list": _equal_lists,
    "set": _equal_sets,
    "tuple": _equal_tuples,
    "union": _equal_unordered,
    "matrix": _equal_ordered,
    "equation": _equal_equations,
    "chain": lambda truth, extracted, fallback: False,
    "base": lambda truth, extracted, fallback: truth.name == extracted.name,
    "opaque": _equal_opaque,
}
