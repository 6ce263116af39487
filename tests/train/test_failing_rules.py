"""A rule that fails is heard: shown once with its traceback, counted, kept in a file, watched, and it ends a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import trimtab as tt
from helpers.train.short_runs import contents, differences, recipe, short_run, trained
from trimtab import own_parts
from trimtab.cli.display import LiveReporter
from trimtab.cli.launch import TrainRequest, launch_run
from trimtab.files import read_json_lines
from trimtab.grading import Verdict, grade
from trimtab.grading.verdicts import VerdictKind
from trimtab.insight.alarms import AlarmMonitor
from trimtab.trainer.config import Config
from trimtab.trainer.parallel import World
from trimtab.trainer.train import RunStoppedError, StopReason, rollouts
from trimtab.trainer.train.loop import train
from trimtab.trainer.train.run import MAX_CRASHED_STEPS

TERM = {"reward.terms.own.rule": "python:own"}
Rule = Callable[[int, int], float]


@pytest.fixture
def own_rule() -> Iterator[Callable[[Rule], None]]:
    """Register a batched rule; the function gets the number of the step, from 1, and of the response."""

    def register(rule: Rule) -> None:
        calls: list[int] = []

        def own(responses: Sequence[str], answers: Sequence[str], extras: Sequence[Any]) -> list[Any]:
            calls.append(1)
            return [_value(rule, len(calls), row) for row in range(len(responses))]

        tt.register(tt.rule(batched=True, in_process=True)(own), "own")

    yield register
    own_parts._registered.clear()


def _value(rule: Rule, step: int, row: int) -> Any:
    try:
        return rule(step, row)
    except LookupError:
        return "nothing that is a reward"  # fails for this response alone


def missing(step: int, row: int) -> float:
    raise LookupError


def test_an_exception_is_shown_once_in_full_kept_in_a_file_and_ends_the_run(
    tmp_path: Path, own_rule: Callable[[Rule], None]
) -> None:
    def broken(step: int, row: int) -> float:
        return 1.0 / (row - row)

    own_rule(broken)
    run, log = short_run(tmp_path / "run", TERM)
    with pytest.raises(RunStoppedError, match="the rules failed on 100% of the responses in this step") as stopped:
        train(run)
    assert stopped.value.reason is StopReason.RULES and str(run.folder.rule_errors) in str(stopped.value)
    shown = [text for text in log.messages if "python:own" in text]
    assert len(shown) == 1
    assert shown[0].startswith("warning: step 1: the rule python:own failed on 16 responses; the first: ")
    for line in ("Traceback (most recent call last):", "in broken", "ZeroDivisionError", "rule_errors.jsonl"):
        assert line in shown[0]
    (record,) = read_json_lines(run.folder.rule_errors)
    assert (record["step"], record["rule"], record["count"], record["kind"]) == (1, "python:own", 16, "crashed")
    assert "ZeroDivisionError" in record["error"] and record["response"] is not None


def test_a_run_whose_rule_fails_ends_with_an_exit_code_and_a_diagnosis(
    tmp_path: Path, own_rule: Callable[[Rule], None]
) -> None:
    own_rule(missing)
    config, printed, errors = recipe(TERM), list[str](), list[str]()
    code = launch_run(
        TrainRequest(config, "demo", tmp_path / "run"),
        quiet=True, print_line=printed.append, print_error=errors.append,
    )  # fmt: skip
    assert code == 3
    assert errors[0].startswith("trimtab: stopped after step 1: the rules failed on 100% of the responses")
    assert any("alarm: step 1: rules failed on 100 % of the responses" in line for line in printed)
    assert any("'nothing that is a reward' is no verdict" in line for line in printed)


def test_a_rule_that_fails_now_and_then_is_counted_and_the_run_goes_on(
    tmp_path: Path, own_rule: Callable[[Rule], None]
) -> None:
    own_rule(lambda step, row: missing(step, row) if row == 3 else float(row % 2))
    run, log = trained(tmp_path / "run", TERM)
    shares = [record["reward/crashed_share"] for record in run.folder.records() if record["step"]]
    assert shares == [1 / 16] * 6
    assert [record["step"] for record in read_json_lines(run.folder.rule_errors)] == [1, 2, 3, 4, 5, 6]
    assert sum("python:own failed" in text for text in log.messages) == 1


@pytest.mark.parametrize(("bad", "stops_at"), [({2}, None), ({2, 3, 4}, 4), ({6}, 6), ({2, 3, 5}, None)])
def test_a_failure_of_some_steps_ends_a_run_only_if_it_lasts_or_is_the_last(
    tmp_path: Path, own_rule: Callable[[Rule], None], bad: set[int], stops_at: int | None
) -> None:
    assert MAX_CRASHED_STEPS == 3
    own_rule(lambda step, row: missing(step, row) if step in bad else float(row % 2))
    run, _ = short_run(tmp_path / "run", TERM)
    if stops_at is None:
        train(run)
        assert run.progress.step == 6
        return
    with pytest.raises(RunStoppedError, match="the rules failed on"):
        train(run)
    assert run.progress.step == stops_at
    assert (run.folder.checkpoints / f"step-{stops_at:08d}").is_dir(), "it can be resumed with the rule mended"


def test_a_resumed_run_does_not_keep_errors_twice(tmp_path: Path, own_rule: Callable[[Rule], None]) -> None:
    changes = {**TERM, "run.steps": "4"}
    own_rule(lambda step, row: missing(step, row) if row == 3 else float(row % 2))
    run, _ = trained(tmp_path / "run", changes)
    whole = contents(run.folder.path)
    shutil.rmtree(run.folder.checkpoints / "step-00000004")
    trained(tmp_path / "run", changes, resume=True)
    assert not differences(contents(run.folder.path), whole)


def test_a_failure_of_the_tasks_own_rule_shows_in_the_evaluation_before_the_first_step(tmp_path: Path) -> None:
    rows = [{"prompt": f"1+{n}=", "reward_model": {"ground_truth": "two"}} for n in range(4)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = f'"{tmp_path / "sums.jsonl"}"'
    changes: dict[str, str | None] = {"task.name": "file", "task.path": path, "task.eval_path": path}
    changes |= {"task.rule": "number", "task.size": None, "task.digits": None, "warm_start.steps": "0"}
    run, log = short_run(tmp_path / "run", changes)
    with pytest.raises(RunStoppedError, match="the rules failed on 100% of the held-out problems"):
        train(run)
    assert run.progress.step == 0 and (run.folder.checkpoints / "step-00000000").is_dir()
    assert log.has("warning: step 0: the rule number failed on 4 responses", "sums.jsonl", "'two' is no number")
    (record,) = run.folder.records()
    assert record.pop("time/evaluation") > 0
    assert record == {"step": 0, "eval/crashed_share": 1.0, "eval/seen_share": 1.0}


def test_held_out_problems_without_a_verdict_are_neither_right_nor_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds: list[VerdictKind] = ["correct", "crashed", "wrong", "crashed"]
    groups = [[SimpleNamespace(verdict=Verdict(kind))] for kind in kinds]
    monkeypatch.setattr(rollouts, "sample_and_grade", lambda *_: groups)
    trainer: Any = SimpleNamespace(
        test_task=[SimpleNamespace(source="sums")] * 4,
        config=Config(),
        tool_use=None,
        agent_use=None,
        seconds={},
        seen_share=0.0,
        world=World(),
    )
    found = rollouts.evaluate(trainer)
    assert (found["eval/accuracy"], found["eval/crashed_share"]) == (0.5, 0.5)


def test_the_alarm_rings_at_once_and_names_the_share() -> None:
    monitor = AlarmMonitor()
    assert monitor({"step": 1, "reward/crashed_share": 0.01}) == []
    (alarm,) = monitor({"step": 2, "reward/crashed_share": 0.02})
    assert (alarm.alarm, alarm.message) == (
        "rule_errors",
        "rules failed on 2 % of the responses, which are not graded",
    )
    assert "rule_errors.jsonl" in alarm.suggestion


@pytest.mark.parametrize("in_process", [True, False])
def test_what_a_rule_prints_is_in_a_file_that_is_named_once(
    tmp_path: Path, in_process: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    name = "talkative_here" if in_process else "talkative"
    run, log = short_run(tmp_path / "run", {"reward.terms.own.rule": f"python:helpers.grading.python_rules:{name}"})
    train(run)
    printed = run.folder.rule_output.read_text().splitlines()
    assert len(printed) >= 16 and {line.split()[0] for line in printed} == {"seen"}
    assert [text for text in log.messages if str(run.folder.rule_output) in text] == [
        f"note: a rule, tool or agent of yours prints; it goes to {run.folder.rule_output}"
    ]
    assert "seen" not in "".join(capfd.readouterr())


def test_without_a_run_a_rules_prints_go_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("talkative", "talkative_here"):
        grade("four", "x", f"python:helpers.grading.python_rules:{name}")
        out, errors = capfd.readouterr()
        assert (out, errors) == ("", "seen 4\n")


def test_the_live_display_leaves_a_traceback_above_itself_in_full() -> None:
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=100, height=20)
    reporter = LiveReporter("run", console=console, every=60.0)
    lines = ["warning: the rule failed", *(f"frame {n}" for n in range(30)), "ZeroDivisionError: division by zero"]
    reporter.message("\n".join(lines))
    reporter.close()
    printed = screen.getvalue()
    assert all(line in printed for line in lines)
    assert list(reporter.display.messages) == [lines[0]]


def test_the_live_display_shows_each_reward_and_the_failed_share() -> None:
    screen = StringIO()
    reporter = LiveReporter("run", console=Console(file=screen, force_terminal=True, width=100, height=30), every=60.0)
    metrics = {"reward/mean": 0.5, "rewards/task": 0.4, "rewards/format": 0.2, "rewards/format_spread": 0.1}
    reporter.step(1, 2, {**metrics, "reward/crashed_share": 0.25})
    reporter.close()
    assert "task 0.400, format 0.200" in screen.getvalue() and "spread" not in screen.getvalue()
    assert "25.0%" in screen.getvalue()
