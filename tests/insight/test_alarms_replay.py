"""Alarms over metrics that are there already: of a finished run, of another trainer, of a broken file; the command."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers.insight.made_metrics import after, made_run
from helpers.train.short_runs import SETTINGS, short_run
from trimtab.cli import app
from trimtab.files import read_json_lines
from trimtab.insight.alarms import (
    ALARM_KINDS,
    AlarmKind,
    DetectorInput,
    alarm_monitor,
    read_metrics,
    replay_metrics,
    replay_run,
)
from trimtab.insight.alarms.detector_input import Finding
from trimtab.insight.alarms.monitor import alarm_lines
from trimtab.record import find_collapse
from trimtab.trainer.train.loop import train

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def written(folder: Path, records: list[dict[str, float]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# --- of our own runs


def test_a_replay_rings_what_rang_while_the_run_went_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short run is too short for real thresholds: an alarm of our own rings once it has held for three steps."""

    def third(run: DetectorInput) -> Finding | None:
        values = run.history.values("policy/entropy")
        return (
            Finding(f"entropy {values[-1]:.3f}", {"policy/entropy": {"now": values[-1]}}) if len(values) > 2 else None
        )

    monkeypatch.setattr("trimtab.insight.alarms.monitor.ALARM_KINDS", {"clip": AlarmKind(third, (), (), "Try nothing")})
    run, log = short_run(tmp_path / "run", {"warm_start.steps": "0", "record.enabled": "false"})
    run.monitor = alarm_monitor(run.config)
    train(run)
    written_alarms = read_json_lines(tmp_path / "run/alarms.jsonl")
    again = replay_run(tmp_path / "run")
    assert [(alarm.step, alarm.message, alarm.evidence) for alarm in again] == [
        (record["step"], record["message"], record["evidence"]) for record in written_alarms
    ]
    assert [alarm.step for alarm in again] == [5]
    assert log.has("alarm: step 5", "Try nothing")


def test_the_recipe_beside_the_metrics_gives_the_target(tmp_path: Path) -> None:
    written(tmp_path, made_run(policy__entropy=lambda step: min(0.3, 0.1 + 0.004 * step)))
    assert [alarm.alarm for alarm in replay_run(tmp_path)] == ["entropy_explosion"]
    (tmp_path / "config.toml").write_text('[objective]\nname = "stare"\ntarget = 0.3\n')
    assert replay_run(tmp_path) == []


def test_a_run_from_the_command_line_is_watched(tmp_path: Path) -> None:
    """An untrained model and a task with one right answer: no group has any spread."""
    changes = {**SETTINGS, "objective": '"dapo"', "warm_start.steps": "0", "run.steps": "18", "record.enabled": "false"}
    changes |= {"reward.overlong_buffer": "0", "alarms.no_signal": "stop", "run.eval_every": "0", "task.digits": "3"}
    settings = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    result = CliRunner().invoke(app, ["train", "addition", "--quiet", "--out", str(tmp_path / "run"), *settings])
    assert result.exit_code == 3
    assert "alarm: step 17: only 0 % of the groups have any spread" in result.output
    written_alarms = [(r["alarm"], r["action"], r["step"]) for r in read_json_lines(tmp_path / "run/alarms.jsonl")]
    assert written_alarms == [
        ("no_signal", "stop", 17),
        ("truncation", "warn", 17),
    ]  # an untrained model does not end its responses
    assert (tmp_path / "run/alarms/step-00000017").is_dir()


# --- of other trainers


def test_metrics_of_another_trainer_work_in_any_order_and_with_more_names(tmp_path: Path) -> None:
    records = made_run(policy__entropy=after(40, 0.02, 0.6))
    theirs = [
        {"step": r["step"], "policy/entropy": r.get("policy/entropy"), "actor/lr": 1e-6, "note": "text", "list": [1]}
        for r in reversed(records)
    ]
    path = tmp_path / "other.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in theirs))
    assert [alarm.alarm for alarm in replay_run(path)] == ["entropy_collapse"]


def test_lines_that_are_no_metrics_are_left_out_and_named(tmp_path: Path) -> None:
    records = made_run(60, groups__mixed_share=0.0)
    path = written(tmp_path, records)
    whole = replay_metrics(read_metrics(path))
    rubbish = ['{"step": 3', "[1, 2]", '"text"', '{"no": 1}', '{"step": "x"}', "[" * 100_000, '{"step": NaN}', ""]
    path.write_text(path.read_text() + "\n".join(rubbish) + "\n" + "1" * 2_000_000 + "\n")
    problems: list[str] = []
    assert replay_metrics(read_metrics(path, problems.append)) == whole != []
    assert [problem.partition(",")[2][:10] for problem in problems] == [" row 62: n", " row 63: m", " row 64: m", ""]
    assert problems[-1].endswith("5 more rows are left out for the same reasons")


def test_the_command_names_lines_without_a_step(tmp_path: Path) -> None:
    path = written(tmp_path, made_run(60))
    path.write_text(path.read_text() + '{"no": 1}\n{"step": 61, "reward/mean": 1' + "0" * 400 + "}\n")
    done = CliRunner().invoke(app, ["alarms", str(path)])
    assert done.exit_code == 0
    assert "metrics.jsonl, row 62: `step` is missing" in done.stderr


@pytest.mark.parametrize("text", ["", "{}\n", "not json\n", '{"loss": 1}\n'])
def test_a_file_without_metrics_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"metrics\.jsonl.*step"):
        replay_run(tmp_path)


# --- the command


def test_the_command_prints_what_rang_and_what_to_try(tmp_path: Path) -> None:
    written(tmp_path, made_run(groups__mixed_share=after(40, 0.0, 0.7)))
    result = CliRunner().invoke(app, ["alarms", str(tmp_path)])
    assert result.exit_code == 0
    assert result.output.startswith("step 45  no_signal: only 0 % of the groups")
    assert "rollout.dynamic_sampling" in result.output


def test_the_command_gives_json_for_programs(tmp_path: Path) -> None:
    path = written(tmp_path, made_run(groups__mixed_share=after(40, 0.0, 0.7)))
    result = CliRunner().invoke(app, ["alarms", str(path), "--json"])
    line, _ = result.output.splitlines()
    assert set(json.loads(line)) == {"step", "alarm", "message", "evidence", "suggestion"}


def test_the_command_says_so_when_nothing_rang(tmp_path: Path) -> None:
    written(tmp_path, made_run())
    assert CliRunner().invoke(app, ["alarms", str(tmp_path)]).stdout == "no alarm rang\n"


def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["alarms", str(tmp_path)])
    assert result.exit_code == 2
    assert "metrics.jsonl does not exist" in result.output


def test_no_alarm_is_no_json() -> None:
    assert alarm_lines([], as_json=True) == []


# --- the figures of the benchmark


@pytest.fixture(scope="module")
def figures() -> Iterator[ModuleType]:
    """Import the benchmark's module and its suite."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("alarm_figures", BENCHMARKS / "alarm_figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["alarm_figures"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before
    for name in ("alarm_figures", "alarm_suite"):
        sys.modules.pop(name, None)


def test_the_benchmark_has_no_definition_of_a_collapse_of_its_own(figures: ModuleType, tmp_path: Path) -> None:
    records = made_run(60, noise=0.0, eval__accuracy=after(30, 0.19, 0.4))
    written(tmp_path, records)
    outcome, collapse = figures.read_run(tmp_path, "lr_high", 2), find_collapse(records)
    assert collapse is not None and (outcome.collapse, outcome.how) == (collapse.step, collapse.kind) == (40, "lost")


def test_lead_time_counts_only_rings_before_the_collapse(figures: ModuleType) -> None:
    def outcome(collapse: int | None, *rung: tuple[int, str]) -> Any:
        return figures.RunOutcome("lr_high", 2, 100, collapse, "", [(step, name, "") for step, name in rung])

    assert outcome(50, (20, "ratio"), (40, "clip")).lead() == 30
    assert outcome(50, (20, "ratio"), (40, "clip")).lead("clip") == 10
    assert outcome(50, (50, "ratio")).lead() is None
    assert outcome(50).lead() is None
    assert outcome(None, (20, "ratio")).lead() is None


def test_false_alarms_are_counted_per_thousand_healthy_steps(figures: ModuleType) -> None:
    healthy = figures.RunOutcome("healthy_dapo", 2, 500, None, "", [(9, "clip", ""), (90, "clip", "")])
    faulty = figures.RunOutcome("lr_high", 2, 100, 50, "", [(20, "ratio", "")])
    result = figures.figures([healthy, faulty], [2])
    (row,) = [row for row in result["alarms"] if row["alarm"] == "clip"]
    assert row["false_per_1000_steps"] == 4.0
    (fault,) = result["faults"]
    assert (fault["detected"], fault["detected_before"], fault["leads"]) == (1, 1, [30])
    table = figures.markdown({**result, "machine": "a machine", "date": "today", "versions": {"torch": "2"}})
    assert "| `clip` | 0/0 | 0/1 | 0/1 | - | 4.00 |" in table


def test_every_alarm_is_meant_for_some_fault_of_the_suite(figures: ModuleType) -> None:
    suite = sys.modules["alarm_suite"]
    assert set(suite.MEANT) == set(ALARM_KINDS)
    assert all(name in suite.SCENARIOS for names in suite.MEANT.values() for name in names)
    assert not set(suite.TUNING) & set(suite.REPORTING)


def test_a_faulty_verifier_of_the_suite_grades_training_responses_and_no_evaluation(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = sys.modules["alarm_suite"]
    monkeypatch.setattr(suite.rollouts, "sample_and_grade", lambda *given: [["as it is"]])
    monkeypatch.setattr(suite, "_regraded", lambda response, reward: reward)
    with suite.graded_by(lambda response: 1.0)():
        assert suite.rollouts.sample_and_grade(None, [], 3, None, 0.0) == [[1.0]]
        assert suite.rollouts.sample_and_grade(None, [], -1, None) == [["as it is"]]


def test_every_run_of_the_suite_has_a_recipe(figures: ModuleType) -> None:
    for scenario in sys.modules["alarm_suite"].SCENARIOS.values():
        config = scenario.config(3)
        assert config.run.seed == 3 and config.run.threads == 1 and not config.record.enabled
