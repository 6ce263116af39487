"""Where it goes what users' rules print: into a file of the run, and without a run to standard error.

Standard output may be a live display or a stream of verdicts, which it would garble.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_files: list[Path] = []  # the present run's, if there is one


def set_file(path: Path | None) -> bool:
    """Append to this file what rules print from now on; return whether that is a change."""
    if path is not None and path.exists() and not path.is_file():  # opening a named pipe would block
        raise ValueError(f"{path} is not a regular file: remove it")
    changed = _files != ([] if path is None else [path])
    _files[:] = [] if path is None else [path]
    return changed


@contextlib.contextmanager
def worker_output() -> Iterator[int | None]:
    """Yield the descriptor that a worker's output goes to; None for this process's standard error."""
    if not _files:
        yield None
        return
    descriptor = os.open(_files[0], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def redirected() -> Iterator[None]:
    """Send there what this process prints inside."""
    if not _files:
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    with (
        open(_files[0], "a", encoding="utf-8", errors="backslashreplace") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        yield
