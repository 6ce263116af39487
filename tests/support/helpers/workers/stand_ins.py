"""Runners without walls, in which the attempts are shown to win: a bare process, and an interpreter that is shared."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

MERCY = 0.6  # seconds that a bare process gets after SIGTERM


@dataclass
class BareResult:
    """What a program without walls printed and how it ended."""

    stdout: str
    error: str
    kind: str
    ms: float


class BareProcess:
    """Run each program with `python -c`, as tools do that claim no walls: SIGTERM after the deadline."""

    def run(self, code: str, *, timeout: float) -> BareResult:
        """Run one program."""
        began = time.monotonic()
        # The program's own group, so that what it sends to its group does not end the harness.
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            close_fds=False,
            process_group=0,
        )
        kind = ""
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            kind = "timeout"
            process.terminate()
            try:
                stdout, stderr = process.communicate(timeout=MERCY)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):  # only a daemon holds the pipe
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                stdout, stderr = b"", b""
                process.stdout.close()  # type: ignore[union-attr]
                process.stderr.close()  # type: ignore[union-attr]
        kind = kind or ("ok" if process.returncode == 0 else "exception" if process.returncode == 1 else "killed")
        ms = 1000 * (time.monotonic() - began)
        return BareResult(stdout.decode(errors="replace"), stderr.decode(errors="replace"), kind, ms)


LOOP = """
import sys, traceback
kept = {"__name__": "__main__"}
while size := sys.__stdin__.buffer.readline():
    code = sys.__stdin__.buffer.read(int(size)).decode()
    kind = "ok"
    try:
        exec(code, kept)
    except BaseException:
        traceback.print_exc()
        kind = "exception"
    sys.__stdout__.write("\\n=== end " + kind + "\\n")
    sys.__stdout__.flush()
"""


class SharedInterpreter:
    """Run every program in one interpreter, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
        )

    def run(self, code: str, *, timeout: float) -> BareResult:
        """Run one program; the attempts that come here end by themselves."""
        del timeout
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{len(code.encode())}\n".encode() + code.encode())
        self._process.stdin.flush()
        lines: list[str] = []
        for line in self._process.stdout:
            if line.startswith(b"=== end "):
                return BareResult("".join(lines), "", line.split()[-1].decode(), 0.0)
            lines.append(line.decode(errors="replace"))
        return BareResult("".join(lines), "", "killed", 0.0)

    def close(self) -> None:
        """End the interpreter."""
        self._process.kill()
        self._process.communicate()
