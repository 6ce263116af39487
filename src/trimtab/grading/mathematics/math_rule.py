"""Grade an extracted answer by mathematics: decide what is easy in this process, defer the rest to a worker.

In this order: the same text; numbers exactly; structures member by member; floating-point values that prove a
difference; exact algebra; an estimate of the cost of what is left; and only then sympy, in a worker within limits.
Costly are towers of powers, factorials, huge binomials, sums and products over long ranges, and deep nesting. What the
estimate misses runs into the worker's limits: it costs a second, not the run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import lru_cache

from trimtab.grading.extract import answer_boxes, tidy
from trimtab.grading.mathematics.answer import parse_answer
from trimtab.grading.mathematics.compare import compare
from trimtab.grading.mathematics.nodes import Node, ParsedAnswer, TooCostlyError, symbols
from trimtab.grading.mathematics.points import float_value
from trimtab.grading.mathematics.tokenizer import MAX_ANSWER_CHARS, normalize_latex
from trimtab.grading.verdicts import Verdict, VerdictKind, WorkerCall, make_verdict

_APPROXIMATELY = re.compile(r"\s*\$?\s*(?:\\approx|≈)(?![a-zA-Z])")
SYMPY_CHECK = "trimtab.grading.mathematics.sympy_check:grade_pair"
MAX_BITS = 20_000  # of a number that would be computed
MAX_FACTORIAL = 2_000
MAX_BRACE_DEPTH = 20
MAX_TOWER = 2
MAX_EXPONENT = 400  # of something with variables in it: (x+1)^{400}
MAX_OPAQUE_CHARS = 500  # characters of what only a worker can read
_FAST_GROWING = frozenset(("factorial", "double_factorial", "binom", "exp", "sinh", "cosh", "tanh"))
_LARGE_NUMBER = re.compile(r"\d{5,}")
_EXPONENT = re.compile(r"(?:\^|\*\*)\s*\{?\s*[-+(]*\s*(\d+)")
_BIG_OPERATOR = re.compile(r"\\(?:sum|prod|int|iint|oint|lim|bigcup|binom|uparrow)(?![a-zA-Z])")
_GROWING_OPERATOR = re.compile(r"!|\\[dt]?binom|\\choose|\*\*")


def grade_extracted(extracted: str, answer: str) -> Verdict | WorkerCall:
    """Return the verdict on an extracted answer, or the worker call that is needed to decide it."""
    truth = unbox(answer)
    if approximate := _APPROXIMATELY.match(truth):
        # A truth that says it is rounded asks for the number behind the sign, with or without it.
        truth, extracted = truth[approximate.end() :], _APPROXIMATELY.sub("", extracted, count=1)
    if len(extracted) > MAX_ANSWER_CHARS:
        return make_verdict("correct" if extracted.strip() == truth.strip() else "too_costly", extracted)
    if tidy(extracted) == tidy(truth):
        return make_verdict("correct", extracted)
    try:
        kind = _grade_here(extracted, truth)
    except (TooCostlyError, RecursionError):
        return make_verdict("too_costly", extracted)
    except Exception:  # a bug of ours must neither stop a run nor count for or against the response
        return make_verdict("crashed", extracted)
    return WorkerCall(SYMPY_CHECK, (extracted, truth), extracted) if kind is None else make_verdict(kind, extracted)


def asks_for_several(answer: str) -> bool:
    """Return whether the ground truth is a list or a set, whose members may stand in a box each."""
    truth = _parse_truth(unbox(answer))
    return truth.kind in ("list", "set") and len(truth.members) > 1


def unbox(answer: str) -> str:
    r"""Return the ground truth without its `\boxed{}`; some datasets box their answers, or each of several."""
    inside = answer_boxes(answer) if "boxed" in answer else None
    return answer if inside is None else inside


@lru_cache(maxsize=4096)  # a group of responses shares its truth
def _parse_truth(answer: str) -> ParsedAnswer:
    try:
        return parse_answer(answer)
    except TooCostlyError:  # then an answer can be equal as text only
        return ParsedAnswer("opaque", normalize_latex(answer))


def _grade_here(extracted: str, truth: str) -> VerdictKind | None:
    """Return the kind of verdict; None if only a worker can decide."""
    if normalize_latex(extracted) == normalize_latex(truth) and normalize_latex(extracted):
        return "correct"
    parsed_truth, parsed = _parse_truth(truth), parse_answer(extracted)
    if parsed.kind == "none":
        return "no_answer"
    undecided: list[ParsedAnswer] = []

    def note(_: ParsedAnswer, member: ParsedAnswer) -> bool:
        undecided.append(member)
        return False

    kind = compare(parsed_truth, parsed, note)
    if kind == "correct" or not undecided:
        return kind
    kind = compare(parsed_truth, parsed, lambda *_: True)
    if kind != "correct":
        return kind  # wrong even if every undecided member were right
    for member in undecided:
        for inner in _walk(member):
            if inner.node is not None:
                estimate_bits(inner.node)  # raises if it is too costly
        if any(inner.kind == "opaque" for inner in _walk(member)):
            check_text_cost(member.text)
    return None


def _walk(answer: ParsedAnswer) -> Iterator[ParsedAnswer]:
    yield answer
    for member in answer.members:
        yield from _walk(member)


def check_text_cost(text: str) -> None:
    """Raise `TooCostlyError` for a text that our parser does not know and that looks costly to evaluate."""
    if len(text) > MAX_OPAQUE_CHARS:
        raise TooCostlyError("a long text")
    if _tower(text) > MAX_TOWER or text.count("**") > 1 or any(len(n) > 3 for n in _EXPONENT.findall(text)):
        raise TooCostlyError("a tower of powers")
    growing = _GROWING_OPERATOR.search(text) or len(_BIG_OPERATOR.findall(text)) > 1 or "^" in text
    if growing and _LARGE_NUMBER.search(text):
        raise TooCostlyError("large numbers beside growing operators")
    if len(_BIG_OPERATOR.findall(text)) > 3 or text.count("!") > 3:
        raise TooCostlyError("nested sums or factorials")


def _tower(text: str) -> int:
    """Return how many powers are nested in each other's exponents; raise if braces are nested too deep."""
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
        if depth > MAX_BRACE_DEPTH:
            raise TooCostlyError("nested too deep")
    return max(highest, text.count("^") if re.search(r"\^[^{}\s]\s*\^[^{}\s]\s*\^", text) else 0)


def estimate_bits(node: Node, tower: int = 0) -> float:
    """Estimate the bits of an expression's integers, a variable as one; raise `TooCostlyError` where too many."""
    if tower > MAX_TOWER:  # the expression stands in so many exponents
        raise TooCostlyError("a tower of powers")
    if node.kind == "number":
        return float(max(abs(node.value.numerator), node.value.denominator).bit_length())
    if node.kind == "symbol":
        return 1.0
    raised = node.kind == "power" and not node.children[1].literal
    child_bits = [estimate_bits(child, tower + (raised and place == 1)) for place, child in enumerate(node.children)]
    if node.kind == "power":
        size = child_bits[0] * _size(node.children[1], child_bits[1])
        if node.children[0].kind in ("sum", "product") and _size(node.children[1], child_bits[1]) > MAX_EXPONENT:
            raise TooCostlyError("a high power of a sum")
    elif node.kind == "function" and node.name in _FAST_GROWING:
        n = _size(node.children[0], child_bits[0])
        if n > MAX_FACTORIAL:
            raise TooCostlyError(node.name)
        size = n * math.log2(n + 2)
    else:
        size = sum(child_bits)
    if size > MAX_BITS:
        raise TooCostlyError("a large number")
    return size


def _size(node: Node, bits: float) -> float:
    """Return an upper bound of a value that has so many bits; variables count as small."""
    if node.kind == "number":
        return float(abs(node.value)) if abs(node.value) < 10**9 else 1e9
    if node.kind == "symbol":
        return 1.0
    if symbols(node) - {"pi", "e"}:
        return max(bits, 1.0)
    # Floats overflow to infinity at once, where exact arithmetic would build the number.
    value = float_value(node)
    size = math.inf if value is None else math.hypot(value.real, value.imag)  # abs() raises if it overflows
    return size if size < 1e9 else 1e9
