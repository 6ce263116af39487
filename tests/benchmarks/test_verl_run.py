"""How the benchmark of verl follows a run: its stages, its steps, its end, and what is left of it when it is killed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from verl_run import logged, processes_in, run

LIMIT = 300  # seconds; none of these takes more than a few

# Says what verl says, logs two steps, and goes on for ever with a child in a session of its own, as an engine's.
ENDLESS = """
import subprocess, sys, time
print("\\x1b[36m(pid=1)\\x1b[0m Started a local Ray instance.", flush=True)
print("Loading weights:  50%|##   | 1/2 [00:00<00:00, 7.00it/s]\\rTraining Progress:   0%|  | 0/2", flush=True)
print("step:1 - " + "x" * 9999, flush=True)
endless = [sys.executable, "-c", "import time\\nprint('child', flush=True)\\nwhile True: time.sleep(1)"]
child = subprocess.Popen(endless, start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
with open("metrics.jsonl", "w") as out:
    out.write('{"step": 1, "data": {"a": 1.0}}\\n{"step": 2, "data": {"a": 2.0}}\\n{"step": 3, "da')
while True:
    time.sleep(1)
"""
FAILS = "print('Started a local Ray instance.'); print(' 50%|#  | 1/2'); raise SystemExit('no room')"


def followed(folder: Path, code: str, kill_after: int | None, seconds: float = LIMIT) -> dict[str, Any]:
    return run([sys.executable, "-c", code], folder, os.environ, folder / "metrics.jsonl", kill_after, seconds)


def test_a_run_is_killed_with_its_children_when_it_has_logged_its_steps(tmp_path: Path) -> None:
    result = followed(tmp_path, ENDLESS, kill_after=2)
    assert result["exit_code"] is None and "error" not in result
    assert list(result["stages"]) == ["Ray is up", "first step done"]
    assert result["processes_killed"] == 2 and processes_in(tmp_path) == []
    assert [step["a"] for step in logged(tmp_path / "metrics.jsonl")] == [1.0, 2.0]  # not the line half written


def test_a_run_that_fails_leaves_its_last_words(tmp_path: Path) -> None:
    for kill_after in (None, 2):
        result = followed(tmp_path, FAILS, kill_after)
        assert result["exit_code"] == 1
        assert result["error"].startswith("exit code 1")
        assert "Started a local Ray" in result["error"] and "no room" in result["error"]
        assert "%|" not in result["error"]


def test_a_run_that_takes_too_long_is_cut_and_says_so(tmp_path: Path) -> None:
    for kill_after in (None, 2):
        result = followed(tmp_path, "while True: pass", kill_after, seconds=0)
        assert result["error"].startswith("cut after")
        assert processes_in(tmp_path) == []


def test_a_run_that_ends_well_has_no_error(tmp_path: Path) -> None:
    result = followed(tmp_path, "print('done')", kill_after=None)
    assert result["exit_code"] == 0 and "error" not in result
