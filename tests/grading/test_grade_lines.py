"""`trimtab grade`: a verdict for every line, in order, as lines come; bad lines are named and not lost."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from trimtab.grading.grade_lines import grade_lines

RIGHT = {"response": r"\boxed{42}", "answer": "42"}
SYMBOLIC = {"response": r"\boxed{2\sin x\cos x}", "answer": r"\sin 2x"}
TRIMTAB = [sys.executable, "-m", "trimtab"]


def line(row: object) -> bytes:
    return json.dumps(row).encode() + b"\n"


def graded(*lines: bytes, rule: str = "math") -> tuple[list[dict[str, Any]], list[str], int]:
    out, said = io.StringIO(), list[str]()
    bad = grade_lines(lines, out, rule, said.append)
    return [json.loads(text) for text in out.getvalue().splitlines()], said, bad


def test_every_line_gets_its_verdict_in_order() -> None:
    rows, said, bad = graded(
        line(SYMBOLIC), line(RIGHT), line({**RIGHT, "answer": "41"}), line({**RIGHT, "response": ""})
    )
    assert [row["kind"] for row in rows] == ["correct", "correct", "wrong", "no_answer"]
    assert rows[1]["extracted"] == "42"
    assert all(row["seconds"] >= 0 for row in rows)
    assert (said, bad) == ([], 0)


def test_a_line_may_name_its_rule() -> None:
    rows, _, _ = graded(
        line({"response": "Answer: 42", "answer": "42", "rule": "dapo"}),
        line({"response": "42", "answer": "42", "rule": "exact"}),
        line({"response": "42", "answer": "42"}),
        rule="number",
    )
    assert [row["kind"] for row in rows] == ["correct"] * 3


def test_a_line_cannot_have_code_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    graded(line({"response": f"open({str(canary)!r}, 'w')", "answer": "pass", "rule": "python:timeit:timeit"}))
    assert not canary.exists()


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (b"junk\n", "not JSON"),
        (b"\n", "not JSON"),
        (b"\xff\xfe\n", "not JSON"),
        (b"[" * 100_000 + b"\n", "not JSON"),
        (line([1]), "must be a JSON object, not list"),
        (line({"answer": "42"}), "`response` is missing"),
        (line({"response": "42", "answer": 42}), "`answer` is int"),
        (line({**RIGHT, "rule": 7}), "`rule` is int"),
        (line({**RIGHT, "rule": "bocksed"}), "there is no rule 'bocksed'"),
        (line({**RIGHT, "extra": [1]}), "`extra` is list"),
        (line({**RIGHT, "rule": "gym:countdown"}), "needs the problem's `extra`"),
        (line({**RIGHT, "rule": "python:timeit:timeit"}), "a Python function or a URL can be named by --rule only"),
    ],
)
def test_a_bad_line_is_named_and_keeps_its_place(bad: bytes, fault: str) -> None:
    rows, said, count = graded(line(RIGHT), bad, line(RIGHT))
    assert [row.get("kind") for row in rows] == ["correct", None, "correct"]
    assert rows[1]["line"] == 2
    assert fault in rows[1]["error"]
    assert said == [f"line 2: {rows[1]['error']}"]
    assert count == 1


def test_a_line_whose_rule_fails_is_named_and_counts_as_not_graded() -> None:
    rows, said, count = graded(line(RIGHT), line({"response": "42", "answer": "forty", "rule": "number"}))
    assert [row["kind"] for row in rows] == ["correct", "crashed"]
    assert said == [f"line 2: the rule failed: {rows[1]['error']}"]
    assert count == 1


def test_a_rule_that_does_not_exist_is_an_error_before_any_line() -> None:
    with pytest.raises(ValueError, match="no rule 'bocksed'"):
        graded(line(RIGHT), rule="bocksed")


def test_a_function_that_cannot_be_loaded_is_an_error_of_the_command() -> None:
    with pytest.raises(ValueError, match="python:no_such_module:f: there is no module no_such_module in"):
        graded(line(RIGHT), rule="python:no_such_module:f")


def test_a_reader_that_goes_away_is_an_error_and_no_hang() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError("gone")

    with pytest.raises(BrokenPipeError):
        grade_lines([line(RIGHT)] * 5_000, Closed(), "math", lambda _: None)


def test_the_command_grades_and_says_by_its_exit_code_that_a_line_was_bad() -> None:
    given = line(RIGHT) + b"junk\x1b[31m\n" + line({**RIGHT, "answer": "41"})
    done = subprocess.run(
        [*TRIMTAB, "grade", "--rule", "math"], input=given, capture_output=True, timeout=120, check=False
    )
    rows = [json.loads(text) for text in done.stdout.splitlines()]
    assert [row.get("kind") for row in rows] == ["correct", None, "wrong"]
    assert done.returncode == 2
    assert done.stderr.startswith(b"trimtab: line 2: not JSON")
    assert b"\x1b" not in done.stderr


def test_the_command_succeeds_on_good_lines() -> None:
    done = subprocess.run([*TRIMTAB, "grade"], input=line(RIGHT), capture_output=True, timeout=120, check=True)
    assert json.loads(done.stdout)["kind"] == "correct"
    assert done.stderr == b""


def test_a_verdict_comes_before_the_next_line_is_sent() -> None:
    with subprocess.Popen([*TRIMTAB, "grade"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        watchdog = threading.Timer(120, process.kill)
        watchdog.start()
        for number in range(3):
            process.stdin.write(line({"response": rf"\boxed{{{number}}}", "answer": str(number)}))
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["kind"] == "correct"
        process.stdin.close()
        assert process.wait(60) == 0
        watchdog.cancel()


def test_ctrl_c_leaves_no_worker_behind() -> None:
    with subprocess.Popen([*TRIMTAB, "grade"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(line(SYMBOLIC))
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["kind"] == "correct"
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, check=False)
        workers = [int(pid) for pid in children.stdout.split()]
        process.kill()
        process.wait()
    for _ in range(100):
        left = [pid for pid in workers if os.path.exists(f"/proc/{pid}")]
        if not left:
            break
        threading.Event().wait(0.1)
    assert not left
