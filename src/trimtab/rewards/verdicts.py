"""What a grader says of a response: a verdict of one kind. It is not yet a reward; a recipe makes it one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LONGEST_SHOWN = 1000  # characters of an answer that a verdict keeps

VerdictKind = Literal["correct", "wrong", "no_answer", "ambiguous", "too_costly", "crashed"]
VERDICT_KINDS: tuple[VerdictKind, ...] = ("correct", "wrong", "no_answer", "ambiguous", "too_costly", "crashed")


@dataclass(frozen=True)
class Verdict:
    """How a response was graded, the answer found in it (its first `LONGEST_SHOWN` characters), and in how long.

    `no_answer`: nothing stands where the rule looks. `ambiguous`: several answers where one is asked. `too_costly`: to
    understand the answer takes more than the limits allow. `crashed`: the grader failed, which says nothing about the
    response.
    """

    kind: VerdictKind
    extracted: str | None = None
    seconds: float = field(default=0.0, compare=False)


def verdict(kind: VerdictKind, found: str | None = None) -> Verdict:
    """A verdict that keeps no more of the answer than it may."""
    return Verdict(kind, None if found is None else found[:LONGEST_SHOWN])
