"""A run of several processes of which one dies, fails, is stopped or hangs: all end, one message names it, and
`--resume` goes on.

`TRIMTAB_THOROUGH=1` kills every rank at every failpoint, and tries every failure and signal; without it, some.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from torch import distributed

from helpers.made_once import made_once, shared_folder
from helpers.own_process import wait_until
from helpers.parallel.forked_ranks import ENDLESS, SeveralProcesses
from helpers.thorough import slow_but
from helpers.train.short_runs import contents, differences
from trimtab.cli import processes
from trimtab.trainer.parallel import Notices
from trimtab.trainer.train import RunFolder

LOST, STOPPED, INVALID, UNSAVED = 4, 3, 2, 5
KILLED = 128 + signal.SIGKILL
# Where ranks other than 0 pass; rank 0 passes those of the files as well.
FOLLOWED = ("warm_start.step:2", "warm_start.step:4", "update.planned:1", "update.done:5", "step.done:3", "step.done:6")
LED = (
    "file.written:1", "run.rewound:1", "warm_start.step:1", "checkpoint.tensors:1", "checkpoint.state:2",
    "checkpoint.manifest:3", "folder.rename:3", "checkpoint.published:4", "checkpoint.pruned:2", "warm_start.done:1",
    "line.torn:3", "metrics.written:2", "update.planned:4", "update.done:2", "step.done:4", "step.finished:5",
    "model.written:1",
)  # fmt: skip
EVERYWHERE = [*((1, each) for each in FOLLOWED), *((0, each) for each in LED)]
SOME = [(1, "update.done:5")]
FAILURES = [
    ("bug", "failed: KeyError('a bug')"),
    ("out_of_memory", "failed: out of memory"),
    ("value_error", "failed: row 7 of the data has no answer"),
]
# A rule that fails in one of two processes.
RULE = """
import os
import trimtab

@trimtab.rule(in_process=True)
def half(response, answer, extra):
    if os.environ["RANK"] == "1":
        raise RuntimeError("not here")
    return True
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The contents of a run of two processes that nobody disturbed."""

    def make(folder: Path) -> None:
        run = SeveralProcesses(folder)
        assert run.run() == 0, run.log.read_text()

    return contents(made_once(shared_folder(tmp_path_factory), "whole", make) / "run")


def continued(run: SeveralProcesses) -> SeveralProcesses:
    """The same run resumed, or started again if it has no folder."""
    again = run.again()
    again.resume = (run.run_folder / "config.toml").exists()
    return again


@pytest.mark.parametrize(("rank", "failpoint"), slow_but(SOME, EVERYWHERE))
def test_a_run_of_which_a_process_was_killed_ends_like_one_that_was_not(
    rank: int, failpoint: str, whole: dict[str, str], tmp_path: Path
) -> None:
    run = SeveralProcesses(tmp_path, disturbances={rank: f"kill {failpoint}"})
    assert run.run() == KILLED
    assert len(run.errors) == 1, run.errors
    assert f"process {rank} of 2" in run.errors[0] and "was ended by SIGKILL" in run.errors[0]
    run.log.unlink()
    again = continued(run)
    assert again.run() == 0, run.log.read_text()
    assert not differences(contents(run.run_folder), whole)


@pytest.mark.parametrize(("disturbance", "words"), slow_but(FAILURES[:1], FAILURES))
def test_a_process_that_fails_is_named_by_rank_0(disturbance: str, words: str, tmp_path: Path) -> None:
    run = SeveralProcesses(tmp_path, changes={"run.checkpoint_every": "1"}, disturbances={1: f"{disturbance} 2"})
    assert run.run() == (1 if disturbance == "bug" else INVALID)
    assert len(run.errors) == 1, run.errors
    assert run.errors[0].startswith("trimtab: stopped after step 1: process 1 of 2 (pid ")
    assert words in run.errors[0] and "trimtab train --resume run --gpus 2" in run.errors[0]
    assert ("Traceback" in run.log.read_text()) is (disturbance == "bug")
    assert run.newest == 1


def test_rank_0_that_runs_out_of_memory_is_named(tmp_path: Path) -> None:
    run = SeveralProcesses(tmp_path, disturbances={0: "out_of_memory 2"})
    assert run.run() == INVALID
    assert len(run.errors) == 1, run.errors
    assert run.errors[0].startswith("trimtab: process 0 of 2 failed: out of memory")


@pytest.mark.slow
def test_a_full_disk_on_rank_0_and_a_rule_that_fails_on_rank_1_do_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RULE)
    terms = {"reward.terms": '{mine={rule="python:mine:half",weight=0.1}}'}
    run = SeveralProcesses(tmp_path, changes=terms, disturbances={0: "full_disk 2"})
    assert run.run() == UNSAVED, run.log.read_text()
    assert "No space left on device" in run.log.read_text()
    assert run.steps() == [0, 1, 2, 3, 4, 5, 6] and run.newest == 0
    crashed = [record["reward/crashed_share"] for record in RunFolder(run.run_folder).records()[1:]]
    assert crashed == [0.5] * 6, "each process grades a half of the responses"
    assert run.log.read_text().count("RuntimeError: not here") == 1, "its first error is shown"


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "seconds"), [((0,), 10), ((1,), 10), ((0, 1), 15)])
def test_a_process_that_was_stopped_is_killed_and_named(ranks: tuple[int, ...], seconds: int, tmp_path: Path) -> None:
    run = SeveralProcesses(tmp_path, changes=ENDLESS).start()
    run.wait_for_step(2)
    for rank in ranks:
        run.signal(signal.SIGSTOP, rank)
    assert run.code() == KILLED
    assert len(run.errors) == 1, run.errors
    assert any(f"process {rank} of 2" in run.errors[0] for rank in ranks)
    assert f"was stopped (SIGSTOP) for {seconds} seconds" in run.errors[0]
    assert "Go on with: trimtab train --resume run --gpus 2" in run.errors[0]


def test_processes_that_are_all_stopped_are_killed_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOPPED_SECONDS", 1.0)
    errors = list[str]()
    ranks = processes.Ranks(Notices(distributed.HashStore()), errors.append)
    try:
        ranks.start(2, ["sleep", "600"], {})
        for process in ranks.processes:
            process.send_signal(signal.SIGSTOP)
        assert ranks.wait() == KILLED
    finally:
        ranks.kill()
    (error,) = errors
    assert "of 2 (pid " in error and "was stopped (SIGSTOP) for 1 seconds and was killed; the others" in error


def test_a_process_that_never_arrives_is_killed_and_named(tmp_path: Path) -> None:
    run = SeveralProcesses(tmp_path, disturbances={1: "hang 3"}, environment={"TRIMTAB_LONGEST_WAIT": "6"})
    assert run.run() == KILLED
    assert len(run.errors) == 1, run.errors
    assert "process 1 of 2" in run.errors[0] and "did not arrive within 6 seconds" in run.errors[0]
    assert "stopped after step 2" in run.errors[0]


def test_processes_whose_supervisor_is_killed_save_and_end(tmp_path: Path) -> None:
    run = SeveralProcesses(tmp_path, changes=ENDLESS | {"run.checkpoint_every": "0"}).start()
    run.wait_for_step(2)
    run.signal(signal.SIGKILL)
    assert run.code() == -signal.SIGKILL
    assert run.newest == run.steps()[-1] >= 2, "rank 0 has saved before it ended"


# --- stopping


@pytest.mark.parametrize("number", slow_but([signal.SIGINT], [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
def test_a_signal_ends_all_processes_after_their_step_with_a_checkpoint(number: signal.Signals, tmp_path: Path) -> None:
    run = SeveralProcesses(tmp_path, changes=ENDLESS | {"run.checkpoint_every": "0"}).start()
    run.wait_for_step(2)
    run.signal(number)
    assert run.code() == STOPPED, run.log.read_text()
    assert run.newest == run.steps()[-1]
    assert not run.errors
    assert "go on with: trimtab train --resume run --gpus 2" in run.log.read_text()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_all_processes_while_rank_0_waits_for_another(tmp_path: Path) -> None:
    run = SeveralProcesses(tmp_path, changes=ENDLESS, disturbances={1: "hang 3"}).start()
    wait_until((tmp_path / "hangs").exists, run.process)
    run.signal(signal.SIGINT)
    # Said although rank 0 cannot handle the signal. Two signals that arrive together would be one.
    wait_until(lambda: "press Ctrl-C again" in run.log.read_text(), run.process)
    run.signal(signal.SIGINT)
    assert run.code() == 128 + signal.SIGINT, run.log.read_text()
    assert len(run.errors) == 1, run.errors
    assert "stopped at once" in run.errors[0] and "trimtab train --resume run --gpus 2" in run.errors[0]


def test_a_warm_start_that_was_stopped_is_continued_by_the_same_command(tmp_path: Path) -> None:
    long = {"warm_start.steps": "100000", "warm_start.eval_every": "1"}
    run = SeveralProcesses(tmp_path, changes=long).start()
    wait_until(lambda: list(tmp_path.glob(".warm_start/*/step-*")), run.process)
    run.signal(signal.SIGTERM)
    assert run.code() == 128 + signal.SIGTERM
    assert "the same command continues the warm start" in run.errors[0]
    assert not run.run_folder.exists()
