"""Grade an extracted answer by mathematics: decide what is easy in this process, defer the rest to a worker.

In this order: the same text; numbers exactly; structures member by member; floating-point values that prove a
difference; exact algebra; an estimate of the cost of what is left; and only then sympy, in a worker within limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from trimtab.grading.extract import answer_boxes, tidy
from trimtab.grading.mathematics.answer import parse_answer
from trimtab.grading.mathematics.compare import compare
from trimtab.grading.mathematics.cost import check_text_cost, estimate_bits
from trimtab.grading.mathematics.nodes import ParsedAnswer, TooCostlyError
from trimtab.grading.mathematics.tokenizer import MAX_ANSWER_CHARS, normalize_latex
from trimtab.grading.pool import WorkerCall
from trimtab.grading.verdicts import Verdict, VerdictKind, make_verdict

_APPROXIMATELY = re.compile(r"\s*\$?\s*(?:\\approx|≈)(?![a-zA-Z])")
SYMPY_CHECK = "trimtab.grading.mathematics.sympy_check:grade_pair"


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
    """Return the kind of verdict; None where only a worker can decide."""
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
                estimate_bits(inner.node)  # raises where it is too costly
        if any(inner.kind == "opaque" for inner in _walk(member)):
            check_text_cost(member.text)
    return None


def _walk(answer: ParsedAnswer) -> Iterator[ParsedAnswer]:
    yield answer
    for member in answer.members:
        yield from _walk(member)
