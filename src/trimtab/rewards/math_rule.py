"""The rule for mathematics: what is easy is decided at once in this process, the rest is a question for a worker.

In this order: the same text; numbers exactly; structures member by member; exact algebra; floating-point values that
show a difference; the cost of what is left; and only then sympy, in a worker, within limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trimtab.rewards.extract import last_box, tidy
from trimtab.rewards.mathematics.answers import Shape, read
from trimtab.rewards.mathematics.compare import compare
from trimtab.rewards.mathematics.cost import bits, check_text
from trimtab.rewards.mathematics.latex import LONGEST_ANSWER, plain
from trimtab.rewards.mathematics.nodes import TooCostlyError
from trimtab.rewards.pool import LIMITS, Limits
from trimtab.rewards.verdicts import Verdict, VerdictKind, verdict

SYMBOLS = "trimtab.rewards.mathematics.sympy_check:judge"


@dataclass(frozen=True)
class Question:
    """What a worker is to be asked: `function(*arguments)`. `found` is the answer that it is about."""

    function: str
    arguments: tuple[Any, ...]
    found: str | None
    limits: Limits = LIMITS


def judge(found: str, answer: str) -> Verdict | Question:
    """The verdict on an answer that was found in a response, or the question that remains."""
    wanted = unboxed(answer)
    if len(found) > LONGEST_ANSWER:
        return verdict("correct" if found.strip() == wanted.strip() else "too_costly", found)
    if tidy(found) == tidy(wanted):
        return verdict("correct", found)
    try:
        kind = _kind(found, wanted)
    except (TooCostlyError, RecursionError):
        return verdict("too_costly", found)
    except Exception:  # a fault of ours: it must not stop a run, nor be paid or punished
        return verdict("crashed", found)
    return Question(SYMBOLS, (found, wanted), found) if kind is None else verdict(kind, found)


def unboxed(answer: str) -> str:
    """The truth itself; some data sets box their answers."""
    inside = last_box(answer) if "boxed" in answer else None
    return answer if inside is None else inside


@lru_cache(maxsize=4096)
def _truth(answer: str) -> Shape:
    try:
        return read(answer)
    except TooCostlyError:  # then it can be equal as text alone
        return Shape("opaque", plain(answer))


def _kind(found: str, wanted: str) -> VerdictKind | None:
    """The kind of verdict; None where only a worker can tell."""
    if plain(found) == plain(wanted) and plain(found):
        return "correct"
    truth, shape = _truth(wanted), read(found)
    if shape.kind == "none":
        return "no_answer"
    asked: list[Shape] = []

    def doubtful(_: Shape, member: Shape) -> bool:
        asked.append(member)
        return False

    kind = compare(truth, shape, doubtful)
    if kind == "correct" or not asked:
        return kind
    kind = compare(truth, shape, lambda *_: True)
    if kind != "correct":
        return kind  # whatever the doubtful members are, another one is not right
    for member in asked:
        for inner in _members(member):
            if inner.node is not None:
                bits(inner.node)
        if any(inner.kind == "opaque" for inner in _members(member)):
            check_text(member.text)
    return None


def _members(shape: Shape) -> Iterator[Shape]:
    yield shape
    for part in shape.parts:
        yield from _members(part)
