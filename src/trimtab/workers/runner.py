"""Runs a program inside the walls, as `python program.py` would; prints tracebacks as Python does.

It imports nothing of trimtab: bubblewrap runs it as a script.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.abc
import io
import linecache
import os
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from typing import Any

EXIT_OK, EXIT_EXCEPTION, EXIT_MEMORY = 0, 1, 86
LENGTH_BYTES = 4
PLOTTING = ("matplotlib", "seaborn", "plotly", "bokeh", "altair", "turtle", "tkinter", "PIL", "cv2", "IPython")


class NoPlotting(importlib.abc.MetaPathFinder):
    """Says of plotting packages why they are not there."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        """Raise an error for a plotting package; other imports go on to the next finder."""
        name = fullname.partition(".")[0]
        if name in PLOTTING:
            text = f"No module named {name!r}: nothing can be shown here, print numbers instead of plotting them"
            raise ModuleNotFoundError(text, name=name)


def receive_program(channel: int) -> str | None:
    """Read a program from the channel: its length, then its text; None when there will be none."""
    head = _read(channel, LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    return _read(channel, int.from_bytes(head, "big")).decode("utf-8", "surrogatepass")


def _read(channel: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size and (chunk := os.read(channel, min(size - len(parts), 1 << 20))):
        parts += chunk
    return bytes(parts)


def open_streams() -> None:
    """Open standard input, output and error anew, as a fresh interpreter has them."""
    # Line by line, so that what was printed before a deadline is seen.
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), encoding="utf-8")
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(io.FileIO(fd, "w", closefd=False)), encoding="utf-8", errors=errors, line_buffering=True
        )
        for fd, errors in ((1, "strict"), (2, "backslashreplace"))
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def fresh_main() -> dict[str, Any]:
    """Return the names of a new module `__main__`."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.argv[:] = ["program.py"]
    sys.meta_path.insert(0, NoPlotting())
    # Python refuses to print integers of more than 4300 digits, against servers that hang; here is a deadline.
    sys.set_int_max_str_digits(0)
    return module.__dict__


def execute(code: str, name: str, names: dict[str, Any]) -> int:
    """Run a program's text and return an exit code; an exception's traceback goes to standard error."""
    # A program can go as deep as in its own interpreter: the frames up to here do not count.
    frame: types.FrameType | None = sys._getframe()
    depth = 0
    while frame := frame and frame.f_back:
        depth += 1
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000 + depth))
    lines = [f"{line}\n" for line in code.split("\n")]
    linecache.cache[name] = (len(code), None, lines, name)
    try:
        exec(compile(code, name, "exec", dont_inherit=True), names)
    except SystemExit as end:
        return _exit_code(end.code)
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this function's frame
        _print_exception(error)
        return EXIT_MEMORY if isinstance(error, MemoryError) else EXIT_EXCEPTION
    return EXIT_OK


def _exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    _print_error(str(code))
    return EXIT_EXCEPTION


def _print_exception(error: BaseException) -> None:
    try:
        _print_error("".join(traceback.format_exception(error)).rstrip("\n"))
    except BaseException:  # no memory is left for it, or the exception's own __str__ fails in a new way
        _print_error(type(error).__name__)


def _print_error(text: str) -> None:
    # The program may have replaced or closed sys.stderr.
    data = f"{text}\n".encode("utf-8", "backslashreplace")
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]


def flush() -> None:
    """Write out what the program has printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):  # the program may have put anything there
            stream.flush()


def run_once(code: str) -> int:
    """Run a program to its end: its threads, and what it registered to run at exit."""
    exit_code = execute(code, "program.py", fresh_main())
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException as error:
        _print_exception(error)
    flush()
    return exit_code


def run_session(channel: int) -> None:
    """Run programs one after another with the same names; after each, send its exit code as a byte."""
    names, own, count = fresh_main(), os.getpid(), 0
    while (code := receive_program(channel)) is not None:
        count += 1
        with contextlib.suppress(ChildProcessError):  # what was killed between the turns counts as a process until then
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        exit_code = execute(code, f"program-{count}.py", names)
        flush()
        if os.getpid() != own:  # a process that the program forked and that came back here
            os._exit(exit_code)
        os.write(channel, bytes([exit_code]))


def run(channel: int, session: bool) -> None:
    """Run what comes over the channel, and end this process."""
    exit_code = EXIT_EXCEPTION
    try:
        open_streams()
        if session:
            run_session(channel)
            exit_code = EXIT_OK
        else:
            code = receive_program(channel)
            os.close(channel)
            exit_code = EXIT_OK if code is None else run_once(code)
    finally:
        os._exit(exit_code)


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2] == "session")
