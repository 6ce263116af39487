"""Run one command as several processes of this machine, one per GPU, and end all of them if one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import torch

from trimtab.stop_signals import STOP_AT_INPUT_END, STOP_SIGNALS
from trimtab.text import PrintLine

LOST = 4  # the exit code of a process that ends because another one has
# Seconds that the others get to end by themselves after one has failed. Rank 0 says how to go on with the run.
GRACE = 5.0
POLL_SECONDS = 0.05


def check_gpus(count: int, device: str) -> None:
    """Raise if this machine has fewer GPUs than processes are asked for; `device` is `run.device`."""
    if count < 1:
        raise ValueError(f"--gpus {count}: it must be at least 1")
    if device not in ("auto", "cuda"):  # named for all processes by the user
        return
    found = torch.cuda.device_count()
    if found < count:
        missing = f"GPU {found} is missing" if found else "there is no GPU"
        raise ValueError(
            f"--gpus {count}, but torch sees {found} GPUs here: {missing}. For {count} processes on the CPU: "
            "--set run.device=cpu"
        )


def supervise(count: int, arguments: Sequence[str], print_error: PrintLine) -> int:
    """Run `trimtab ARGUMENTS` as `count` processes; return the exit code of rank 0, or of the first that failed."""
    # The store is this process's, so that its port is free and it outlives every rank.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    world = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        STOP_AT_INPUT_END: "1",  # if this process is killed, rank 0 saves a checkpoint and ends
    }
    command = [sys.executable, "-P", "-m", "trimtab", *arguments]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            environment = {**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            # In sessions of their own: Ctrl-C in a terminal reaches this process alone, which passes it on to rank 0.
            processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True))
        with _signals_to(processes[0]):
            return _wait(processes, print_error)
    finally:
        _kill(processes)


def _wait(processes: Sequence[subprocess.Popen[bytes]], print_error: PrintLine) -> int:
    """Wait until rank 0 or a process that fails has ended, and then for the others; return the exit code."""
    while True:
        failed = [rank for rank, p in enumerate(processes) if rank and p.poll() not in (None, 0, LOST)]
        if failed:
            return _report(processes, failed[0], print_error)
        code = processes[0].poll()
        if code is not None:
            _wait_all(processes, GRACE)
            # Rank 0 may have noticed the end of a process before this one did.
            failed = [rank for rank, p in enumerate(processes) if rank and p.poll() not in (None, 0, LOST)]
            if failed and code == LOST:
                return _report(processes, failed[0], print_error)
            return code if code >= 0 else _report(processes, 0, print_error)
        time.sleep(POLL_SECONDS)


def _report(processes: Sequence[subprocess.Popen[bytes]], rank: int, print_error: PrintLine) -> int:
    """Name the process that failed, if it could not do so itself; return the exit code."""
    _wait_all(processes, GRACE)
    code = processes[rank].returncode
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    print_error(f"trimtab: process {rank} of {len(processes)} was ended by {name}; the others were stopped")
    return 128 - code


def _wait_all(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(p.poll() is None for p in processes):
        time.sleep(POLL_SECONDS)


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill the processes that still run, with those that they have started."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


@contextmanager
def _signals_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass stop signals on to a process in the block."""

    def forward(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, previous in before.items():
        if previous is not signal.SIG_IGN:
            signal.signal(number, forward)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
