"""The verdict of a grader. It is not yet a reward: a recipe maps each kind of verdict to one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

MAX_EXTRACTED_CHARS = 1000  # of an answer that a verdict keeps

VerdictKind = Literal["correct", "wrong", "no_answer", "ambiguous", "too_costly", "crashed"]
VERDICT_KINDS: tuple[VerdictKind, ...] = get_args(VerdictKind)


@dataclass(frozen=True)
class Verdict:
    """How a response was graded, the answer extracted from it (shortened), and the seconds it took.

    `no_answer`: the rule found no answer. `ambiguous`: several answers where one was wanted. `too_costly`: comparing
    the answer exceeds the limits. `crashed`: the grader failed, which says nothing about the response.
    """

    kind: VerdictKind
    extracted: str | None = None
    seconds: float = field(default=0.0, compare=False)


def make_verdict(kind: VerdictKind, extracted: str | None = None) -> Verdict:
    """Return a verdict that keeps the first `MAX_EXTRACTED_CHARS` characters of the answer."""
    return Verdict(kind, None if extracted is None else extracted[:MAX_EXTRACTED_CHARS])
