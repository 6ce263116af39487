"""Grade in other processes: forked, spawned and daemonic ones, and look for processes that they leave behind.

Run as a script it grades, prints one line of JSON, and ends in the way that its argument names.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

from helpers.grading.hostile import Hostile, hostiles
from trimtab.data import Problem
from trimtab.data.problems import user
from trimtab.grading import grade, grade_many

# Honest answers of many kinds; the later ones need algebra.
HONEST: tuple[tuple[str, str], ...] = (
    ("42", "42"),
    ("-7", "-7"),
    ("1,234", "1234"),
    ("0.5", r"\frac{1}{2}"),
    (r"\dfrac{3}{4}", r"\frac{3}{4}"),
    (r"-\frac{1}{3}", "-1/3"),
    (r"3\frac{1}{2}", r"\frac{7}{2}"),
    (r"45^\circ", "45"),
    (r"12\text{ cm}", "12"),
    (r"25\%", r"25\%"),
    ("x = 5", "5"),
    ("(1, 2)", "(1,2)"),
    (r"\{3, 1, 2\}", r"\{1, 2, 3\}"),
    (r"[0, \infty)", r"\left[0,\infty\right)"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    (r"\frac{3}{4}\pi", r"\frac{3\pi}{4}"),
    ("2^{10}", "1024"),
    (r"3 \times 10^{8}", "300000000"),
    ("3 + 4i", "4i + 3"),
    ("(x+1)(x-1)", "x^2 - 1"),
    ("x^2 + 2x + 1", "(x+1)^2"),
    (r"\frac{x+1}{x}", r"1 + \frac{1}{x}"),
    (r"\sin^2 x", r"1 - \cos^2 x"),
    (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    ("y = 2x + 1", "y = 1 + 2x"),
    (r"\text{yes}", "Yes"),
    (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"),
    (r"2^{n+1}", r"2 \cdot 2^n"),
)


def problem(truth: str, rule: str = "math") -> Problem:
    """Return a problem whose prompt does not matter."""
    return Problem(user("?"), truth, rule, "test")


def honest(times: int = 1) -> list[tuple[str, Problem]]:
    """Return the honest answers in boxes."""
    return [(f"So it is $\\boxed{{{answer}}}$.", problem(truth)) for answer, truth in HONEST] * times


def as_pairs(answers: list[Hostile]) -> list[tuple[str, Problem]]:
    """Return hostile answers as pairs for `grade_many`."""
    return [(each.response, problem(each.truth, each.rule)) for each in answers]


def wrongly_graded(hostile_ones: int) -> list[str]:
    """Grade hostile and honest answers; return the hostile ones that were correct and the honest ones that were not."""
    attacks = as_pairs(list(hostiles(1))[:hostile_ones])
    pairs = [*attacks, *honest()]
    verdicts = grade_many(pairs)
    wanted = [False] * len(attacks) + [True] * len(HONEST)
    judged = zip(pairs, verdicts, wanted, strict=True)
    return [f"{v.kind}: {p.answer}" for (_, p), v, right in judged if (v.kind == "correct") != right]


def into(results: Any, hostile_ones: int) -> None:
    """Put the result into a queue of `multiprocessing`."""
    results.put((os.getpid(), multiprocessing.current_process().daemon, wrongly_graded(hostile_ones)))


def descendants(of: int) -> dict[int, str]:
    """Return the living descendants of a process with their start times, since process ids are reused."""
    parents: dict[int, int] = {}
    began: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if fields := stat(int(folder.name)):
            parents[int(folder.name)] = int(fields[1])
            began[int(folder.name)] = fields[19]
    found, wave = {}, {of}
    while wave:
        wave = {pid for pid, parent in parents.items() if parent in wave and pid not in found}
        found.update({pid: began[pid] for pid in wave})
    return found


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name; empty where the process is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    fields = text.rpartition(")")[2].split()
    return [] if fields[0] == "Z" else fields


def alive(pids: dict[int, str]) -> list[int]:
    """Return those that are still alive."""
    return [pid for pid, began in pids.items() if (fields := stat(pid)) and fields[19] == began]


def gone(pids: dict[int, str], within: float = 120.0) -> bool:
    """Return whether all of them end within so many seconds."""
    ends = time.monotonic() + within
    while alive(pids):
        if time.monotonic() > ends:
            return False
        time.sleep(0.05)
    return True


def resident() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def forked() -> list[str]:
    """Grade, fork, and grade in parent and child at the same time; return what either got wrong."""
    errors = wrongly_graded(0)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, json.dumps([f"child: {error}" for error in wrongly_graded(0)]).encode())
        os._exit(0)
    errors += wrongly_graded(0)
    os.close(writer)
    with os.fdopen(reader) as output:
        errors += json.loads(output.read() or '["child: no output"]')
    os.waitpid(child, 0)
    return errors


def main(ending: str) -> None:
    """Grade, print what was wrong and which processes were started, and end in the given way."""
    errors = forked() if ending == "forked" else wrongly_graded(4)
    print(json.dumps({"errors": errors, "children": descendants(os.getpid())}), flush=True)  # noqa: T201
    if ending == "error":
        raise RuntimeError("this is how it ends")
    if ending == "os exit":
        os._exit(0)
    if ending == "killed":
        grade(r"\boxed{9^{9^{9^{9}}}}", "41")
        time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1])
