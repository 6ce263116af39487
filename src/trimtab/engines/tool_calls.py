"""trimtab's tools in TRL and verl: those of a recipe, with the same names, replies and limits. Imports no torch.

Programs run in the sandbox, functions and environments of the user's own in processes that can be killed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trimtab.agents import Call, Conversation, Message, ToolSet
from trimtab.data import Problem
from trimtab.own_parts import OwnPartError, look_beside
from trimtab.text import printable

_log = logging.getLogger(__name__)
_failed: set[str] = set()  # parts whose first error has been logged


@dataclass(frozen=True)
class ToolOptions:
    """Which tools, and what a call may take. `folders` is where modules of the user's own are looked for."""

    use: tuple[str, ...] = ()
    environment: str | None = None
    timeout: float = 10.0
    max_characters: int = 4000
    workers: int = 4
    folders: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if type(self.timeout) not in (int, float) or not 0 < self.timeout <= 86400:
            raise ValueError(f"timeout={self.timeout!r} must be a number of seconds above 0")
        if type(self.max_characters) is not int or self.max_characters < 100:
            raise ValueError(f"max_characters={self.max_characters!r} must be a whole number of at least 100")

    @property
    def tools(self) -> ToolSet:
        """The tools in this process; the first access starts them, and raises what is wrong with them."""
        return _tool_set(self)


@lru_cache
def _tool_set(options: ToolOptions) -> ToolSet:
    for folder in reversed(options.folders):
        look_beside(folder)
    return ToolSet(options.use, environment=options.environment, workers=options.workers)


class ConversationTools:
    """The tools of one conversation in an engine, whose turns are the engine's affair."""

    def __init__(self, options: ToolOptions, problem: Problem) -> None:
        self.options, self.problem = options, problem
        self.tools = options.tools
        self.calls: list[Call] = []
        self._open = self.tools.open(problem)

    def __del__(self) -> None:
        if hasattr(self, "_open"):
            self._open.close()

    def opening(self) -> str:
        """Return what the environment says of the problem; it belongs to the prompt."""
        if not self.tools.has_opening:
            return ""
        text = self._open.reset(self.options.timeout)
        # An error in it is raised: it comes from the user's code and data, and not from what a model wrote.
        if self._open.failed is not None:
            raise OwnPartError(f"{self.options.environment}: reset failed: {self._open.failed.error}")
        return text or ""

    def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return its reply; whatever goes wrong is told in it."""
        result = self._open.call(tool, arguments, self.options.timeout)
        if result.error:  # of the user's own code
            _log_once(tool, result.error)
        self.calls.append(Call(tool, arguments, result.outcome, result.seconds, result.text))
        return shortened(result.text, self.options.max_characters)

    def reward(self, messages: Sequence[Mapping[str, Any]]) -> float | None:
        """Return the environment's reward for the messages after the prompt; None leaves it to the reward function.

        An environment that a call has killed pays 0, and so does one whose `reward` fails.
        """
        if not self.tools.has_reward:
            return None
        found = [
            Message(message["role"], str(message.get("content") or ""), str(message.get("name") or ""))
            for message in messages
            if message["role"] in ("assistant", "tool")
        ]
        answered = bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        value = self._open.reward(
            Conversation(found, self.calls, "answer" if answered else "turns"), self.options.timeout
        )
        if value is None or isinstance(value, float | int):
            return value
        _log_once("reward", value.error or value.text)
        return 0.0


def _log_once(part: str, error: str) -> None:
    """Log the first error of a tool, or of the reward, in this process: no other part of an engine tells the user."""
    if part not in _failed:
        _failed.add(part)
        _log.error("%s failed, and the run goes on:\n%s", part, printable(error))  # it may quote a call


def shortened(text: str, limit: int) -> str:
    """Cut a text of more than `limit` characters in the middle, and say so there."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters left out) ...\n{text[-half:]}"
