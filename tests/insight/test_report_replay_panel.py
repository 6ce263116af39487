"""The report's tables of other objectives are those of a replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.insight.report_runs import Made, make_run
from trimtab.insight.replay import replay
from trimtab.insight.report import page_data
from trimtab.record import open_run

NAMES = ["grpo", "gspo", "top_entropy"]


def panel_of(run: Path, names: list[str]) -> tuple[Any, list[str]]:
    """The data of the panel, and the notes of the page."""
    (found,) = page_data.page_data(page_data.ReportRequest((run,), tuple(names)))[1]["runs"]
    return found["replay"], found["notes"]


def test_the_tables_are_those_of_a_replay(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    panel, notes = panel_of(run, NAMES)
    assert not any("replay" in note for note in notes)
    result = replay(run, ["recorded", *NAMES])
    assert [row["name"] for row in panel["rows"]] == list(result.objectives)
    for row, stats in zip(panel["rows"], result.stats, strict=True):
        for reason, cell in zip(panel["reasons"], row["cells"], strict=True):
            assert (cell == "-") == (reason not in stats.reasons)
    assert [pair["names"] for pair in panel["pairs"]] == [["recorded (stapo)", name] for name in NAMES]
    assert (panel["steps"], panel["recorded_steps"]) == (4, 4)


def test_of_a_long_run_evenly_spaced_steps_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_data, "REPLAYED_STEPS", 3)
    panel, _ = panel_of(make_run(tmp_path / "run", Made(steps=8)), ["gspo", "stare"])
    assert (panel["steps"], panel["recorded_steps"]) == (3, 8)
    assert panel["notes"] == []


def test_every_so_many_steps_are_those_that_a_replay_takes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(steps=8))
    assert [step.step for step in replay(run, ["gspo"], every=3).steps] == [1, 4, 7]
    assert [step.step for step in replay(run, ["gspo"], first=2, last=7, every=2).steps] == [2, 4, 6]
    assert [step.number for step in open_run(run).select(every=5)] == [1, 6]


def test_an_objective_that_cannot_be_built_again_is_a_note(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(objective={"name": "nobody knows it"}))
    panel, notes = panel_of(run, NAMES)
    assert panel is None
    assert len([note for note in notes if note.startswith("no replay: ")]) == 1
