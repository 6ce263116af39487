"""A short run is read whole; a long run is sampled evenly, and where metrics, alarms and the reader point."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.insight.report_runs import Made, make_run
from trimtab.insight.report import run_files
from trimtab.insight.report.run_files import read_run, select_steps


def test_a_short_run_is_read_whole(tmp_path: Path) -> None:
    selection = select_steps(read_run(make_run(tmp_path / "run", Made(steps=6))))
    assert selection.evenly_spaced == [1, 2, 3, 4, 5, 6] and selection.highlighted == []


def test_a_long_run_is_sampled_evenly_and_where_metrics_alarms_and_the_reader_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MOST_STEPS": 5, "FEWEST_STEPS": 5, "MOST_HIGHLIGHTED": 2}.items():
        monkeypatch.setattr(run_files, name, value)
    run = make_run(tmp_path / "run", Made(steps=41, alarms=[{"step": 17, "alarm": "x"}]))
    selection = select_steps(read_run(run), requested=[8, 999])
    assert selection.evenly_spaced == [1, 11, 21, 31, 41]
    assert {8, 17} <= set(selection.highlighted)
    assert 40 in selection.highlighted  # silenced_share rises with the steps: the highest that is not there yet
    assert not set(selection.highlighted) & set(selection.evenly_spaced)


def test_large_steps_make_a_smaller_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "MOST_TOKENS", 10 * 33)
    monkeypatch.setattr(run_files, "FEWEST_STEPS", 3)
    run = read_run(make_run(tmp_path / "run", Made(steps=30)))
    assert len(select_steps(run).evenly_spaced) == 10
    monkeypatch.setattr(run_files, "MOST_TOKENS", 1)
    assert len(select_steps(run).evenly_spaced) == 3
