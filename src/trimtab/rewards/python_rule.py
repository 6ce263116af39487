"""Grade by a user's function: `python:package.module:function`, called in a worker within limits.

The function gets the response, the answer and the problem's `extra`. It returns True or False, a score from 0 to 1
(correct from 0.99 on), or a kind of verdict. Any other value, or an exception, is `crashed`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trimtab.rewards.pool import WorkerCall, WorkerLimits
from trimtab.rewards.verdicts import VERDICT_KINDS, VerdictKind

LIMITS = WorkerLimits(seconds=10.0, cpu_seconds=5.0, memory=1 << 30)
CORRECT_SCORE = 0.99  # a score of at least this is correct


def python_call(path: str, response: str, answer: str, extra: Mapping[str, Any]) -> WorkerCall:
    """Return the worker call that grades a response by the function at `package.module:function`."""
    try:
        plain = json.loads(json.dumps(dict(extra), default=str))  # the call crosses a pipe as JSON
    except (TypeError, ValueError):
        plain = {}
    return WorkerCall(path, (response, answer, plain), None, LIMITS)


def kind_of(value: object) -> VerdictKind:
    """Return the kind of verdict that a grading function's return value stands for."""
    if isinstance(value, bool):
        return "correct" if value else "wrong"
    if isinstance(value, int | float):
        return ("correct" if value >= CORRECT_SCORE else "wrong") if 0 <= value <= 1 else "crashed"
    return next((kind for kind in VERDICT_KINDS if kind == value), "crashed")
