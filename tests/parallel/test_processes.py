"""Real processes that train one policy: the same run as one process, resumed on any number, in a terminal."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from helpers.own_process import Terminal
from helpers.parallel.forked_ranks import ENDLESS, SeveralProcesses
from helpers.train.short_runs import SETTINGS
from trimtab.cli import app
from trimtab.record import open_run
from trimtab.trainer.config import list_checkpoints
from trimtab.trainer.parallel.world import join_world
from trimtab.trainer.train import checkpoints

ROOT = Path(__file__).parents[2]
STOPPED = 3


def weights(run: SeveralProcesses) -> torch.Tensor:
    newest = checkpoints.read(list_checkpoints(run.run_folder / "checkpoints")[-1])
    return torch.cat([tensor.flatten() for _, tensor in sorted(newest.tensors["model"].items())])


def recorded_tokens(run: SeveralProcesses) -> dict[int, list[Any]]:
    return {step.number: list(step.tokens["token"]) for step in open_run(run.run_folder)}


@pytest.mark.slow
def test_a_run_resumed_on_other_numbers_of_processes_is_the_run_of_one(tmp_path: Path) -> None:
    alone = SeveralProcesses(tmp_path / "alone", 1, {"run.steps": "4"})
    assert alone.run() == 0, alone.log.read_text()
    run = SeveralProcesses(tmp_path / "several", 2, {"run.steps": "1"})
    assert run.run() == 0, run.log.read_text()
    for step, size in ((2, 1), (3, 4), (4, 2)):
        run = run.again(size, run__steps=str(step))
        assert run.run() == 0, run.log.read_text()
    for was, now in ((2, 1), (1, 4), (4, 2)):
        assert f"processes was {was} and is {now}: results may differ in the last bits" in run.log.read_text()
    assert recorded_tokens(run) == recorded_tokens(alone)
    torch.testing.assert_close(weights(run), weights(alone), rtol=1e-4, atol=1e-5)


def test_a_run_of_several_processes_in_a_terminal_that_is_closed_leaves_a_checkpoint(tmp_path: Path) -> None:
    terminal = Terminal()
    run = SeveralProcesses(tmp_path, changes=ENDLESS | {"run.checkpoint_every": "0"}, output=terminal.path).start()
    run.wait_for_step(2)
    terminal.close()
    assert run.code() == STOPPED
    assert run.newest == run.steps()[-1]


# --- starting


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "no MASTER_ADDR: start the processes with torchrun or --gpus"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x, WORLD_SIZE=2"),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "2 of 4 processes are on this machine",
        ),
    ],
)
def test_an_environment_that_names_no_world_of_this_machine_is_refused(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        join_world("cpu")


@pytest.mark.parametrize("variables", [{"RANK": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_variables_without_other_processes_are_ignored(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert join_world("cpu").size == 1


def test_a_gpu_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    result = CliRunner().invoke(app, ["train", "addition", "--gpus", "4"])
    assert result.exit_code == 2
    assert "--gpus 4, but torch sees 2 GPUs here: GPU 2 is missing" in result.output
    assert CliRunner().invoke(app, ["train", "addition", "--gpus", "0"]).exit_code == 2


def commands() -> list[list[str]]:
    text = (ROOT / "docs/several-gpus.md").read_text()
    return [shlex.split(line) for line in re.findall(r"^(?:trimtab|torchrun) .*\btrain\b.*$", text, flags=re.MULTILINE)]


def test_the_commands_of_the_page_on_several_gpus_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.cli.dry_run.describe_dry_run", lambda config, gpus: f"for {gpus} GPUs")
    found = commands()
    assert len(found) >= 5
    for command in found:
        arguments = ["demo" if word == "mine.toml" else word for word in command[command.index("train") :]]
        if "--resume" in arguments:
            (tmp_path / "config.toml").write_text("")
            arguments[arguments.index("RUN")] = str(tmp_path)
        result = CliRunner().invoke(app, [*arguments, "--dry-run"])
        assert result.exit_code == 0, result.output
        several = arguments[arguments.index("--gpus") + 1] if "--gpus" in arguments else None
        assert result.output == f"for {several} GPUs\n"


@pytest.mark.slow
def test_a_run_on_several_processes_starts_from_a_checkpoint_of_one(tmp_path: Path) -> None:
    before = SeveralProcesses(tmp_path, 1, {"run.steps": "2"})
    assert before.run() == 0, before.log.read_text()
    start = ["--from", "run@2", "--keep-optimizer", "--set=run.steps=2"]
    for size, out in ((1, "alone"), (2, "several")):
        run = SeveralProcesses(tmp_path, size, out=out, arguments=start)
        assert run.run() == 0, run.log.read_text()
    alone = SeveralProcesses(tmp_path, 1, out="alone")
    assert recorded_tokens(run) == recorded_tokens(alone)
    torch.testing.assert_close(weights(run), weights(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "killed"), [(1, None), (2, None), (2, 0), (2, 1)])
def test_torchrun_starts_the_same_run(size: int, killed: int | None, tmp_path: Path) -> None:
    settings = [f"--set={key}={value}" for key, value in {**SETTINGS, **({} if killed is None else ENDLESS)}.items()]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    with (tmp_path / "log").open("wb") as log:
        command = [*torchrun, "-m", "trimtab", "train", "addition", *settings, "--out", "run"]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
    run = SeveralProcesses(tmp_path)
    if killed is not None:
        while len(run.steps()) < 3:
            assert process.poll() is None
        ranks = [pid for pid in run.left_behind() if b"\0RANK=%d\0" % killed in environment(pid)]
        assert len(ranks) == 1
        os.kill(ranks[0], signal.SIGKILL)
    assert process.wait(120) == (0 if killed is None else 1)
    if killed == 1:
        assert len(run.errors) == 1
        assert "process 1 of 2" in run.errors[0] and "Go on with: trimtab train --resume run --gpus 2" in run.errors[0]
    assert not run.left_behind()


def environment(pid: int) -> bytes:
    return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
