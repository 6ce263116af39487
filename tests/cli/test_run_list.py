"""`trimtab runs` lists runs with their state, newest first, and the settings that set each apart."""

from __future__ import annotations

import os
from itertools import pairwise, takewhile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trimtab.cli import app
from trimtab.cli.run_list import run_lines
from trimtab.files import locked, write_json_lines
from trimtab.trainer.config import load
from trimtab.trainer.train import resolved_toml


def make(path: Path, age: int, *settings: str, steps: int = 5, saved: bool = True, model: bool = False) -> None:
    """Write the folder of a run that has done so many steps."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text(resolved_toml(load("addition", ["run.steps=30", *settings])))
    accuracy = [0.8 if step < 10 else 0.1 for step in range(steps + 1)]
    write_json_lines(path / "metrics.jsonl", [{"step": n, "eval/accuracy": a} for n, a in enumerate(accuracy)])
    os.utime(path / "metrics.jsonl", (1e9 - age, 1e9 - age))
    if saved:
        (path / f"checkpoints/step-{steps:08d}").mkdir(parents=True)
    if model:
        (path / "model").mkdir()


def test_states_and_differences_of_runs_newest_first(tmp_path: Path) -> None:
    make(tmp_path / "stopped", 3)
    make(tmp_path / "compare/grpo-seed1", 4, "objective.name=grpo", steps=9)
    make(tmp_path / "failed", 2, "update.lr=1e-2", saved=False)
    make(tmp_path / "running", 1)
    make(tmp_path / "collapsed", 5, steps=30, model=True)
    make(tmp_path / "finished", 6, "run.steps=8", steps=8, model=True)
    make(tmp_path / "fell", 7, "run.steps=15", steps=15, model=True)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/config.toml").write_text("[")
    with locked(tmp_path / "running"):
        lines = run_lines(tmp_path)
    assert max(map(len, lines)) <= 80
    listed = [line.split(maxsplit=1) for line in lines if not line.startswith("    ")]
    assert listed[0][0] == "damaged" and listed[0][1].startswith("unreadable: ")
    assert listed[1:] == [
        ["running", "running at step 5 of 30"],
        ["failed", "failed after step 5 of 30"],
        ["stopped", "stopped at step 5 of 30"],
        ["compare/grpo-seed1", "stopped at step 9 of 30"],
        ["collapsed", "collapsed at step 10 of 30"],
        ["finished", "finished 8 steps"],
        ["fell", "finished 15 steps, and ended below half of its best"],
    ]
    below = {line.split()[0]: after.strip() for line, after in pairwise(lines) if after.startswith("    ")}
    assert below["failed"] == "update.lr=0.01"
    assert below["finished"] == "run.steps=8"
    assert below["compare/grpo-seed1"].startswith("objective.name=grpo")
    assert set(below) == {"failed", "finished", "fell", "compare/grpo-seed1"}


def test_of_two_runs_both_values_are_shown(tmp_path: Path) -> None:
    make(tmp_path / "a", 1, "update.lr=1e-2")
    make(tmp_path / "b", 2, "update.lr=1e-3")
    assert [line.strip() for line in run_lines(tmp_path)[1::2]] == ["update.lr=0.01", "update.lr=0.001"]


def test_parts_of_the_users_own_are_shown_by_their_names(tmp_path: Path) -> None:
    make(tmp_path / "a", 1)
    make(tmp_path / "b", 2)
    for name, key in (("a", "objective"), ("b", "task")):
        path = tmp_path / name / "config.toml"
        tables = {
            "objective": '[objective]\nname = "python:mine:gentle"\nstrength = 2',
            "task": '[task]\nname = "file"\npath = "/data/p.jsonl"\nrule = "python:mine:near"',
        }
        rest = [part for part in path.read_text().split("\n\n") if not part.startswith(f"[{key}")]
        path.write_text("\n\n".join([*rest, tables[key]]))
    a, b = (_below(run_lines(tmp_path), name) for name in "ab")
    assert "objective.name=python:mine:gentle, objective.strength=2, task.name=arithmetic" in a
    assert "task.name=file, " in b and "task.path=/data/p.jsonl" in b and "task.rule=python:mine:near" in b


def _below(lines: list[str], name: str) -> str:
    """Return the text below the line of a run."""
    first = next(at for at, line in enumerate(lines) if line.split()[0] == name) + 1
    return " ".join(line.strip() for line in takewhile(lambda line: line.startswith("    "), lines[first:]))


def test_names_that_nobody_should_print_are_escaped_and_cut(tmp_path: Path) -> None:
    make(tmp_path / ("x\x1b[31m\n" + "y" * 120), 1)
    (line,) = run_lines(tmp_path)
    assert "\x1b" not in line and "\n" not in line and len(line) <= 80


def test_the_command_prints_the_list_or_says_that_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["runs"])
    assert done.exit_code == 2 and "'runs' has no runs" in done.output
    make(tmp_path / "runs/first", 1)
    done = CliRunner().invoke(app, ["runs"])
    assert done.output.split() == ["first", "stopped", "at", "step", "5", "of", "30"]
