"""Grading a stream: lines of JSON with a response and an answer in, lines with verdicts out, in order.

A line that cannot be graded is named by its number and gets a line of its own among the verdicts, so that line n of the
output is always about line n of the input.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from trimtab.rewards.rules import Pending, check_rule, submit
from trimtab.rewards.verdicts import Verdict

MOST_AHEAD = 512  # lines read beyond the last verdict written

Item = Pending | dict[str, Any]


def grade_lines(lines: Iterable[bytes], out: TextIO, rule: str, complain: Callable[[str], None]) -> int:
    """Grade every line as it comes; how many could not be. `rule` is for lines that name none."""
    check_rule(rule)
    ahead: queue.Queue[Item | None] = queue.Queue(MOST_AHEAD)
    broken: list[OSError | ValueError] = []
    writer = threading.Thread(target=_write, args=(ahead, out, broken), daemon=True)
    writer.start()
    bad = 0
    for number, line in enumerate(lines, start=1):
        if broken:
            break
        item: Item
        try:
            item = _graded(line, rule)
        except ValueError as error:
            bad += 1
            complain(f"line {number}: {error}")
            item = {"line": number, "error": str(error)}
        ahead.put(item)
    ahead.put(None)
    writer.join()
    if broken:
        raise broken[0]
    return bad


def _graded(line: bytes, rule: str) -> Pending:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({str(error)[:200]})") from None
    if not isinstance(row, dict):
        raise ValueError(f"a line must be a JSON object, not {type(row).__name__}")
    named, extra = row.get("rule", rule), row.get("extra") or {}
    for key, value in (("response", row.get("response")), ("answer", row.get("answer")), ("rule", named)):
        if not isinstance(value, str):
            raise ValueError(f"`{key}` is {'missing' if value is None else type(value).__name__}; it must be text")
    if named.startswith("python:") and named != rule:  # lines are data, and data must not choose what code runs
        raise ValueError(f"`rule` is {named[:100]!r}: a Python function is named by --rule alone")
    if not isinstance(extra, dict):
        raise ValueError(f"`extra` is {type(extra).__name__}; it must be an object")
    return submit(row["response"], row["answer"], named, extra)


def _write(ahead: queue.Queue[Item | None], out: TextIO, broken: list[OSError | ValueError]) -> None:
    """In a thread: wait for each verdict in turn and write it at once."""
    while (item := ahead.get()) is not None:
        if broken:
            continue  # nobody reads on; let the reader find out
        try:
            said = item if isinstance(item, dict) else _row(item if isinstance(item, Verdict) else item())
            out.write(json.dumps(said) + "\n")
            out.flush()
        except (OSError, ValueError) as error:  # the reader is gone, or there is no such function to grade by
            broken.append(error)


def _row(verdict: Verdict) -> dict[str, Any]:
    return {"kind": verdict.kind, "extracted": verdict.extracted, "seconds": round(verdict.seconds, 6)}
