"""Warm starts are kept in one folder that nobody else can write to, and in no more than its room."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from helpers.train.short_runs import contents, differences, recipe, trained
from trimtab.cli import app
from trimtab.files import write_atomically
from trimtab.trainer.train import warm_start
from trimtab.trainer.train.warm_start import cache_key, list_warm_starts, note_use

QUICK = {"run.steps": "1", "run.eval_every": "0", "record.enabled": "false"}


def kept(number: int, size: int = 10) -> Path:
    """Put a warm start into the cache, used the later the higher its number."""
    entry = warm_start.open_cache() / f"{number:016x}"
    (entry / "step-00000004").mkdir(parents=True)
    write_atomically(entry / "step-00000004" / "model.safetensors", "x" * size)
    os.utime(entry, (number, number))
    return entry


def test_runs_in_different_folders_share_a_warm_start(tmp_path: Path) -> None:
    _, first = trained(tmp_path / "a" / "run", QUICK)
    _, second = trained(tmp_path / "b" / "run", {**QUICK, "objective": '"dapo"'})
    (entry,) = list_warm_starts()
    assert first.has("warm start: kept in", str(entry.path))
    assert second.has("warm start: goes on from step 4", str(entry.path)), "the folder is named in the output"
    assert not list((tmp_path / "a").glob(".*")), "nothing is written beside a run"


def test_a_warm_start_from_the_cache_gives_the_same_run(tmp_path: Path) -> None:
    for name in ("one", "other"):
        trained(tmp_path / name, QUICK)
    assert not differences(contents(tmp_path / "one"), contents(tmp_path / "other"))


def test_a_warm_start_that_has_ended_is_kept_without_the_optimizer(tmp_path: Path) -> None:
    trained(tmp_path / "run", QUICK)
    (entry,) = list_warm_starts()
    names = sorted(path.name for path in entry.path.glob("step-*/*"))
    assert names == ["manifest.json", "model.safetensors", "state.json"]
    assert load_file(next(entry.path.glob("step-*/model.safetensors")))


def test_another_rule_under_the_same_name_is_another_warm_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "rule_of_a_warm_start.py"
    file.write_text("def graded(response, answer, extra):\n    return True\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    task = {"task.size": None, "task.digits": None, "task.name": "file", "task.path": str(tmp_path / "rows.jsonl")}
    columns = {"task.columns.prompt": "prompt", "task.columns.answer": "answer"}
    config = recipe({**task, **columns, "task.rule": "python:rule_of_a_warm_start:graded"})
    before = cache_key(config)
    assert cache_key(config) == before
    file.write_text("def graded(response, answer, extra):\n    return False\n")
    assert cache_key(config) != before


def test_weights_of_another_user_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path / "one", QUICK)
    (tmp_path / ".warm_start").chmod(0o777)
    _, log = trained(tmp_path / "two", QUICK)
    assert log.has("warning: the warm start is neither kept nor taken from the cache", "chmod 700")
    assert not log.has("goes on from step")
    (tmp_path / ".warm_start").chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    _, log = trained(tmp_path / "three", QUICK)
    assert log.has("belongs to another user") and not log.has("goes on from step")


def test_a_full_cache_loses_what_was_not_used_for_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "LARGEST_CACHE", 25)
    entries = [kept(number) for number in (1, 2, 3)]
    note_use(entries[0])
    assert [each.path for each in list_warm_starts()] == [entries[2], entries[0]]


def test_a_warm_start_that_is_larger_than_the_cache_is_kept_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_start, "LARGEST_CACHE", 25)
    kept(1)
    large = kept(2, size=100)
    note_use(large)
    assert [each.path for each in list_warm_starts()] == [large]


def test_the_doctor_lists_warm_starts_and_removes_them(tmp_path: Path) -> None:
    entry = kept(1, size=2_000_000)
    (entry.parent / "notes.txt").write_text("of the user")
    shown = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "1000"}).stdout
    whole = "".join(line[20:90].strip() for line in shown.splitlines())
    assert "warm starts" in shown and str(entry.parent) in whole, "a long path goes on in the next line"
    assert entry.name in shown and "1, 2.0 MB in all" in shown
    removed = CliRunner().invoke(app, ["doctor", "--remove-warm-starts"])
    assert removed.stdout == "removed 1 warm starts, 2.0 MB\n"
    assert [path.name for path in entry.parent.iterdir()] == ["notes.txt"]
