"""`trimtab train` in a process of its own: what signals and broken outputs do to a run."""

from __future__ import annotations

import os
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from helpers.own_process import Terminal, exit_code, start_command, wait_until
from helpers.train.short_runs import SETTINGS
from trimtab.trainer.config import list_checkpoints
from trimtab.trainer.train import RunFolder

STOPPED = 3
ENDLESS = {"run.steps": "100000", "run.checkpoint_every": "0", "run.eval_every": "0", "run.patience": "0"}


def start(folder: Path, output: str | None, changes: dict[str, str] | None = None) -> BaseProcess:
    """Start a run of six steps with a warm start, in `folder/run`."""
    settings = [f"--set={key}={value}" for key, value in {**SETTINGS, **(changes or {})}.items()]
    return start_command(["train", "addition", *settings, "--out", "run"], output, folder)


def steps(folder: Path) -> list[int]:
    return [record["step"] for record in RunFolder(folder / "run").records()]


def assert_finished(process: BaseProcess, folder: Path) -> None:
    assert exit_code(process) == 0
    assert steps(folder) == [0, 1, 2, 3, 4, 5, 6]
    assert (folder / "run" / "model").is_dir()


def test_a_run_whose_reader_goes_in_the_warm_start_goes_on_to_its_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    process = start(tmp_path, str(tmp_path / "pipe"))
    with (tmp_path / "pipe").open() as reader:
        assert reader.readline().startswith("warm start 1/4")
    assert_finished(process, tmp_path)


@pytest.mark.parametrize("output", ["/dev/full", None])
def test_a_run_with_a_full_or_closed_output_goes_on_to_its_end(tmp_path: Path, output: str | None) -> None:
    if output is not None and not Path(output).exists():
        pytest.skip("needs /dev/full")
    assert_finished(start(tmp_path, output), tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_after_its_step_with_a_checkpoint(tmp_path: Path, number: int) -> None:
    log = tmp_path / "log"
    process = start(tmp_path, str(log), ENDLESS)
    wait_until(lambda: len(steps(tmp_path)) > 2, process)
    assert process.pid is not None
    os.kill(process.pid, number)
    assert exit_code(process) == STOPPED
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == f"step-{steps(tmp_path)[-1]:08d}"
    assert f"{signal.Signals(number).name} received" in log.read_text()
    assert "trimtab train --resume run" in log.read_text()
    assert not (tmp_path / "run" / "report.html").exists(), "nobody waits for it"


def test_a_run_in_a_terminal_that_is_closed_leaves_a_checkpoint(tmp_path: Path) -> None:
    terminal = Terminal()
    process = start(tmp_path, terminal.path, ENDLESS)
    wait_until(lambda: len(steps(tmp_path)) > 2, process)
    terminal.close()
    assert exit_code(process) == STOPPED
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == f"step-{steps(tmp_path)[-1]:08d}"


def test_a_warm_start_that_a_signal_stopped_is_continued_by_the_same_command(tmp_path: Path) -> None:
    log, long = tmp_path / "log", {"warm_start.steps": "100000", "warm_start.eval_every": "1"}
    process = start(tmp_path, str(log), long)
    wait_until(lambda: list(tmp_path.glob(".warm_start/*/step-*")), process)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    assert exit_code(process) == 128 + signal.SIGTERM
    assert "the same command continues the warm start" in log.read_text()
    assert not (tmp_path / "run").exists(), "so that the same command can be used"
