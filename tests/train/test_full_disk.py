"""On a full disk a run makes room, says how far back a resume would go, and stops rather than train for nothing."""

from __future__ import annotations

import errno
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from torch import Tensor

from helpers.train.short_runs import (
    SETTINGS,
    STOPPED,
    RunProcess,
    contents,
    differences,
    run_in_child,
    short_run,
    trained,
)
from trimtab.cli.launch import launch_run, resolve_request
from trimtab.trainer.train import STOPPED as LAUNCH_STOPPED
from trimtab.trainer.train import UNSAVED, Run, RunStoppedError, checkpoints, run_state, train
from trimtab.trainer.train.run_folder import RunFolder


def full(*args: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _with_a_full_disk(process: RunProcess) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # metrics fit, weights do not
    run_in_child(process)


def test_a_run_on_a_really_full_disk_stops_after_three_checkpoints(tmp_path: Path) -> None:
    process = RunProcess(tmp_path / "run")
    assert process.run(target=_with_a_full_disk) == STOPPED, process.messages
    assert [record["step"] for record in RunFolder(process.folder).records()] == list(range(5))
    assert process.messages.count("warning: the checkpoint of step") == 1 + 1  # that of the warm start too
    assert "A resume would start from the beginning, for nothing is saved" in process.messages
    assert "stopped: no checkpoint can be written" in process.messages
    assert not [path for path in process.folder.rglob("*") if "writing" in path.name]
    assert process.resumed().run() == 0, "with free space it can be resumed"


class SmallDisk:
    """A disk with room for so many checkpoints of a run; `others` may be written anyway."""

    def __init__(self, run: Path, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.room, self.write = run, room, checkpoints.save_file
        monkeypatch.setattr(checkpoints, "save_file", self.save_file)

    def save_file(self, tensors: dict[str, Tensor], path: Path) -> None:
        if self.run in path.parents and len(self.steps()) >= self.room:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        self.write(tensors, path)

    def steps(self) -> list[int]:
        paths = checkpoints.list_checkpoints(self.run / "checkpoints")
        return [int(path.name.removeprefix("step-")) for path in paths]


def launched(run: Path, settings: dict[str, str] | None = None, **more: str) -> tuple[int, str]:
    """Run `trimtab train`; return the exit code and what it printed."""
    changes = {**SETTINGS, "run.report": "false", "run.keep_checkpoints": "3", **(settings or {}), **more}
    request = resolve_request("addition", [f"{key}={value}" for key, value in changes.items()], run)
    printed: list[str] = []
    code = launch_run(request, quiet=True, print_line=printed.append, print_error=printed.append)
    return code, "\n".join(printed)


def test_a_full_disk_costs_the_oldest_checkpoints_and_never_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk(tmp_path / "run", 2, monkeypatch)
    code, printed = launched(tmp_path / "run")
    assert code == 0, printed
    assert disk.steps() == [4, 6], "without the full disk it keeps three"
    removed = [line for line in printed.splitlines() if line.startswith("the disk is full: removed")]
    assert len(removed) == 3 and ".warm_start" in removed[0] and "step-00000000; trying again" in removed[1]


def test_a_run_that_cannot_save_stops_and_says_how_far_back_a_resume_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk(tmp_path / "run", 1, monkeypatch)
    code, printed = launched(tmp_path / "run", {"run.steps": "40", "run.checkpoint_every": "1"})
    assert (code, disk.steps()) == (UNSAVED, [0]), printed
    assert printed.count("warning: the checkpoint of step") == 1 and "A resume would start from step 0" in printed
    assert "stopped after step 3: no checkpoint can be written" in printed
    assert "then go on from step 0: trimtab train --resume" in printed
    assert "continue from step 0, the last that is saved:" in printed


def test_a_run_that_may_go_on_without_checkpoints_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk(tmp_path / "run", 1, monkeypatch)
    changes = {"run.checkpoint_every": "1", "run.on_failed_checkpoint": '"continue"'}
    code, printed = launched(tmp_path / "run", changes)
    assert (code, disk.steps()) == (UNSAVED, [0]), printed
    assert "the trained model is in" in printed and (tmp_path / "run" / "model" / "config.json").exists()
    assert "train for longer, from step 0, the last that is saved:" in printed


def test_a_checkpoint_that_is_written_again_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SmallDisk(tmp_path / "run", 1, monkeypatch)
    finish = Run.finish_step

    def free_at_step_3(run: Run, result: Any) -> None:
        disk.room = 9 if run.progress.step >= 3 else 1
        finish(run, result)

    monkeypatch.setattr(Run, "finish_step", free_at_step_3)
    code, printed = launched(tmp_path / "run")
    assert code == 0 and disk.steps() == [0, 4, 6]
    assert "the checkpoint of step 4 is written: a resume would go on from it" in printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_on_a_full_disk_does_not_say_that_the_run_goes_on_where_it_stopped(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SmallDisk(tmp_path / "run", 1, monkeypatch)
    finish = Run.finish_step
    monkeypatch.setattr(Run, "finish_step", lambda run, result: (finish(run, result), signal.raise_signal(number)))
    code, printed = launched(tmp_path / "run")
    assert code == UNSAVED and "continue where it stopped" not in printed
    assert "stopped after step 1: a signal asked for it. The last checkpoint is missing" in printed
    assert "continue from step 0, the last that is saved:" in printed


def test_a_run_that_stops_by_itself_on_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SmallDisk(tmp_path / "run", 1, monkeypatch)
    monkeypatch.setattr("trimtab.trainer.train.run.has_learning_signal", lambda metrics: False)
    code, printed = launched(tmp_path / "run", {"run.patience": "1"})
    assert code == UNSAVED and "go on from step 0" in printed and "continue where it stopped" not in printed


def test_a_model_that_finds_no_room_takes_that_of_an_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, disk = run_state.publish_model, SmallDisk(tmp_path / "run", 3, monkeypatch)

    def in_small_room(*args: Any, **options: Any) -> None:
        if len(disk.steps()) > 1:
            full()
        publish(*args, **options)

    monkeypatch.setattr(run_state, "publish_model", in_small_room)
    code, printed = launched(tmp_path / "run")
    assert (code, disk.steps()) == (0, [6]), printed


def test_a_model_that_could_not_be_written_is_not_taken_for_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unwritable(policy: object, folder: Path, *_: object) -> None:
        folder.mkdir()
        full()

    monkeypatch.setattr(run_state, "publish_model", unwritable)
    code, printed = launched(tmp_path / "run")
    assert code == LAUNCH_STOPPED and "could not be written" in printed and "  model  " not in printed


def test_a_full_disk_in_the_middle_of_a_run_leaves_the_checkpoint_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "run", {"run.steps": "2"})
    monkeypatch.setattr(checkpoints, "save_file", full)
    run, log = short_run(tmp_path / "run", resume=True)
    with pytest.raises(RunStoppedError, match=r"step 6 could not be written.* go on from step 2: "):
        train(run)
    assert log.has("warning", "step 4 could not be written", "A resume would start from step 2")
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000002"]


def test_metrics_that_could_not_be_written_are_written_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trimtab.trainer.train import run_folder as module

    trained(tmp_path / "whole")
    whole, calls = module.append_json_lines, []

    def sometimes_full(path: Path, record: dict[str, Any]) -> None:
        calls.append(record)
        if len(calls) in (3, 4):
            full()
        whole(path, record)

    monkeypatch.setattr(module, "append_json_lines", sometimes_full)
    _, log = trained(tmp_path / "run")
    assert log.has("metrics of 1 step(s) are not written yet", "No space")
    assert not differences(contents(tmp_path / "run"), contents(tmp_path / "whole"))
