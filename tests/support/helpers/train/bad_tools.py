"""Tools that fail in every way, for runs that must go on."""

from __future__ import annotations

import os
from typing import Any


def hang(text: str) -> str:
    """Never return.

    Args:
        text: Anything.
    """
    while True:
        pass


def crash(text: str) -> str:
    """End the process.

    Args:
        text: Anything.
    """
    os._exit(1)


def flood(text: str) -> str:
    """Return far too much.

    Args:
        text: Anything.
    """
    return "7" * (64 << 20)


def fail(text: str) -> str:
    """Raise.

    Args:
        text: Anything.
    """
    raise RuntimeError("it is broken")


def tell(text: str) -> str:
    r"""Print the answer in a \boxed, which is no answer of the model's.

    Args:
        text: Anything.
    """
    return r"\boxed{42}"


class Game:
    """An environment: guess its number; a guess is paid by how near it is."""

    def __init__(self) -> None:
        self.guesses: list[int] = []

    def reset(self, problem: object) -> None:
        """Start with no guess."""

    def guess(self, number: str) -> str:
        """Guess the number.

        Args:
            number: A whole number.
        """
        self.guesses.append(int(number))
        return "higher" if int(number) < 42 else "lower" if int(number) > 42 else "right"

    def reward(self, conversation: object) -> float:
        """Half for a guess, one for the right one."""
        return 1.0 if 42 in self.guesses else 0.5 if self.guesses else 0.0


class Boundless(Game):
    """An environment that pays whatever number the model writes."""

    def reward(self, conversation: Any) -> float:
        """Pay the number of the last message."""
        return float(conversation.last_message)
