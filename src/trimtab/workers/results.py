"""What a run gives back, and the errors of the sandbox itself."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Literal

from trimtab.workers.runner import EXIT_MEMORY

Kind = Literal["ok", "exception", "timeout", "memory", "output", "killed", "refused"]
KILLED_KINDS: tuple[Kind, ...] = ("timeout", "memory", "output", "killed")


class SandboxError(OSError):
    """The sandbox cannot do what was asked on this machine; the message says what is missing and how to get it."""


@dataclass(frozen=True)
class Result:
    """What became of a program.

    `stdout` is what it printed, cut at the limit, with invalid bytes replaced. `error` is what it wrote to standard
    error (warnings, the traceback as Python prints it), and why it was killed or refused. `ms` is the wall-clock time
    of the run in milliseconds.
    """

    stdout: str
    error: str
    kind: Kind
    ms: float


def refused(why: str) -> Result:
    """Return the result of a program that was not run."""
    return Result("", why, "refused", 0.0)


def kind_of(status: int) -> tuple[Kind, str]:
    """Return what a process's wait status means, and in words where it says more than the traceback."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return "killed", f"killed by {signal.Signals(number).name}"
    return kind_of_exit(os.WEXITSTATUS(status))


def kind_of_exit(code: int) -> tuple[Kind, str]:
    """Return what an exit code of the runner means."""
    if code == 0:
        return "ok", ""
    return ("memory", "") if code == EXIT_MEMORY else ("exception", f"the program ended with exit code {code}")


def text_of(data: bytes) -> str:
    """Decode output; bytes that are no UTF-8 are replaced."""
    return data.decode("utf-8", "replace")
