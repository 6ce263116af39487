"""A run that is killed and resumed, wherever that happens, ends bit by bit as the run that was not.

`TRIMTAB_THOROUGH=1` kills at every passing of every named moment, and often by the clock; else at the first and the
last passing.
"""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from helpers.train.short_runs import THOROUGH, Order, contents, differences
from trimtab.train import checkpoints
from trimtab.train.run_folder import RunFolder

# The named moments in the order in which a run first meets them.
MOMENTS = (
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
BY_THE_CLOCK = 90 if THOROUGH else 4
TWICE = 20 if THOROUGH else 4
SPOIL = (3, 2)  # one update is not finite, so that the record of that is part of what must come out the same


@dataclass(frozen=True)
class Whole:
    """The run that nobody killed."""

    contents: dict[str, str]
    passed: dict[str, int]
    seconds: float


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    for name in ("warm-up", "whole"):  # the first waits for the server to import everything
        order = Order(tmp_path_factory.mktemp(name) / "run", spoil=SPOIL)
        began = time.perf_counter()
        assert order.run() == 0, order.said
        seconds = time.perf_counter() - began
    return Whole(contents(order.folder), order.passed, seconds)


def killed(folder: Path, moment: str) -> Order:
    order = Order(folder, fault=moment, spoil=SPOIL)
    assert order.run() == -signal.SIGKILL, f"the run was to die at {moment}: {order.said}"
    return order


def assert_ends_as(whole: Whole, order: Order, told: str) -> None:
    assert order.run() == 0, f"{told}: {order.said}"
    assert not differences(contents(order.folder), whole.contents), told


def continued(order: Order) -> Order:
    """The order to go on with: a run that died before its folder was made is started anew."""
    return order.resumed() if (order.folder / "config.toml").exists() else replace(order, fault="none:0")


def test_the_run_that_is_killed_here_does_everything_a_run_can_do(whole: Whole, tmp_path: Path) -> None:
    assert set(whole.passed) == set(MOMENTS)
    order = Order(tmp_path / "run", spoil=SPOIL)
    order.run()
    records = RunFolder(order.folder).records()
    assert [record["step"] for record in records] == list(range(7))
    assert all(record["update/grad_norm"] > 0.01 for record in records[1:]), "every step teaches"
    assert [record["update/skipped"] for record in records[1:]] == [0, 0, 1, 0, 0, 0]
    paths = checkpoints.list_checkpoints(RunFolder(order.folder).checkpoints)
    gates = [checkpoints.read(path).state["objective"] for path in paths]
    assert len(gates) == 2 and gates[0] != gates[1], "the controller has something to remember"
    assert not differences(contents(order.folder), whole.contents), "two runs of one recipe are the same run"


@pytest.mark.parametrize("name", MOMENTS)
def test_a_run_killed_at_a_named_moment_goes_on_as_if_nothing_had_been(name: str, whole: Whole, tmp_path: Path) -> None:
    last = whole.passed[name]
    for count in range(1, last + 1) if THOROUGH else sorted({1, last}):
        order = killed(tmp_path / str(count) / "run", f"{name}:{count}")
        assert_ends_as(whole, continued(order), f"killed at {name}:{count}")


@pytest.mark.parametrize("number", range(BY_THE_CLOCK))
def test_a_run_killed_by_the_clock_goes_on_as_if_nothing_had_been(number: int, whole: Whole, tmp_path: Path) -> None:
    order = Order(tmp_path / "run", spoil=SPOIL)
    order.run(seconds=whole.seconds * (number + 0.5) / BY_THE_CLOCK)
    assert_ends_as(whole, continued(order), f"killed at {number} of {BY_THE_CLOCK}")


@pytest.mark.parametrize("number", range(TWICE))
def test_a_run_killed_again_after_it_was_resumed_goes_on_all_the_same(
    number: int, whole: Whole, tmp_path: Path
) -> None:
    draw = random.Random(number)
    order = killed(tmp_path / "run", f"step.done:{draw.randint(2, 4)}")
    moments = ("file.written:1", "run.rewound:1", "folder.rename:1", "update.done:1", "line.torn:1")
    again = order.resumed(fault=moments[number % len(moments)])
    assert again.run() == -signal.SIGKILL, again.said
    assert_ends_as(whole, again.resumed(), f"killed at {order.fault}, then at {again.fault}")


def test_what_a_killed_run_left_half_written_is_swept_away(whole: Whole, tmp_path: Path) -> None:
    order = killed(tmp_path / "run", "checkpoint.manifest:4")
    assert list(order.folder.rglob(".writing-*"))
    assert_ends_as(whole, order.resumed(), "killed while it was saving")
    assert not list(tmp_path.rglob(".writing-*"))
