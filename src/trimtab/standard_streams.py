"""The standard streams of a command, any of which may be closed, full, or unable to encode a text."""

from __future__ import annotations

import io
import os
import select
import sys
from typing import Any, cast

BROKEN_PIPE = 141  # the exit code that a shell reports for a process ended by SIGPIPE


class OutputFile(io.FileIO):
    """Standard output or error. An error of writing is raised once, or never if the output is optional."""

    optional = False  # drop what cannot be written
    broken = False  # the reader at the other end of a pipe has gone

    def write(self, data: Any) -> int:
        """Write all bytes or drop the rest; return how many there were."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest:
                written = super().write(rest)
                if written is None:  # a full pipe that does not block
                    select.select([], [self], [])
                rest = rest[written or 0 :]
        except OSError as error:
            if not self.optional:
                self.broken = isinstance(error, BrokenPipeError)
                self.optional = True  # an error is raised once: what follows it belongs to the same output
                raise
        return size


def open_standard_streams() -> None:
    """Replace closed streams by the null device, and have text that an encoding lacks written as escapes."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # Else the next file that is opened would get this descriptor, and whatever a library prints with it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout, sys.stderr = _open_output(1, sys.stdout), _open_output(2, sys.stderr)
    make_optional(sys.stderr)


def make_optional(stream: Any) -> None:
    """Drop from now on what cannot be written to a stream, for a command that has its results in files."""
    file = _output_file(stream)
    if file is not None:
        file.optional = True


def output_is_broken() -> bool:
    """Return whether writing to standard output has failed because its reader has gone."""
    file = _output_file(sys.stdout)
    return file is not None and file.broken


def _open_output(descriptor: int, stream: Any) -> io.TextIOWrapper:
    file = OutputFile(descriptor, "w", closefd=False)
    encoding = stream.encoding if stream is not None else "utf-8"
    # Line by line also into pipes and files, where it is read while the command runs. No BufferedWriter in between: its
    # lock aborts Python at the end if a thread is still waiting for a slow reader.
    return io.TextIOWrapper(cast(Any, file), encoding, errors="backslashreplace", line_buffering=True)


def _output_file(stream: Any) -> OutputFile | None:
    file = getattr(stream, "buffer", None)
    return file if isinstance(file, OutputFile) else None
