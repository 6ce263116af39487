"""Agents that are programs: started once for each rollout, with the problem on standard input."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import partial
from typing import IO, Any

from trimtab.workers import die_with_parent, kill_descendants

KEPT = 1 << 16  # bytes of the end of what a program writes to standard output, and to standard error
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "AUTH", "COOKIE")
GIVEN = ("OPENAI_API_KEY", "OPENAI_BASE_URL")


class ProgramError(Exception):
    """A program could not be started, or ended with an exit code other than 0."""


def run_program(command: list[str], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Run a program; return the reward that its last line gives, or else that line as text.

    A line `{"reward": ...}` is the reward itself. A program that prints nothing leaves it to the task's rule.
    """
    asked = json.dumps({name: fields[name] for name in ("prompt", "answer", "extra")}).encode()
    output = _run(command, asked + b"\n")
    lines = [line for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    if not lines:
        return {"reward": None}
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(lines[-1])
        if isinstance(found, dict) and list(found) == ["reward"]:
            return found
    return {"text": lines[-1].strip()}


def _run(command: list[str], asked: bytes) -> bytes:
    """Run a program to its end and kill what it leaves behind; return the end of its standard output."""
    try:
        process = subprocess.Popen(
            [shutil.which(command[0], path=program_path()) or command[0], *command[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509  (no other thread takes locks here)
        )
    except OSError as error:
        raise ProgramError(f"{command[0]} cannot be started: {error}") from None
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    tails = [Tail(process.stdout), Tail(process.stderr)]
    with contextlib.suppress(OSError):  # it has ended without reading
        process.stdin.write(asked)
    with contextlib.suppress(OSError):
        process.stdin.close()
    code = process.wait()
    kill_descendants(os.getpid())  # they may hold its outputs open
    output, errors = (tail.result() for tail in tails)
    if code:
        said = errors.decode("utf-8", "replace").strip()
        raise ProgramError(f"{' '.join(command)} ended with exit code {code}" + (f":\n{said}" if said else ""))
    return output


class Tail:
    """Reads a stream to its end in a thread, and keeps the last bytes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.kept = stream, b""
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self) -> None:
        """Read until the other side has ended."""
        while chunk := os.read(self.stream.fileno(), 1 << 16):
            self.kept = (self.kept + chunk)[-KEPT:]

    def result(self) -> bytes:
        """Return what was kept, once all is read."""
        self.thread.join()
        self.stream.close()
        return self.kept


def environment() -> dict[str, str]:
    """Return the environment of a program: this process's without what looks like a secret."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in GIVEN or not any(word in name.upper() for word in SECRET)
    }
    return kept | {"PATH": program_path()}


def program_path() -> str:
    """Return where programs are looked for: `python` is the one that trimtab runs in, which has the openai package."""
    return os.pathsep.join(filter(None, (os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath))))
