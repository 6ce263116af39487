"""The metrics say what a run spends its time on, and slow grading gets advice."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.train.short_runs import trained
from trimtab.trainer.train import metrics, time_words
from trimtab.trainer.train.metrics import has_slow_grading, slow_grading_advice

PARTS = ("time/sampling", "time/grading", "time/scoring")


def test_the_parts_of_every_step_are_measured(tmp_path: Path) -> None:
    run, _ = trained(tmp_path / "run")
    first, *steps = run.folder.records()
    assert {"time/warm_start", "time/evaluation"} <= first.keys()
    assert not {*PARTS, "time/update"} & first.keys(), "the sampling of an evaluation is not the training's"
    for record in steps:
        assert all(record[part] > 0 for part in PARTS)
        assert sum(record[part] for part in PARTS) <= record["time/rollout"]
        assert ("time/evaluation" in record) == (record["step"] % 3 == 0)
        # Written after the metrics of its own step; that of step 0 before the first.
        assert ("time/checkpoint" in record) == (record["step"] % 2 == 1)
        assert "time/warm_start" not in record


def test_slow_grading_gets_advice_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "SLOW_GRADING", 0.0)
    monkeypatch.setattr(metrics, "SLOW_GRADING_SECONDS", 0.0)
    _, log = trained(tmp_path / "run")
    assert sum("grading takes most of a step" in message for message in log.messages) == 1


def test_grading_is_slow_if_it_takes_most_of_a_long_step() -> None:
    slow = {"time/grading": 7.5, "time/rollout": 9.0, "time/update": 1.25}
    assert has_slow_grading(slow)
    assert "7.5 of 10.2 s" in slow_grading_advice(slow)
    assert not has_slow_grading(slow | {"time/update": 10.0})
    assert not has_slow_grading({name: seconds / 100 for name, seconds in slow.items()})


def test_times_are_named_with_the_largest_first() -> None:
    records = [{"time/update": 1.0, "time/sampling": 0.5, "time/rollout": 9.0}, {"time/update": 0.5, "step": 7.0}]
    assert time_words(records) == "updates 75.0%, sampling 25.0%"
    assert time_words([{"reward/mean": 1.0}]) == ""
