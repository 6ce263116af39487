"""The sandbox as a tool for TRL and verl: programs that the model writes run behind walls. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trimtab.tools import KILLED_KINDS, Result, Sandbox, Session


@dataclass(frozen=True)
class PythonLimits:
    """The limits of a program: seconds, characters of the reply, memory, and the lowest level of the sandbox."""

    timeout: float = 10.0
    max_characters: int = 4000
    memory_mb: int = 512
    level: str = "full"

    def __post_init__(self) -> None:
        if type(self.timeout) not in (int, float) or not 0 < self.timeout < 86400:
            raise ValueError(f"timeout={self.timeout!r} must be a number of seconds above 0")
        if type(self.max_characters) is not int or self.max_characters < 100:
            raise ValueError(f"max_characters={self.max_characters!r} must be a whole number of at least 100")
        # Now, and not in the first call: engines show the model every error of a tool as its reply and train on.
        self.sandbox()

    def sandbox(self) -> Sandbox:
        """Return this process's sandbox."""
        return _sandbox(self.memory_mb, self.level)

    def reply(self, result: Result) -> str:
        """Return what the model is shown of a run: what it printed, and the error if there was one."""
        error = "" if result.kind == "ok" else result.error.strip() or result.kind
        text = "\n".join(part for part in (result.stdout.rstrip("\n"), error) if part)
        return shortened(text, self.max_characters) if text else "(nothing was printed)"


@lru_cache
def _sandbox(memory_mb: int, level: str) -> Sandbox:
    """Return the sandbox with these options, one for each process: it starts anew after a fork by itself."""
    return Sandbox(memory_mb=memory_mb, level=level)


def shortened(text: str, limit: int) -> str:
    """Cut a text of more than `limit` characters in the middle, and say so there."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters left out) ...\n{text[-half:]}"


def _problem(code: object) -> str:
    """Return what is wrong with the argument of a call; models also send numbers and lists."""
    return "" if isinstance(code, str) else f"code must be a string, not {type(code).__name__}"


def python_tool(
    timeout: float = 10.0, max_characters: int = 4000, memory_mb: int = 512, level: str = "full"
) -> Callable[[str], str]:
    """Return the tool `python`, which keeps nothing between calls: `GRPOTrainer(tools=[python_tool()])`."""
    limits = PythonLimits(timeout, max_characters, memory_mb, level)

    def python(code: str) -> str:
        """Run a Python program and return what it prints. Nothing is kept from one call to the next.

        Args:
            code: The program. What it should return must be printed.
        """
        if problem := _problem(code):
            return problem
        return limits.reply(limits.sandbox().run(code, timeout=limits.timeout))

    return python


class PythonSession:
    """An environment with the tool `python`, an interpreter that lives through a conversation.

    `GRPOTrainer(environment_factory=PythonSession)`; for other limits `partial(PythonSession, timeout=5.0)`.
    """

    # TRL shows every public method to the model as a tool: there must be no others than `python`.
    def __init__(self, **limits: Any) -> None:
        self._session: Session | None = None
        self._limits = PythonLimits(**limits)

    def __del__(self) -> None:
        self._close()

    def reset(self, **_: Any) -> None:
        """Start anew for the next conversation."""
        self._close()

    def python(self, code: str) -> str:
        """Run Python code and return what it prints. Names, imports and files are kept from one call to the next.

        Args:
            code: The code. What it should return must be printed.
        """
        if problem := _problem(code):
            return problem
        if self._session is None:
            self._session = self._limits.sandbox().session(timeout=self._limits.timeout)
        result = self._session.run(code)
        if result.kind in KILLED_KINDS:
            self._close()
            return f"{self._limits.reply(result)}\n(the interpreter was ended: the next call starts a new one)"
        return self._limits.reply(result)

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
