"""A grading function of one's own: `python:package.module:function`, called in a worker within limits.

The function gets the response, the answer and the problem's `extra`, and says whether the response is right: True or
False, a score from 0 to 1 (right from 0.99 on), or the kind of the verdict in words. Anything else, or an exception, is
the grader's failure: `crashed`. A function that cannot be imported is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trimtab.rewards.math_rule import Question
from trimtab.rewards.pool import Limits, Result
from trimtab.rewards.verdicts import VERDICT_KINDS, Verdict, VerdictKind, verdict

LIMITS = Limits(seconds=10.0, processor=5.0, memory=1 << 30)
RIGHT = 0.99  # scores of at least this are right


def own_question(path: str, response: str, answer: str, extra: Mapping[str, Any]) -> Question:
    """The question whether the function at `package.module:function` finds the response right."""
    try:
        carried = json.loads(json.dumps(dict(extra), default=str))
    except (TypeError, ValueError):
        carried = {}
    return Question(path, (response, answer, carried), None, LIMITS)


def own_verdict(result: Result, function: str, found: str | None) -> Verdict:
    """The verdict that a worker's result stands for. A function that cannot be loaded is an error, not a verdict."""
    if result.outcome == "not_loaded":
        raise ValueError(f"the grading function {function} cannot be loaded: {result.error}")
    kind = result.outcome if result.outcome != "done" else _kind(result.value)
    return replace(verdict(kind, found), seconds=result.seconds)


def _kind(value: object) -> VerdictKind:
    if isinstance(value, bool):
        return "correct" if value else "wrong"
    if isinstance(value, int | float):
        return ("correct" if value >= RIGHT else "wrong") if 0 <= value <= 1 else "crashed"
    return next((kind for kind in VERDICT_KINDS if kind == value), "crashed")
