"""`trimtab train --gpus N` whose processes are forked from one that has imported everything: they start at once."""

from __future__ import annotations

import atexit
import errno
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from helpers.own_process import exit_code, in_own_process, run_command, wait_until
from helpers.train.short_runs import SETTINGS
from trimtab.cli import processes
from trimtab.trainer.config import list_checkpoints
from trimtab.trainer.train import RunFolder, loop

ENDLESS = {"run.steps": "100000", "run.checkpoint_every": "2", "run.eval_every": "0", "run.patience": "0"}


class ForkedProcess:
    """What the supervisor uses of a Popen: a fork of the supervisor that becomes `trimtab ARGUMENTS`."""

    disturbances: Mapping[int, str] = {}  # by rank, see `disturb`
    returncode: int | None = None

    def __init__(self, command: Sequence[str], env: Mapping[str, str], **options: Any) -> None:
        read, self._write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._be_the_rank(command, env, read)
        os.close(read)
        self.stdin = os.fdopen(self._write, "wb")

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _be_the_rank(self, command: Sequence[str], env: Mapping[str, str], read: int) -> None:
        code: object = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(read, 0)
            os.closerange(3, 256)  # among them the pipes of the ranks before, and the store's connections
            os.environ.clear()
            os.environ.update(env)
            if wanted := self.disturbances.get(int(env["RANK"])):
                disturb(wanted)
            from trimtab.cli import app

            arguments = list(command[command.index("trimtab") + 1 :])
            sys.argv = ["trimtab", *arguments]
            app(arguments)
        except SystemExit as end:
            code = end.code
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with suppress(BaseException):
                atexit._run_exitfuncs()  # the rest of an exit would wait for threads of the process before the fork
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            os._exit(code if isinstance(code, int) else 0)


def disturb(wanted: str) -> None:
    """Prepare this process to fail: `kill NAME:COUNT` at a failpoint, or `FUNCTION STEP` of those below in a step."""
    kind, where = wanted.split()
    if kind == "kill":
        os.environ["TRIMTAB_FAILPOINT"] = where
        return
    original, step = loop.score_rollouts, int(where)
    count = 0

    def disturbed(trainer: Any, rollouts: Any) -> Any:
        nonlocal count
        count += 1
        if count == step:
            DISTURBANCES[kind]()
        return original(trainer, rollouts)

    loop.score_rollouts = disturbed


def _out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def _value_error() -> None:
    raise ValueError("row 7 of the data has no answer")


def _bug() -> None:
    raise KeyError("a bug")


def _full_disk() -> None:
    checkpoints = importlib.import_module("trimtab.trainer.train.checkpoints")

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints.save = full


def _hang() -> None:
    Path("hangs").touch()
    while True:
        signal.pause()


DISTURBANCES: dict[str, Callable[[], None]] = {
    "out_of_memory": _out_of_memory,
    "value_error": _value_error,
    "bug": _bug,
    "full_disk": _full_disk,
    "hang": _hang,
}


@dataclass
class SeveralProcesses:
    """A run of `--gpus N` in `folder/out`; `disturbances` is what happens to which rank."""

    folder: Path
    size: int = 2
    changes: dict[str, str] = field(default_factory=dict)
    disturbances: dict[int, str] = field(default_factory=dict)
    resume: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    process: BaseProcess | None = None
    output: str | None = None  # a terminal's path
    out: str = "run"
    arguments: list[str] = field(default_factory=list)  # further ones

    def start(self) -> SeveralProcesses:
        self.folder.mkdir(exist_ok=True)
        chosen = {**SETTINGS, "run.report": "false", **self.changes}
        settings = [f"--set={key}={value}" for key, value in chosen.items()]
        where = ["--resume", self.out] if self.resume else ["addition", "--out", self.out]
        several = ["--gpus", str(self.size)] if self.size > 1 else []
        arguments = ["train", *settings, *several, *where, *self.arguments]
        output = self.output or str(self.log)
        self.process = in_own_process(_supervise, arguments, output, self.folder, self.disturbances, self.environment)
        return self

    def code(self) -> int:
        """Wait until it has ended, check that it has left nobody behind, and return its exit code."""
        assert self.process is not None
        code = exit_code(self.process)
        wait_until(lambda: not self.left_behind())
        return code

    def run(self) -> int:
        return self.start().code()

    def again(self, size: int | None = None, **changes: str) -> SeveralProcesses:
        """The same run, to be resumed, undisturbed."""
        settings = {key.replace("__", "."): value for key, value in changes.items()}
        return SeveralProcesses(self.folder, size or self.size, {**self.changes, **settings}, resume=True)

    def signal(self, number: int, rank: int | None = None) -> None:
        """Signal the supervisor, or the process of a rank."""
        assert self.process is not None and self.process.pid is not None
        os.kill(self.process.pid if rank is None else self.pids()[rank], number)

    def pids(self) -> list[int]:
        """The processes of the ranks, which the supervisor starts in their order."""
        assert self.process is not None
        return sorted(pid for pid, parent in _parents().items() if parent == self.process.pid)

    def left_behind(self) -> list[int]:
        """All processes that work in the run's folder, whoever started them."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "cwd") == str(self.folder):
                    found.append(int(entry.name))
        return found

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: self.steps() and self.steps()[-1] >= step, self.process)

    def steps(self) -> list[int]:
        return [record["step"] for record in RunFolder(self.run_folder).records()] if self.run_folder.exists() else []

    @property
    def run_folder(self) -> Path:
        return self.folder / self.out

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def errors(self) -> list[str]:
        """The messages by which a command says why it ended."""
        return [line for line in self.log.read_text().splitlines() if line.startswith("trimtab: ")]

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint."""
        return int(list_checkpoints(self.run_folder / "checkpoints")[-1].name.removeprefix("step-"))


def _supervise(
    arguments: list[str], output: str, folder: Path, disturbances: Mapping[int, str], environment: Mapping[str, str]
) -> None:
    """Be `trimtab train --gpus N`, whose processes are forks of this one."""
    sys.argv = ["trimtab", *arguments]
    os.environ.update(environment)
    ForkedProcess.disturbances = disturbances
    processes.subprocess.Popen = ForkedProcess  # type: ignore[misc, assignment]
    run_command(arguments, output, folder)


def _parents() -> dict[int, int]:
    """The parents of all processes that have not ended."""
    found = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(") ")[2].split()
            if fields[0] not in "ZX":
                found[int(entry.name)] = int(fields[1])
    return found
