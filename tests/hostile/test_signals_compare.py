"""Signals and kills during `compare` with two runs at a time: its runs end with it, and the same command goes on.

At the end every run must equal that of a comparison that was left alone.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.hostile.disturbed_runs import (
    SETTINGS,
    check_end,
    checkpoints,
    contents,
    differences,
    some,
    steps,
)
from helpers.hostile.started_commands import Command, Starter, command_line, pipe, terminal
from helpers.made_once import made_once

UNFINISHED = 3
AT_ONCE = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143}
# Long enough that both runs are under way at some moment.
CHANGES = {"run.steps": "40", "run.checkpoint_every": "10", "run.eval_every": "0", "warm_start.steps": "0"}


def words(jobs: int = 2) -> list[str]:
    changed = {**SETTINGS, **CHANGES, "run.report": "false"}
    del changed["objective"]
    given = [word for key, value in changed.items() for word in ("--set", f"{key}={value}")]
    return ["compare", "grpo", "stapo", "--seeds", "1", "--jobs", str(jobs), "--out", "all", *given]


def runs(folder: Path) -> list[Path]:
    """Return the folders of a comparison's runs that have begun."""
    return sorted(path.parent for path in (folder / "all").rglob("metrics.jsonl"))


def both_run(folder: Path) -> bool:
    return len(runs(folder)) == 2 and all(1 in steps(run) for run in runs(folder))


def results(folder: Path) -> dict[str, str]:
    return {f"{run.name}/{name}": value for run in runs(folder) for name, value in contents(run).items()}


@pytest.fixture(scope="session")
def compared(starter: Starter, shared: Path) -> dict[str, str]:
    """A comparison that was left alone."""

    def make(folder: Path) -> None:
        check_end(starter.start(words(), folder), {0})

    return results(made_once(shared, "comparison-left-alone", make))


def finish(starter: Starter, folder: Path, compared: dict[str, str]) -> None:
    """Give the same command again, and check that the runs equal those of a comparison that was left alone."""
    check_end(starter.start(words(), folder), {0})
    assert compared and not differences(compared, results(folder))


def check_stopped(folder: Path) -> None:
    """Check that no finished step was lost."""
    for run in runs(folder):
        assert steps(run)[-1] == checkpoints(run)[-1], run


def run_processes(command: Command) -> list[int]:
    """Return the processes of a comparison's runs."""
    return [pid for pid in command.children() if "train" in command_line(pid) or "trimtab" in command_line(pid)]


ONE_STOP = ["SIGINT", "SIGTERM", "SIGHUP", "SIGTERM SIGTERM", "SIGHUP SIGTERM", "group SIGINT", "group SIGTERM"]
ONE_STOP += ["group SIGHUP SIGHUP", "SIGPIPE SIGTERM", "SIGSTOP SIGTERM SIGCONT"]


@pytest.mark.parametrize("how", some([(how, (how,)) for how in ONE_STOP], set()))
def test_a_signal_stops_every_run_with_a_checkpoint(
    how: str, starter: Starter, tmp_path: Path, compared: dict[str, str]
) -> None:
    command = starter.start(words(), tmp_path)
    command.wait_until(lambda: both_run(tmp_path))
    command.signal(*how.replace("group ", "").split(), group="group" in how)
    check_end(command, {UNFINISHED, 0})
    check_stopped(tmp_path)
    finish(starter, tmp_path, compared)


@pytest.mark.parametrize(
    "how", some([(how, (how,)) for how in ("SIGINT SIGINT", "group SIGINT SIGINT", "SIGTERM SIGINT")], set())
)
def test_a_second_signal_ends_everything_at_once(
    how: str, starter: Starter, tmp_path: Path, compared: dict[str, str]
) -> None:
    command = starter.start(words(), tmp_path)
    command.wait_until(lambda: both_run(tmp_path))
    command.signal(*how.replace("group ", "").split(), group="group" in how)
    check_end(command, {130, UNFINISHED, 0})  # two signals at the same moment may come as one
    finish(starter, tmp_path, compared)


@pytest.mark.parametrize("how", some([(how, (how,)) for how in ("SIGKILL", "SIGQUIT", "SIGSTOP SIGKILL")], set()))
def test_the_runs_of_a_killed_comparison_end_with_a_checkpoint(
    how: str, starter: Starter, tmp_path: Path, compared: dict[str, str]
) -> None:
    command = starter.start(words(), tmp_path)
    command.wait_until(lambda: both_run(tmp_path))
    command.signal(*how.split())
    check_end(command, {-9, -3, 0})
    check_stopped(tmp_path)
    finish(starter, tmp_path, compared)


@pytest.mark.parametrize("how", some([(how, (how,)) for how in ("SIGKILL", "SIGTERM", "SIGINT", "SIGSEGV")], set()))
@pytest.mark.parametrize("how_many", [1, 2])
def test_a_run_that_is_killed_is_said_to_be_unfinished(
    how: str, how_many: int, starter: Starter, tmp_path: Path, compared: dict[str, str]
) -> None:
    command = starter.start(words(), tmp_path)
    command.wait_until(lambda: both_run(tmp_path))
    for pid in run_processes(command)[:how_many]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[how])
    check_end(command, {UNFINISHED, 0})
    finish(starter, tmp_path, compared)


@pytest.mark.parametrize(
    "at",
    some(
        [(at, (at,)) for at in ("checkpoint.tensors:2", "checkpoint.published:2", "update.done:9", "model.written:1")],
        set(),
    ),
)
def test_runs_that_are_killed_at_a_point_go_on(
    at: str, starter: Starter, tmp_path: Path, compared: dict[str, str]
) -> None:
    command = starter.start(words(), tmp_path, environment={"TRIMTAB_FAILPOINT": at})
    check_end(command, {UNFINISHED})
    finish(starter, tmp_path, compared)


@pytest.mark.parametrize("name", some([(name, (name,)) for name in [*AT_ONCE, "SIGKILL"]], set()))
def test_a_signal_before_the_runs_have_begun(
    name: str, starter: Starter, tmp_path: Path, compared: dict[str, str]
) -> None:
    command = starter.start(words(), tmp_path)
    command.wait_until(command.children)
    command.signal(name)
    check_end(command, {UNFINISHED, AT_ONCE.get(name, -9), 0})
    finish(starter, tmp_path, compared)


@pytest.mark.parametrize("name", some([(name, (name,)) for name in ("SIGTERM", "SIGKILL")], set()))
def test_a_finished_run_is_kept_when_the_next_one_is_stopped(
    name: str, starter: Starter, tmp_path: Path, compared: dict[str, str]
) -> None:
    command = starter.start(words(jobs=1), tmp_path)
    command.wait_until(lambda: both_run(tmp_path))
    kept = {run: run.joinpath("metrics.jsonl").read_text() for run in runs(tmp_path) if steps(run)[-1] == 40}
    assert len(kept) == 1
    command.signal(name)
    check_end(command, {UNFINISHED, -9, 0})
    finish(starter, tmp_path, compared)
    assert {run: run.joinpath("metrics.jsonl").read_text() for run in kept} == kept


@pytest.mark.parametrize(
    "output", some([(each, (each,)) for each in ("closed", "full", "reader gone", "terminal")], set())
)
def test_a_comparison_without_its_output(
    output: str, starter: Starter, tmp_path: Path, compared: dict[str, str]
) -> None:
    if output == "reader gone":
        path = pipe(tmp_path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        command = starter.start(words(), tmp_path, stdout=path, stderr=path)
        command.wait_until(command.children)
        os.close(reader)
        check_end(command, {0})
    elif output == "terminal":
        with terminal() as screen:
            command = starter.start(words(), tmp_path, stdin=screen.path, stdout=screen.path, stderr=screen.path)
            command.wait_until(lambda: both_run(tmp_path))
            screen.close()
            check_end(command, {UNFINISHED, 0})
            assert b"Traceback" not in screen.shown
        check_stopped(tmp_path)
    else:
        check_end(starter.start(words(), tmp_path, stdout="closed" if output == "closed" else "/dev/full"), {0})
    finish(starter, tmp_path, compared)
