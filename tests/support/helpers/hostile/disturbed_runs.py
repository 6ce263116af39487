"""Runs of six tiny steps that are disturbed, finished, and compared with one that was left alone."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from helpers.hostile.started_commands import Command, Starter

STEPS = 6

# Two updates a step, a checkpoint every second step, an evaluation every third; the warm start saves in its middle.
SETTINGS = {
    "objective": '"stapo + stare(adaptive=true)"',
    "task.size": "10",
    "task.digits": "1",
    "rollout.prompts": "4",
    "rollout.samples": "4",
    "rollout.max_new_tokens": "4",
    "reward.overlong_buffer": "4",
    "update.per_step": "2",
    "update.lr": "3e-3",
    "update.token_budget": "64",
    "warm_start.steps": "4",
    "warm_start.eval_every": "2",
    "warm_start.batch_size": "4",
    "run.steps": str(STEPS),
    "run.checkpoint_every": "2",
    "run.eval_every": "3",
    "run.eval_problems": "4",
    "run.threads": "1",
    "run.device": "cpu",
}
# Its problems are in a file and graded by a function, in a worker process.
GRADED = {
    "task.name": "file",
    "task.path": "problems.jsonl",
    "task.eval_path": "problems.jsonl",
    "warm_start.steps": "0",
}
OWN_RULE = {**GRADED, "task.rule": "python:rules:even"}
RULES = """\
import os
import time


def even(response, answer, extra):
    # Grade by length. Where the test made the file "hold", say that grading is under way and wait for "go".
    if os.path.exists("hold"):
        open("grading", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.01)
    return len(response) % 2 == 0
"""


def some(cases: Sequence[tuple[str, tuple[Any, ...]]], chosen: set[str]) -> list[Any]:
    """Return named cases as parameters of a test; by default only the chosen are tried."""
    return [pytest.param(*case, id=name, marks=[] if name in chosen else [pytest.mark.slow]) for name, case in cases]


def each(names: Iterable[str]) -> list[tuple[str, tuple[str]]]:
    """Return cases that are their own names."""
    return [(name, (name,)) for name in names]


def settings(changes: Mapping[str, str] | None = None) -> list[str]:
    """Return the words of a command that set a short run."""
    settings = {**SETTINGS, **(changes or {})}
    if settings.get("task.name") == "file":  # a file has no such options
        del settings["task.size"], settings["task.digits"]
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def prepare(folder: Path) -> None:
    """Write the problems and the rule of runs that grade by a function."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"{n}+{n % 7}=", "reward_model": {"ground_truth": str(n + n % 7)}} for n in range(10)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rules.py").write_text(RULES)


def train_words(changes: Mapping[str, str] | None = None, out: str = "run", quiet: bool = True) -> list[str]:
    """Return the words of a command that trains in the folder `out`."""
    return ["train", "addition", "--out", out, *(["--quiet"] if quiet else []), *settings(changes)]


def steps(run: Path) -> list[int]:
    """Return the steps that a run has logged, without a line that is not yet whole."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def checkpoints(run: Path) -> list[int]:
    """Return the steps of a run's checkpoints."""
    return sorted(int(path.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*"))


def contents(run: Path) -> dict[str, str]:
    """Return what a run has written: metrics without times, line by line, and digests of all other files.

    Left out are the report, which has times in it, and checkpoints but the newest: a run that was stopped has others.
    """
    found: dict[str, str] = {}
    newest = f"step-{checkpoints(run)[-1]:08}"
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = str(path.relative_to(run))
        if name == "metrics.jsonl":
            for n, line in enumerate(path.read_text().splitlines()):
                values = {
                    key: value for key, value in json.loads(line).items() if not key.startswith(("time/", "memory/"))
                }
                found[f"metrics, line {n}"] = json.dumps(values, sort_keys=True)
        elif name == "config.toml":
            config = tomllib.loads(path.read_text())
            config["run"].pop("python_path", None)  # where a rule of one's own was found: another folder in each test
            found[name] = json.dumps(config, sort_keys=True)
        elif name != "report.html" and (newest in name or not name.startswith("checkpoints/")):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the names under which two runs differ."""
    return [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]


def check_end(command: Command, codes: set[int]) -> None:
    """Check how a command ended: its exit code, no traceback, no process left."""
    code, left = command.code(), command.left()
    assert code in codes, f"exit code {code}, expected {sorted(codes)}:\n{command.output[-2000:]}"
    assert not left, f"processes left: {left}"
    for sign in ("Traceback", "Exception ignored", "Fatal Python error", "leaked", "Unhandled"):
        assert sign not in command.output, command.output[-3000:]


def finish(starter: Starter, folder: Path, undisturbed: Mapping[str, str], **how: Any) -> None:
    """Finish a run as docs/stopping.md says, and check that it equals one that was left alone."""
    changes = how.pop("changes", None)
    started = (folder / "run" / "config.toml").exists()
    words = ["train", "--resume", "run", "--quiet"] if started else train_words(changes)
    check_end(starter.start(words, folder, **how), {0})
    assert steps(folder / "run")[-1] == STEPS
    assert not differences(undisturbed, contents(folder / "run"))


def disturb_grading(command: Command, how: str, folder: Path) -> None:
    """Wait until a worker grades; signal the command, or kill its workers; then let the grading go on."""
    command.wait_until((folder / "grading").exists)
    if how.startswith("worker"):
        for pid in command.children()[: 1 if how == "worker" else None]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    else:
        command.signal(how.rsplit(maxsplit=1)[-1], group="group" in how)
    (folder / "hold").unlink()
    (folder / "go").touch()
