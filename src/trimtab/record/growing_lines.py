"""Follow a file of JSON lines that somebody else writes: what is new since the last look, or that all of it is.

A run appends to its files. A resumed run replaces them by shorter ones, a person may cut or rotate them, and a process
that is killed leaves half a line. None of this may show a value twice, or one that is no longer there.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.record.step_lines import LONGEST_LINE, parse_step_line

CHUNK = 1 << 20  # bytes that are read at a time
FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a link may lead out of the run, a pipe may block
REMEMBERED = 64  # bytes before the place reached, by which a file that was written anew is known


@dataclass
class GrowingLines:
    """The lines of a file that have a step. `generation` grows whenever all that was read is to be forgotten."""

    path: Path
    generation: int = 0
    bad: int = 0  # lines that are no JSON object with a step
    problem: str = ""  # why the file cannot be read
    _identity: tuple[int, int] | None = None
    _offset: int = 0
    _before: bytes = b""
    _skipping: bool = False  # the rest of a line that is too long
    _mark: tuple[int, int] | None = field(default=None)  # size and time at the last look

    def read(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the new lines with the place in the file at which each starts; all of them after a new generation."""
        self.problem = ""
        try:
            descriptor = os.open(self.path, FLAGS)
        except FileNotFoundError:
            self._forget(None)
            return
        except OSError as error:
            self.problem = f"{self.path.name} cannot be read: {error.strerror or error}"
            self._forget(None)
            return
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                self.problem = f"{self.path.name} is not a file"
                self._forget(None)
                return
            identity = (found.st_dev, found.st_ino)
            mark = (found.st_size, found.st_mtime_ns)
            if identity == self._identity and mark == self._mark:
                return
            if self._is_another(file.fileno(), identity, found.st_size):
                self._forget(identity)
            self._identity = identity
            try:
                yield from self._lines(file.fileno())
            except OSError as error:  # of a disk that went away
                self.problem = f"{self.path.name} cannot be read to its end: {error.strerror or error}"
                return
            self._mark = mark

    def lines_from(self, place: int) -> Iterator[dict[str, Any]]:
        """Yield the lines from a place at which one starts, once more; none if the file cannot be read."""
        try:
            descriptor = os.open(self.path, FLAGS)
        except OSError:
            return
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return
            file.seek(place)
            while line := file.readline(LONGEST_LINE):
                try:
                    yield parse_step_line(line)
                except ValueError:
                    continue

    def _is_another(self, descriptor: int, identity: tuple[int, int], size: int) -> bool:
        if identity != self._identity or size < self._offset:
            return True
        return os.pread(descriptor, len(self._before), self._offset - len(self._before)) != self._before

    def _forget(self, identity: tuple[int, int] | None) -> None:
        if self._identity is not None:  # something was read
            self.generation += 1
        self._identity, self._mark, self._offset, self._before = identity, None, 0, b""
        self.bad, self._skipping = 0, False

    def _lines(self, descriptor: int) -> Iterator[tuple[int, dict[str, Any]]]:
        rest = b""
        while chunk := os.pread(descriptor, CHUNK, self._offset + len(rest)):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                start = self._offset
                self._advance(line + b"\n")
                if self._skipping:
                    self._skipping = False
                elif (row := self._parse(line)) is not None:
                    yield start, row
            if len(rest) > LONGEST_LINE:  # it is not kept
                self.bad += not self._skipping
                self._skipping = True
                self._advance(rest)
                rest = b""
        # A last line without its newline: half of one, which is no JSON, or one that somebody has written whole.
        if rest and not self._skipping and (row := self._parse(rest, last=True)) is not None:
            start = self._offset
            self._advance(rest)
            yield start, row

    def _advance(self, read: bytes) -> None:
        self._offset += len(read)
        self._before = (self._before + read)[-REMEMBERED:]

    def _parse(self, line: bytes, last: bool = False) -> dict[str, Any] | None:
        if not line.strip():
            return None
        try:
            return parse_step_line(line)
        except ValueError:
            self.bad += not last
            return None
