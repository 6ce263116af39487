"""Small file operations that several packages need: atomic writes, locked folders, JSON lines."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trimtab import failpoints


def write_atomically(path: Path, data: str | bytes | memoryview) -> None:
    """Write a file so that a reader, or a killed process, finds all of the data or what was there before."""
    temporary = path.with_name(f".{path.name}.writing")
    with temporary.open("wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())
    failpoints.failpoint("file.written")
    temporary.replace(path)


def append_json_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append one line of JSON; on a full disk the file stays as it was."""
    line = json.dumps(row, sort_keys=True, allow_nan=False) + "\n"
    end = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            if failpoints.due("line.torn"):
                file.write(line[: len(line) // 2])
                file.flush()
                failpoints.die()
            file.write(line)
    except OSError:
        os.truncate(path, end)
        raise


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read every whole line of a JSON-lines file; a file that does not exist has none.

    A line that is not JSON is skipped: a killed process leaves its last line cut off.
    """
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return rows


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder against other processes; the kernel releases the lock however this process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is in use by another process: wait for it, or choose another --out") from None
        yield
    finally:
        os.close(descriptor)
