"""Tools and environments that behave well, and others that do whatever a tool can do wrong."""

from __future__ import annotations

import ctypes
import os
from typing import Any, Literal

from trimtab.agents import Conversation
from trimtab.data import Problem


def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number


async def later(text: str) -> str:
    """Return a text.

    Args:
        text: The text.
    """
    return text


def say(key: str) -> str:
    """Say something.

    Args:
        key: What.
    """
    return key


def misbehave(how: str) -> Any:
    """Do something that a tool should not.

    Args:
        how: What.
    """
    if how == "hang":
        while True:
            pass
    if how == "segfault":
        ctypes.string_at(0)
    if how == "exit":
        os._exit(3)
    if how == "raise":
        raise ValueError("no such page")
    if how == "print":
        os.write(1, b"x" * (1 << 26))
        return "printed"
    if how == "orphan" and os.fork() == 0:
        while True:
            pass
    returned = {"flood": "x" * 100_000, "object": object(), "none": None, "dict": {"a": [1, None]}, "half": "a\ud800b"}
    return "x" * (1 << 40) if how == "memory" else returned.get(how, "ok")


def undocumented(text: str) -> str:
    return text


def untyped(text) -> str:  # noqa: ANN001
    """Return a text.

    Args:
        text: The text.
    """
    return str(text)


def undescribed(text: str) -> str:
    """Return a text."""
    return text


def any_number(*numbers: int) -> int:
    """Add."""
    return sum(numbers)


class Counter:
    """An environment with a state, whose reward is what was counted."""

    def reset(self, problem: Problem) -> str:
        self.total = 0
        self.goal = problem.answer
        if problem.answer == "broken":
            raise ValueError("no such goal")
        return f"Count to {self.goal}."

    def add(self, number: int, sign: Literal["+", "-"] = "+") -> str:
        """Add to the count.

        Args:
            number: How much.
            sign: In which direction.
        """
        self.total += number if sign == "+" else -number
        return f"{self.total} of {self.goal}"

    def fail(self, how: str) -> str:
        """Fail.

        Args:
            how: In which way.
        """
        return str(misbehave(how))

    def reward(self, conversation: Conversation) -> float | None:
        if conversation.last_message == "broken":
            raise RuntimeError("no reward")
        return self.total + 0.5 * len(conversation.calls) if conversation.last_message else None


class Silent:
    """An environment whose reset says nothing, in TRL's form, and that has no reward."""

    def reset(self, **row: Any) -> None:
        self.row = row

    def look(self) -> str:
        """Look around."""
        return f"{sorted(self.row)} {self.row['answer']}"

    def leave(self) -> None:
        """Leave."""
        os._exit(0)


class WithoutReset:
    def look(self) -> str:
        """Look around."""
        return ""


class WithoutTools:
    def reset(self, problem: Problem) -> None: ...
