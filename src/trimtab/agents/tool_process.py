"""The side of tools and environments that runs in a worker process: calls of the user's code, results as text."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from trimtab.agents.types import Call, Conversation, Message
from trimtab.data import Problem
from trimtab.grading import SCORE, is_score
from trimtab.text import shown

MAX_CHARS = 65_536  # of a tool's text; the beginning of a longer one is kept

ToolText = tuple[str, str]  # the outcome, and the text


def call_function(function: Callable[..., Any], arguments: Mapping[str, Any]) -> ToolText:
    """Call a tool and return its result as text."""
    return _as_text(function(**arguments))


class EnvironmentHost:
    """An environment of one conversation, made when its process starts."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.environment = make()

    def reset(self, fields: Mapping[str, Any]) -> str | None:
        """Tell the environment its problem; return what it says of it."""
        problem = Problem(**{**fields, "prompt": tuple(fields["prompt"])})
        reset = self.environment.reset
        parameters = inspect.signature(reset).parameters.values()
        if any(each.kind is each.VAR_KEYWORD for each in parameters):  # TRL's form gets the columns of the row
            value = reset(**{**problem.extra, "prompt": list(problem.prompt), "answer": problem.answer})
        else:
            value = reset(problem) if parameters else reset()
        if value is not None and not isinstance(value, str):
            raise TypeError(f"reset returned {type(value).__name__}: return a text, or None")
        return value

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolText:
        """Call one of its tools."""
        return _as_text(getattr(self.environment, name)(**arguments))

    def reward(self, fields: Mapping[str, Any]) -> float | None:
        """Return its reward for a conversation; None leaves it to the task's rule."""
        messages = [Message(**message) for message in fields["messages"]]
        calls = [Call(**call) for call in fields["calls"]]
        conversation = Conversation(messages, calls, fields["ended"], fields["void_turns"])
        value = self.environment.reward(conversation)
        if value is None:
            return None
        if hasattr(value, "item"):  # a scalar of NumPy or torch
            value = value.item()
        if not isinstance(value, bool) and not is_score(value):
            raise TypeError(f"reward returned {shown(value)}: return {SCORE}, or None")
        return float(value)


def _as_text(value: object) -> ToolText:
    if inspect.iscoroutine(value):  # a tool that is written as `async def`
        value = asyncio.run(value)
    if value is None:
        text = ""
    elif isinstance(value, str):
        text = value
    else:
        try:
            text = json.dumps(value, ensure_ascii=False, default=_plain)
        except (TypeError, ValueError, RecursionError):
            kind = type(value).__name__
            raise TypeError(f"the tool returned a {kind}, which is no text and cannot be written as JSON") from None
    return ("ok", text) if len(text) <= MAX_CHARS else ("output", text[:MAX_CHARS])


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numbers and arrays of NumPy and torch
        return value.tolist()
    raise TypeError
