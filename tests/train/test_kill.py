"""A run that is killed anywhere and resumed ends bit for bit like the run that was not.

`TRIMTAB_THOROUGH=1` kills at every passage of every failpoint, and many times by the clock; without it, at the first
and the last passage.
"""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from helpers.thorough import THOROUGH, slow_but
from helpers.train.short_runs import RunProcess, contents, differences
from trimtab.trainer.train import checkpoints
from trimtab.trainer.train.run_folder import RunFolder

# All failpoints of a run, in the order in which it first passes them.
FAILPOINTS = (
    "file.written",
    "run.rewound",
    "warm_start.step",
    "checkpoint.tensors",
    "checkpoint.state",
    "checkpoint.manifest",
    "folder.rename",
    "checkpoint.published",
    "checkpoint.pruned",
    "warm_start.done",
    "line.torn",
    "metrics.written",
    "update.planned",
    "update.done",
    "step.done",
    "step.finished",
    "nonfinite.written",
    "model.written",
)
SOME = ("line.torn", "checkpoint.manifest", "update.done")
BY_THE_CLOCK = 90 if THOROUGH else 2
TWICE = 20 if THOROUGH else 2
NAN_UPDATE = (3, 2)  # the step and update that is not finite, so that nonfinite.jsonl is compared too


@dataclass(frozen=True)
class WholeRun:
    """The run that was not killed."""

    contents: dict[str, str]
    failpoints: dict[str, int]
    seconds: float


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    for name in ("first", "second"):  # the first also waits for the fork server to import everything
        process = RunProcess(tmp_path_factory.mktemp(name) / "run", nan_update=NAN_UPDATE)
        began = time.perf_counter()
        assert process.run() == 0, process.messages
        seconds = time.perf_counter() - began
    return WholeRun(contents(process.folder), process.failpoints, seconds)


def killed(folder: Path, failpoint: str) -> RunProcess:
    process = RunProcess(folder, failpoint=failpoint, nan_update=NAN_UPDATE)
    assert process.run() == -signal.SIGKILL, f"the run did not die at {failpoint}: {process.messages}"
    return process


def assert_ends_as(whole: WholeRun, process: RunProcess, label: str) -> None:
    assert process.run() == 0, f"{label}: {process.messages}"
    assert not differences(contents(process.folder), whole.contents), label


def continued(process: RunProcess) -> RunProcess:
    """The same run resumed, or started again if it died before it had a folder."""
    return process.resumed() if (process.folder / "config.toml").exists() else replace(process, failpoint="none:0")


def test_the_run_that_is_killed_here_passes_every_failpoint(whole: WholeRun, tmp_path: Path) -> None:
    assert set(whole.failpoints) == set(FAILPOINTS)
    process = RunProcess(tmp_path / "run", nan_update=NAN_UPDATE)
    process.run()
    records = RunFolder(process.folder).records()
    assert [record["step"] for record in records] == list(range(7))
    assert all(record["update/grad_norm"] > 0.01 for record in records[1:]), "every step has a learning signal"
    assert [record["update/skipped"] for record in records[1:]] == [0, 0, 1, 0, 0, 0]
    paths = checkpoints.list_checkpoints(RunFolder(process.folder).checkpoints)
    gates = [checkpoints.read(path).state["objective"] for path in paths]
    assert len(gates) == 2 and gates[0] != gates[1], "the controller has state"
    assert not differences(contents(process.folder), whole.contents), "two runs of one recipe are equal"


@pytest.mark.parametrize("name", slow_but(SOME, FAILPOINTS))
def test_a_run_killed_at_a_failpoint_ends_like_one_that_was_not(name: str, whole: WholeRun, tmp_path: Path) -> None:
    last = whole.failpoints[name]
    for count in range(1, last + 1) if THOROUGH else sorted({1, last}):
        process = killed(tmp_path / str(count) / "run", f"{name}:{count}")
        assert_ends_as(whole, continued(process), f"killed at {name}:{count}")


@pytest.mark.parametrize("number", range(BY_THE_CLOCK))
def test_a_run_killed_by_the_clock_ends_like_one_that_was_not(number: int, whole: WholeRun, tmp_path: Path) -> None:
    process = RunProcess(tmp_path / "run", nan_update=NAN_UPDATE)
    process.run(seconds=whole.seconds * (number + 0.5) / BY_THE_CLOCK)
    assert_ends_as(whole, continued(process), f"killed at {number} of {BY_THE_CLOCK}")


@pytest.mark.parametrize("number", range(TWICE))
def test_a_run_killed_twice_ends_like_one_that_was_not(number: int, whole: WholeRun, tmp_path: Path) -> None:
    rng = random.Random(number)
    process = killed(tmp_path / "run", f"step.done:{rng.randint(2, 4)}")
    second = ("file.written:1", "run.rewound:1", "folder.rename:1", "update.done:1", "line.torn:1")
    again = process.resumed(failpoint=second[number % len(second)])
    assert again.run() == -signal.SIGKILL, again.messages
    assert_ends_as(whole, again.resumed(), f"killed at {process.failpoint}, then at {again.failpoint}")


def test_half_written_files_of_a_killed_run_are_removed(whole: WholeRun, tmp_path: Path) -> None:
    process = killed(tmp_path / "run", "checkpoint.manifest:4")
    assert list(process.folder.rglob(".writing-*"))
    assert_ends_as(whole, process.resumed(), "killed while saving")
    assert not list(tmp_path.rglob(".writing-*"))
