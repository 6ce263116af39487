"""Rules of a user's own that return numbers, lists and verdicts, good and bad; workers import them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import trimtab as tt
from trimtab.grading import Verdict

Extra = dict[str, Any]


def returns(response: str, answer: str, extra: Extra) -> object:
    """The value that the response names."""
    values: dict[str, object] = {
        "nan": float("nan"), "inf": float("inf"), "huge": 10**400, "text": "very good", "list": [1.0], "none": None,
        "bad kind": {"kind": "fine"}, "bad score": {"kind": "wrong", "score": "high"},
        "verdict": Verdict("no_answer", "it", score=-0.5), "object": {"kind": "correct", "score": 7},
        "true": True, "kind": "ambiguous",
    }  # fmt: skip
    return values[response] if response in values else float(response)


def raises(response: str, answer: str, extra: Extra) -> float:
    return 1.0 / len(answer.strip(answer))


@tt.rule(batched=True)
def lengths(responses: Sequence[str], answers: Sequence[str], extras: Sequence[Extra]) -> list[float]:
    return [float(len(response)) for response in responses]


@tt.rule(batched=True)
def named(responses: Sequence[str], answers: Sequence[str], extras: Sequence[Extra]) -> object:
    """What the first answer says is returned."""
    rows = [returns(response, "", {}) for response in responses]
    return {"rows": rows, "too few": rows[:-1], "number": 3.0, "none": None, "tuple": tuple(rows)}[answers[0]]


@tt.rule(batched=True, in_process=True)
def named_here(responses: Sequence[str], answers: Sequence[str], extras: Sequence[Extra]) -> object:
    return named(responses, answers, extras)


@tt.rule(in_process=True)
def process(response: str, answer: str, extra: Extra) -> float:
    return float(os.getpid())


def other_process(response: str, answer: str, extra: Extra) -> float:
    return float(os.getpid())


@tt.rule(in_process=True)
def raises_here(response: str, answer: str, extra: Extra) -> float:
    return raises(response, answer, extra)


def facts(
    response: str,
    answer: str,
    extra: Extra,
    *,
    tokens: int | None,
    prompt: list[Extra],
    source: str,
    scale: float = 1.0,
) -> float:
    return scale * (tokens or 0) + len(prompt[0]["content"]) + len(source)


@tt.rule(batched=True)
def facts_in_lists(
    responses: Sequence[str], answers: Sequence[str], extras: Sequence[Extra], *, tokens: Sequence[int], finished: Any
) -> list[float]:
    return [n if done else -n for n, done in zip(tokens, finished, strict=True)]


def too_many(response: str, answer: str, extra: Extra, more: str) -> bool:
    return True


def unknown_fact(response: str, answer: str, extra: Extra, *, color: str) -> bool:
    return True


@tt.rule(seconds=0.2)
def sleeps(response: str, answer: str, extra: Extra) -> bool:
    time.sleep(60)
    return True
