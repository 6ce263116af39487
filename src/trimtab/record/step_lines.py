"""JSON lines that belong to steps: a run's metrics, alarms and skipped updates.

A line that is not a JSON object with a step is left out and reported with its file and row. Only a last line without
its newline is not reported: a killed process leaves one, and so does a process that is writing it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trimtab.files import parse_json_line
from trimtab.text import shown

LAST_STEP = 2**31 - 1  # records and reports hold steps as 32-bit integers
LARGEST_METRIC = 1e38  # what float32 holds, as on a page; a sum of a few values of 1e308 is infinite
LONGEST_LINE = 1 << 20  # bytes; a line of metrics has a few thousand
MAX_REPORTED = 3  # of the lines of a file


def iter_step_lines(path: Path, on_error: Callable[[str], object]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, each with a valid `step`; a file that does not exist has none."""
    if not path.is_file():  # opening a named pipe would block
        if path.exists():
            on_error(f"{path} is not a file")
        return
    bad = 0
    with path.open("rb") as file:  # as bytes, so that a byte that is not UTF-8 spoils only its own line
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), start=1):
            try:
                if line.strip():
                    yield parse_step_line(line)
            except ValueError as error:
                rest = line
                while len(rest) == LONGEST_LINE and not rest.endswith(b"\n"):
                    rest = file.readline(LONGEST_LINE)
                bad += rest.endswith(b"\n")
                if rest.endswith(b"\n") and bad <= MAX_REPORTED:
                    on_error(f"{path}, row {number}: {error}; the row is left out")
    if bad > MAX_REPORTED:
        on_error(f"{path}: {bad - MAX_REPORTED} more rows are left out for the same reasons")


def read_metrics(path: Path, on_error: Callable[[str], object]) -> list[dict[str, float]]:
    """Return the step and the finite numbers of every line; nothing else in a line is a metric."""
    return [
        {name: value for name, value in row.items() if is_finite_number(value)}
        for row in iter_step_lines(path, on_error)
    ]


def last_step(path: Path) -> int:
    """Return the step of the last line that has one, without reading all of the file; 0 if there is none."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
        for line in reversed(file.read().splitlines()):
            try:
                return int(parse_step_line(line)["step"])
            except ValueError:
                continue
    return 0


def is_finite_number(value: object) -> bool:
    """Return whether a value of a JSON line is a number with which one can go on to calculate."""
    # The comparison is false for NaN; `math.isfinite` raises for an integer that no float can hold.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_METRIC


def parse_step_line(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line, with its step as an integer; ValueError says what is wrong with it."""
    if len(line) == LONGEST_LINE:
        raise ValueError(f"longer than {LONGEST_LINE} bytes")
    row = parse_json_line(line)
    step = row.get("step")
    if isinstance(step, float) and step.is_integer():  # as some other trainers log it
        step = row["step"] = int(step)
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= LAST_STEP:
        found = "missing" if "step" not in row else shown(step)
        raise ValueError(f"`step` is {found}; it must be a whole number from 0 to {LAST_STEP}")
    return row
