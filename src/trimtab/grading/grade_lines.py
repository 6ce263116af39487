"""Grade a stream: JSON lines with a response and an answer in, lines with verdicts out, in order.

A line that cannot be graded is reported by its number. One that cannot be read gets an error line among the verdicts,
so that line n of the output always belongs to line n of the input.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from trimtab.data import Problem, Sample
from trimtab.files import parse_json_line
from trimtab.grading.rules import load_rule, start_grading
from trimtab.grading.verdicts import Verdict

MAX_LINES_AHEAD = 512  # read beyond the last verdict written

OutputLine = Callable[[], list[Verdict]] | dict[str, Any]  # what waits for the verdict, or the error line itself


def grade_lines(lines: Iterable[bytes], out: TextIO, rule: str, on_error: Callable[[str], None]) -> int:
    """Grade every line as it arrives, by `rule` if it names none; return how many could not be graded.

    Those are lines that cannot be read, and lines whose rule failed.
    """
    load_rule(rule)
    pending: queue.Queue[OutputLine | None] = queue.Queue(MAX_LINES_AHEAD)
    write_errors: list[OSError | ValueError] = []
    ungraded: list[int] = []  # line numbers, of both threads

    def report(number: int, problem: str) -> None:
        ungraded.append(number)
        on_error(f"line {number}: {problem}")

    writer = threading.Thread(target=_write_verdicts, args=(pending, out, write_errors, report), daemon=True)
    writer.start()
    for number, line in enumerate(lines, start=1):
        if write_errors:
            break
        item: OutputLine
        try:
            item = _submit_line(line, rule)
        except ValueError as error:
            report(number, str(error))
            item = {"line": number, "error": str(error)}
        pending.put(item)
    pending.put(None)
    writer.join()
    if write_errors:
        raise write_errors[0]
    return len(ungraded)


def _submit_line(line: bytes, rule: str) -> Callable[[], list[Verdict]]:
    row = parse_json_line(line)
    line_rule, extra = row.get("rule", rule), row.get("extra") or {}
    for key, value in (("response", row.get("response")), ("answer", row.get("answer")), ("rule", line_rule)):
        if not isinstance(value, str):
            raise ValueError(f"`{key}` is {'missing' if value is None else type(value).__name__}; it must be text")
    # Lines are data, and data must not choose what code runs or which servers are asked.
    if line_rule.startswith(("python:", "http:", "https:")) and line_rule != rule:
        raise ValueError(f"`rule` is {line_rule[:100]!r}: a Python function or a URL can be named by --rule only")
    if not isinstance(extra, dict):
        raise ValueError(f"`extra` is {type(extra).__name__}; it must be an object")
    return start_grading([Sample(Problem((), row["answer"], line_rule, "", extra=extra), row["response"])])


def _write_verdicts(
    pending: queue.Queue[OutputLine | None],
    out: TextIO,
    write_errors: list[OSError | ValueError],
    report: Callable[[int, str], None],
) -> None:
    """Wait for each verdict in order, write it at once, and report it if its rule failed; runs in a thread."""
    number = 0
    while (item := pending.get()) is not None:
        number += 1
        if write_errors:
            continue  # drain the queue, so that the reading side is not blocked and sees the error
        try:
            row = item if isinstance(item, dict) else item()[0].as_row()
            out.write(json.dumps(row) + "\n")
            out.flush()
            if row.get("kind") == "crashed":  # of a traceback the last line, which is the error itself
                report(number, f"the rule failed: {(row.get('error') or 'no reason is known').splitlines()[-1]}")
        except (OSError, ValueError) as error:  # the output was closed, or the grading function does not exist
            write_errors.append(error)
