"""The line in words: what it says about runs that learn, do not, collapse, saturate, or wait."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.insight.watching import step_line
from trimtab.insight.watch.status import Status, status
from trimtab.insight.watch.watched_run import WatchedRun


def said(folder: Path, lines: list[str], config: str = "[run]\nsteps = 100\n") -> Status:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "config.toml").write_text(config)
    run = WatchedRun(folder)
    run.poll()
    return status(run)


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    found = said(tmp_path, [])
    assert found.kind == "plain" and found.words == "Nothing has been measured yet."
    assert found.headline.startswith("No step yet")


def test_a_run_that_learns_by_its_reward(tmp_path: Path) -> None:
    found = said(tmp_path, [step_line(step) for step in range(1, 31)])
    assert found.kind == "good" and found.words.startswith("Learning: the mean reward rose from 0.200 to 0.8")


def test_a_run_whose_accuracy_rises_by_more_than_chance(tmp_path: Path) -> None:
    lines = [json.dumps({"step": 0, "eval/accuracy": 0.2}) + "\n", *(step_line(step) for step in range(1, 10))]
    found = said(tmp_path, [*lines, step_line(10, **{"eval/accuracy": 0.6, "eval/problems": 200})])
    assert found.kind == "good" and "held-out accuracy rose from 20.0% to 60.0% of 200 problems" in found.words


def test_a_run_that_stays_where_it_is(tmp_path: Path) -> None:
    found = said(tmp_path, [step_line(step, **{"reward/mean": 0.5 + 0.01 * (step % 2)}) for step in range(1, 31)])
    assert found.kind == "plain" and found.words.startswith("Not learning visibly yet")


def test_a_run_without_signal(tmp_path: Path) -> None:
    found = said(tmp_path, [step_line(step, **{"groups/mixed_share": 0.0}) for step in range(1, 16)])
    assert found.kind == "bad" and "No signal: rewards have not differed within any group for 15 steps" in found.words
    assert "easier problems" in found.words


def test_a_run_that_collapsed(tmp_path: Path) -> None:
    lines = [step_line(step, **{"reward/accuracy": 0.8, "eval/accuracy": 0.8}) for step in range(1, 11)]
    lines += [step_line(step, **{"reward/accuracy": 0.0, "eval/accuracy": 0.0}) for step in range(11, 40)]
    found = said(tmp_path, lines)
    assert found.kind == "bad" and found.words.startswith(
        "It collapsed at step 11: accuracy is 0.00; its best was 0.80"
    )


def test_control_at_its_limit(tmp_path: Path) -> None:
    found = said(tmp_path, [step_line(step, **{"trim/saturated": 1.0, "trim/weight": 8.0}) for step in range(1, 31)])
    assert (
        found.kind == "warn" and "The entropy control is saturated: trim's weight is at its limit, 8.000" in found.words
    )


@pytest.mark.parametrize(("metric", "word"), [("time/grading", "grading"), ("time/tools", "waiting for tools")])
def test_what_a_run_waits_for(tmp_path: Path, metric: str, word: str) -> None:
    found = said(tmp_path, [step_line(step, **{metric: 6.0}) for step in range(1, 31)])
    assert f"Slow because of {word}, which takes 75.0% of the time." in found.words


def test_speed_memory_and_time_left(tmp_path: Path) -> None:
    found = said(tmp_path, [step_line(step, **{"memory/gpu_peak_gb": 20.5}) for step in range(1, 31)])
    figures = {each["name"]: each["value"] for each in found.figures}
    assert figures == {
        "seconds of a step": "2", "tokens/s": "16", "tokens/s, sampling": "44", "tokens/s, scoring": "132",
        "tokens/s, updates": "33", "GPU memory, most so far": "20.5 GB",
    }  # fmt: skip
    assert "left" not in found.headline  # it has ended
    run = WatchedRun(tmp_path)
    run.poll()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(step_line(31))
    run.poll()
    assert status(run).headline == "Running: step 31 of 100, about 2:18 left"


def test_a_run_of_another_trainer_has_no_plan(tmp_path: Path) -> None:
    found = said(tmp_path, [step_line(step) for step in range(1, 6)], config="")
    assert found.steps is None and found.headline.endswith("is not known: step 5")


def test_how_to_go_on_with_a_run_that_failed(tmp_path: Path) -> None:
    found = said(tmp_path, [step_line(step) for step in range(1, 6)])
    assert found.ended and f"Go on with `trimtab train --resume {tmp_path}`" in found.words
