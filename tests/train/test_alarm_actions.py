"""What a run does when an alarm is raised: print it, save a checkpoint, stop; and the same after a resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from helpers.record.made_records import VOCABULARY, budget, made_step, manifest
from helpers.train.short_runs import recipe, short_run
from trimtab.files import read_json_lines
from trimtab.record import RecordWriter
from trimtab.record.layout import RECORDS_FOLDER, recorded_steps
from trimtab.trainer.config import load
from trimtab.trainer.train import Run, RunStoppedError, StopReason, checkpoints
from trimtab.trainer.train.alarm_actions import Alarm, AlarmHandler, steps_around
from trimtab.trainer.train.loop import train, train_step
from trimtab.trainer.train.run_folder import RunFolder

Monitor = Callable[[Mapping[str, float]], list[Alarm]]


class AlarmAt:
    """A monitor that raises one alarm at given steps, and keeps the steps that it was given."""

    def __init__(self, *steps: int, name: str = "ratio") -> None:
        self.steps, self.name, self.seen = steps, name, list[int]()

    def __call__(self, record: Mapping[str, float]) -> list[Alarm]:
        step = int(record["step"])
        self.seen.append(step)
        if step not in self.steps:
            return []
        return [Alarm(step, self.name, "entropy is low", {"entropy": {"now": 0.1}}, "Lower the rate")]


def run_monitored(
    folder: Path, monitor: Monitor, changes: Mapping[str, str] | None = None, resume: bool = False
) -> tuple[Run, list[str]]:
    run, log = short_run(folder, {"warm_start.steps": "0", "record.enabled": "false", **(changes or {})}, resume)
    run.monitor = monitor
    train(run)
    return run, log.messages


# --- actions


def test_an_alarm_is_printed_with_its_suggestion_and_written_to_a_file(tmp_path: Path) -> None:
    _, messages = run_monitored(tmp_path / "run", AlarmAt(3))
    assert "alarm: step 3: entropy is low. Lower the rate" in messages
    (line,) = (tmp_path / "run/alarms.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "step": 3,
        "alarm": "ratio",
        "message": "entropy is low",
        "evidence": {"entropy": {"now": 0.1}},
        "suggestion": "Lower the rate",
        "action": "warn",
    }


def test_a_run_without_alarms_writes_no_file_for_them(tmp_path: Path) -> None:
    run_monitored(tmp_path / "run", AlarmAt())
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith("alarms")]


def test_a_monitor_gets_every_step_once_and_in_order(tmp_path: Path) -> None:
    monitor = AlarmAt()
    run_monitored(tmp_path / "run", monitor)
    assert monitor.seen == [0, 1, 2, 3, 4, 5, 6]


def test_save_keeps_a_checkpoint_that_the_run_does_not_delete(tmp_path: Path) -> None:
    changes = {"alarms.ratio": "save", "run.keep_checkpoints": "1"}
    run, _ = run_monitored(tmp_path / "run", AlarmAt(1, 3), changes)
    assert run.progress.step == 6
    kept = checkpoints.list_checkpoints(tmp_path / "run/alarms")
    assert [path.name for path in kept] == ["step-00000001", "step-00000003"]
    assert checkpoints.read(kept[1]).state["progress"]["step"] == 3
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path / "run/checkpoints")] == ["step-00000006"]


def test_stop_ends_the_run_with_the_alarm_as_its_reason(tmp_path: Path) -> None:
    with pytest.raises(RunStoppedError, match=r"entropy is low.*--resume") as stopped:
        run_monitored(tmp_path / "run", AlarmAt(3), {"alarms.default": "stop"})
    assert stopped.value.reason is StopReason.ALARM
    assert RunFolder(tmp_path / "run").records()[-1]["step"] == 3
    assert checkpoints.list_checkpoints(tmp_path / "run/checkpoints")[-1].name == "step-00000003"
    assert checkpoints.list_checkpoints(tmp_path / "run/alarms")[-1].name == "step-00000003"


def test_a_run_that_an_alarm_stopped_can_be_resumed_without_the_same_alarm(tmp_path: Path) -> None:
    with pytest.raises(RunStoppedError):
        run_monitored(tmp_path / "run", AlarmAt(3), {"alarms.default": "stop"})
    run, messages = run_monitored(tmp_path / "run", AlarmAt(3), {"alarms.default": "stop"}, resume=True)
    assert run.progress.step == 6
    assert not [text for text in messages if "entropy is low" in text]
    assert [record["step"] for record in read_json_lines(tmp_path / "run/alarms.jsonl")] == [3]


def test_an_alarm_in_the_last_step_does_not_stop_the_run(tmp_path: Path) -> None:
    run, messages = run_monitored(tmp_path / "run", AlarmAt(6), {"alarms.default": "stop"})
    assert run.stopped is StopReason.FINISHED
    assert (tmp_path / "run/model").is_dir()
    assert "alarm: step 6: entropy is low. Lower the rate" in messages


def test_off_turns_one_alarm_off_and_enabled_all(tmp_path: Path) -> None:
    for number, changes in enumerate(({"alarms.ratio": "off"}, {"alarms.enabled": "false"})):
        _, messages = run_monitored(tmp_path / f"run{number}", AlarmAt(3), changes)
        assert not [text for text in messages if "entropy is low" in text]
        assert not (tmp_path / f"run{number}/alarms.jsonl").exists()


def test_the_key_of_an_alarm_overrides_the_default() -> None:
    alarms = recipe({"alarms.default": "stop", "alarms.clip": "warn"}).alarms
    assert (alarms.action("clip"), alarms.action("ratio")) == ("warn", "stop")


def test_an_unknown_alarm_in_a_recipe_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"entropy_colapse.*entropy_collapse"):
        load("addition", ["alarms.entropy_colapse=stop"])


def test_an_unknown_action_is_an_error_that_names_the_key() -> None:
    with pytest.raises(ValueError, match=r"alarms\.ratio"):
        load("addition", ["alarms.ratio=shout"])


# --- a monitor that raises


def test_a_monitor_that_raises_is_dropped_with_one_warning_and_the_run_goes_on(tmp_path: Path) -> None:
    seen = []

    def breaks(record: Mapping[str, float]) -> list[Alarm]:
        seen.append(record["step"])
        if record["step"] == 2:
            raise ZeroDivisionError("a bug")
        return []

    run, messages = run_monitored(tmp_path / "run", breaks, {"alarms.default": "stop"})
    assert run.progress.step == 6
    assert seen == [0, 1, 2]
    assert len([text for text in messages if "the alarms failed" in text and "a bug" in text]) == 1


def test_an_alarm_that_cannot_be_written_is_still_printed(tmp_path: Path) -> None:
    (tmp_path / "run/alarms.jsonl").mkdir(parents=True)
    messages: list[str] = []
    handler = AlarmHandler(AlarmAt(1), recipe().alarms, RunFolder(tmp_path / "run"), messages.append)
    handler.handle({"step": 1})
    assert "entropy is low" in messages[0]
    assert "could not be written" in messages[1]


# --- resume


def test_a_resumed_run_passes_the_earlier_steps_to_its_monitor(tmp_path: Path) -> None:
    run_monitored(tmp_path / "run", AlarmAt(), {"run.steps": "4"})
    monitor = AlarmAt(5)
    _, messages = run_monitored(tmp_path / "run", monitor, resume=True)
    assert monitor.seen == [0, 1, 2, 3, 4, 5, 6]
    assert [text for text in messages if text.startswith("alarm: step 5")]


def test_alarms_after_the_checkpoint_are_removed_and_raised_again(tmp_path: Path) -> None:
    """The run ends after step 5; its last checkpoint is of step 4."""
    run, _ = short_run(tmp_path / "run", {"warm_start.steps": "0", "record.enabled": "false"})
    run.monitor = AlarmAt(2, 5)
    trainer = run.prepare()
    for step in run.steps():
        trainer.set_learning_rate(step)
        run.finish_step(train_step(trainer, run.progress))
        if run.progress.step == 5:
            break
    folder = RunFolder(tmp_path / "run")
    before = folder.alarms.read_text()
    assert [record["step"] for record in read_json_lines(folder.alarms)] == [2, 5]
    folder.rewind(4, pytest.fail)
    assert [record["step"] for record in read_json_lines(folder.alarms)] == [2]
    run_monitored(tmp_path / "run", AlarmAt(2, 5), resume=True)
    assert folder.alarms.read_text() == before


def test_the_actions_of_alarms_may_change_on_resume(tmp_path: Path) -> None:
    run_monitored(tmp_path / "run", AlarmAt(), {"run.steps": "3"})
    run, _ = run_monitored(tmp_path / "run", AlarmAt(5), {"alarms.default": "save"}, resume=True)
    assert run.progress.step == 6
    assert checkpoints.list_checkpoints(tmp_path / "run/alarms")


# --- records around an alarm


def test_the_steps_around_saved_alarms_are_known_from_the_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step, action in ((2, "save"), (20, "warn"), (30, "stop")):
        folder.append(folder.alarms, {"step": step, "alarm": "ratio", "action": action})
    handler = AlarmHandler(None, recipe().alarms, folder, print)
    assert handler.steps_to_keep() == [*steps_around(2), *steps_around(30)]
    assert list(steps_around(2)) == [1, 2, 3, 4, 5]


def record_with_keeping(run: Path, keep: list[int], megabytes: float, steps: int = 40) -> list[int]:
    """The steps that are on the disk when a recorder under a size budget was told to keep some of them."""
    messages: list[str] = []
    recorder = RecordWriter(run / RECORDS_FOLDER, manifest(settings=budget(megabytes)), VOCABULARY, messages.append)
    recorder.keep(keep)
    recorder.start(0)
    for step in range(1, steps + 1):
        recorder.write(step, lambda step=step: made_step(step, [60] * 16))  # type: ignore[misc]
    recorder.close()
    assert messages == []
    return recorded_steps(run / RECORDS_FOLDER)


def test_the_size_limit_deletes_other_steps_first(tmp_path: Path) -> None:
    kept = record_with_keeping(tmp_path, [10, 11, 12], 0.25)
    assert {1, 10, 11, 12} <= set(kept)
    assert len(kept) < 12


def test_kept_steps_are_deleted_too_if_they_exceed_the_limit(tmp_path: Path) -> None:
    kept = record_with_keeping(tmp_path, list(range(2, 41)), 0.25)
    assert 1 in kept
    assert len(kept) < 20


def test_a_run_records_the_steps_around_an_alarm_even_between_recorded_steps(tmp_path: Path) -> None:
    changes = {"record.enabled": "true", "record.every": "4", "alarms.default": "save"}
    run_monitored(tmp_path / "run", AlarmAt(2), changes)
    assert recorded_steps(tmp_path / "run" / RECORDS_FOLDER) == [1, 3, 4, 5]


def test_a_resumed_run_still_keeps_the_steps_around_its_alarms(tmp_path: Path) -> None:
    changes = {"record.enabled": "true", "record.every": "4", "alarms.default": "save"}
    run_monitored(tmp_path / "run", AlarmAt(2), {**changes, "run.steps": "4"})
    run_monitored(tmp_path / "run", AlarmAt(2), changes, resume=True)
    assert recorded_steps(tmp_path / "run" / RECORDS_FOLDER) == [1, 3, 4, 5]
