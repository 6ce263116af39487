"""What an answer would cost to evaluate, told from how it is written, before anything is evaluated.

Towers of powers, factorials, huge binomials, sums and products over long ranges, and deep nesting are turned away.
The limits of the worker stand behind this: what is missed here costs a second, not the run.
"""

from __future__ import annotations

import math
import re

from trimtab.rewards.mathematics.algebra import TooHardError, evaluate
from trimtab.rewards.mathematics.nodes import Node, TooCostlyError

MOST_BITS = 20_000  # of a number that would be computed
LARGEST_FACTORIAL = 2_000
DEEPEST_BRACES = 20
HIGHEST_TOWER = 2
LARGEST_EXPONENT = 400  # of something with variables in it: (x+1)^{400}
LONGEST_OPAQUE = 500  # characters of what only a worker can read

_GROWING = frozenset(("factorial", "binom", "exp", "sinh", "cosh", "tanh"))
_BIG = re.compile(r"\d{5,}")
_RAISED = re.compile(r"(?:\^|\*\*)\s*\{?\s*[-+(]*\s*(\d+)")
_ENDLESS = re.compile(r"\\(?:sum|prod|int|iint|oint|lim|bigcup|binom|uparrow)(?![a-zA-Z])")
_STEPS = re.compile(r"!|\\[dt]?binom|\\choose|\*\*")


def bits(node: Node) -> float:
    """About how many bits the largest or smallest number in an expression takes; `TooCostlyError` where too many."""
    return _bits(node, 0)


def check_text(text: str) -> None:
    """The same for a text that is no expression of ours, by what stands in it."""
    if len(text) > LONGEST_OPAQUE:
        raise TooCostlyError("a long text")
    if _tower(text) > HIGHEST_TOWER or text.count("**") > 1 or any(len(n) > 3 for n in _RAISED.findall(text)):
        raise TooCostlyError("a tower of powers")
    if (_STEPS.search(text) or len(_ENDLESS.findall(text)) > 1 or "^" in text) and _BIG.search(text):
        raise TooCostlyError("large numbers where work is asked for")
    if len(_ENDLESS.findall(text)) > 3 or text.count("!") > 3:
        raise TooCostlyError("sums of sums")


def _tower(text: str) -> int:
    """How many powers stand in each other's exponents, and whether braces are nested beyond all use."""
    highest = depth = 0
    raised: list[int] = []
    for place, char in enumerate(text):
        if char in "{(":
            depth += 1
            before = text[:place].rstrip()[-1:] if place else ""
            if before in ("^", "*"):
                raised.append(depth)
        elif char in "})":
            while raised and raised[-1] >= depth:
                raised.pop()
            depth -= 1
        elif char == "^" or text.startswith("**", place):
            highest = max(highest, len(raised) + 1)
        if depth > DEEPEST_BRACES:
            raise TooCostlyError("nested too deep")
    return max(highest, text.count("^") if re.search(r"\^[^{}\s]\s*\^[^{}\s]\s*\^", text) else 0)


def _bits(node: Node, tower: int) -> float:
    """About how many bits the value's integers have; variables count as one."""
    if tower > HIGHEST_TOWER:
        raise TooCostlyError("a tower of powers")
    if node.kind == "number":
        return float(max(abs(node.value.numerator), node.value.denominator).bit_length())
    if node.kind == "symbol":
        return 1.0
    raised = node.kind == "power" and not node.parts[1].literal
    parts = [_bits(part, tower + (raised and place == 1)) for place, part in enumerate(node.parts)]
    if node.kind == "power":
        size = parts[0] * _size(node.parts[1], parts[1])
        if node.parts[0].kind in ("sum", "product") and _size(node.parts[1], parts[1]) > LARGEST_EXPONENT:
            raise TooCostlyError("a high power of a sum")
    elif node.kind == "function" and node.name in _GROWING:
        n = _size(node.parts[0], parts[0])
        if n > LARGEST_FACTORIAL:
            raise TooCostlyError(node.name)
        size = n * math.log2(n + 2)
    else:
        size = sum(parts)
    if size > MOST_BITS:
        raise TooCostlyError("a large number")
    return size


def _size(node: Node, bits: float) -> float:
    """At most how large a value is that has so many bits; variables are small."""
    if node.kind == "number":
        return float(abs(node.value)) if abs(node.value) < 10**9 else 1e9
    if node.kind == "symbol":
        return 1.0
    if _variable(node):
        return max(bits, 1.0)
    try:
        size = abs(complex(evaluate(node, (1.0,))))
    except (ArithmeticError, ValueError, TypeError, TooHardError):
        return 1e9
    return size if size < 1e9 else 1e9


def _variable(node: Node) -> bool:
    return (node.kind == "symbol" and node.name not in ("pi", "e")) or any(_variable(part) for part in node.parts)
