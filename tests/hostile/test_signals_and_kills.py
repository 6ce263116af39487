"""Signals and kills during `train`: nothing is lost but the step under way, and no process is left.

After each the run is finished as docs/stopping.md says, and must equal one that was left alone: metrics line by line,
weights, optimizer, records and model byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from helpers.hostile.disturbed_runs import STEPS, check_end, checkpoints, finish, some, steps, train_words
from helpers.hostile.started_commands import Starter

STOPPED = 3  # ended early, with a checkpoint
AT_ONCE = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143}

# Where a run is when a signal comes: the failpoint's so-manieth passage.
IN_WARM_START = [
    "warm_start.step:1",
    "warm_start.step:3",
    "checkpoint.tensors:1",
    "checkpoint.manifest:2",
    "checkpoint.tensors:5",
]
IN_STEPS = [
    "update.planned:1",
    "update.planned:5",
    "update.done:6",
    "step.done:2",
    "step.done:5",
    "step.finished:3",
    "metrics.written:2",
    "metrics.written:4",
    "checkpoint.tensors:8",
    "checkpoint.state:4",
    "checkpoint.manifest:4",
    "checkpoint.published:4",
    "folder.rename:6",
    "file.written:3",
]
AT_THE_END = ["step.finished:6", "checkpoint.pruned:2", "model.written:1"]
CHOSEN = {  # these are in every run of the tests
    "SIGINT at update.planned:5",
    "SIGKILL at checkpoint.manifest:4",
}


def cases(names: Iterable[str], points: Iterable[str]) -> list[tuple[str, tuple[str, str]]]:
    return [(f"{name} at {at}", (name, at)) for at in points for name in names]


TWO_OF_THREE = [each for n, each in enumerate(cases(AT_ONCE, IN_STEPS)) if n % 4]


@pytest.mark.parametrize(("name", "at"), some(TWO_OF_THREE, CHOSEN))
def test_a_signal_finishes_the_step_and_leaves_a_checkpoint(
    name: str, at: str, starter: Starter, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    command = starter.start(train_words(), tmp_path, at=at, signals=[name])
    check_end(command, {STOPPED})
    assert command.reached
    run = tmp_path / "run"
    assert steps(run)[-1] == checkpoints(run)[-1] < STEPS, "a step was finished and not saved, or not finished"
    assert (run / "report.html").exists() == (name == "SIGINT")
    finish(starter, tmp_path, undisturbed)


@pytest.mark.parametrize(("name", "at"), some(cases(AT_ONCE, AT_THE_END), CHOSEN))
def test_a_signal_in_the_last_step_loses_nothing(
    name: str, at: str, starter: Starter, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    command = starter.start(train_words(), tmp_path, at=at, signals=[name])
    check_end(command, {0, STOPPED})
    assert checkpoints(tmp_path / "run")[-1] == steps(tmp_path / "run")[-1]
    finish(starter, tmp_path, undisturbed)


@pytest.mark.parametrize(("name", "at"), some(cases(AT_ONCE, IN_WARM_START), CHOSEN))
def test_a_signal_in_the_warm_start_ends_it(
    name: str, at: str, starter: Starter, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    command = starter.start(train_words(), tmp_path, at=at, signals=[name])
    check_end(command, {AT_ONCE[name], STOPPED})
    assert command.reached
    finish(starter, tmp_path, undisturbed)


DEADLY = ["SIGQUIT", "SIGABRT", "SIGSEGV", "SIGBUS", "SIGUSR1", "SIGALRM", "SIGXCPU", "SIGIO"]
KILLS = cases(["SIGKILL"], [*IN_WARM_START, "warm_start.done:1", *IN_STEPS, *AT_THE_END])
KILLS += [(f"{name} at {at}", (name, at)) for name, at in zip(DEADLY, IN_STEPS[1:], strict=False)]


@pytest.mark.parametrize(("name", "at"), some(KILLS, CHOSEN))
def test_a_run_killed_at_any_moment_resumes_at_once(
    name: str, at: str, starter: Starter, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    command = starter.start(train_words(), tmp_path, at=at, signals=[name])
    assert command.code() < 0 and command.reached
    finish(starter, tmp_path, undisturbed)
    assert not command.left()
