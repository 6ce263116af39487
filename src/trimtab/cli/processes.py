"""Run one command as several processes of this machine, one per GPU, and end all of them if one fails.

Rank 0 prints everything, also why the run ended (`launch.py`). This process speaks only if rank 0 cannot.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType

import torch

from trimtab.process import STOP_AT_INPUT_END, STOP_SIGNALS
from trimtab.text import PrintLine
from trimtab.trainer.parallel import LOST, Notices, StoppedProcesses

# Seconds that the others get to end by themselves after one has failed. Rank 0 needs a few to notice it and to say so.
GRACE = 10.0
STOPPED_SECONDS = 15.0  # later than processes kill one another: for when all of them are stopped
AT_ONCE = 5.0  # seconds that rank 0 gets to end after a second Ctrl-C
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
    # The store is this process's, so that its port is free and it outlives every rank. By itself it would listen to
    # other machines too, and it has no password.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    world = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        STOP_AT_INPUT_END: "1",  # if this process is killed, rank 0 saves a checkpoint and ends
    }
    ranks = Ranks(Notices(store), print_error)
    for number in STOP_SIGNALS:  # to the end of this process, which only says how the ranks have ended
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, ranks.forward_signal)
    try:
        ranks.start(count, [sys.executable, "-P", "-m", "trimtab", *arguments], {**os.environ, **world})
        return ranks.wait()
    finally:
        ranks.kill()


@dataclass
class Ranks:
    """The processes of a run, in rank order."""

    notices: Notices
    print_error: PrintLine
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)  # that this process has received

    def start(self, count: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the processes."""
        for rank in range(count):
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            # In sessions of their own: Ctrl-C in a terminal reaches only this process, which passes it on to rank 0.
            process = subprocess.Popen(command, env=own, stdin=subprocess.PIPE, start_new_session=True)
            self.processes.append(process)
        for number in self.signals:  # that came before there was a process
            self.processes[0].send_signal(number)

    def forward_signal(self, number: int, frame: FrameType | None) -> None:
        """Pass a stop signal on to rank 0."""
        self.signals.append(number)
        if self.processes:
            self.processes[0].send_signal(number)

    def wait(self) -> int:
        """Wait until rank 0 or a process that fails has ended, and then for the others; return the exit code."""
        limit = math.inf
        stopped = StoppedProcesses(POLL_SECONDS, STOPPED_SECONDS)
        while self.processes[0].poll() is None and self._failed() is None:
            if self.signals.count(signal.SIGINT) > 1:
                limit = min(limit, time.monotonic() + AT_ONCE)
            if time.monotonic() > limit:
                # It waits in an exchange for a process that computes, where Python handles no signal.
                self.print_error(f"trimtab: stopped at once{self._advice()}")
                return 128 + signal.SIGINT
            for rank, process in enumerate(self.processes):  # nobody else kills them if all of them are stopped
                if stopped.look(process.pid):
                    self.notices.post(f"failed/{rank}", f"{stopped.reason} and was killed")
                    process.send_signal(signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        failed = self._failed()
        if failed is not None:
            self._reason(failed)  # so that rank 0 can name it
        end = time.monotonic() + GRACE
        while time.monotonic() < end and any(process.poll() is None for process in self.processes):
            time.sleep(POLL_SECONDS)
        failed = self._failed() if failed is None else failed
        first = self.processes[0].returncode
        if failed is None:  # it is rank 0 that has ended, by itself or by a signal
            return first if first >= 0 else self._report(0)
        if first != LOST and (first is None or first < 0):  # rank 0 has not said it
            return self._report(failed)
        return self._code(failed)

    def kill(self) -> None:
        """Kill the processes that still run, with those that they have started."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def _failed(self) -> int | None:
        """Return a rank other than 0 that has failed by itself, if there is one."""
        codes = [(rank, process.poll()) for rank, process in enumerate(self.processes)]
        return next((rank for rank, code in codes if rank and code not in (None, 0, LOST)), None)

    def _reason(self, rank: int) -> str:
        """Return why a process has ended; let the others know, unless somebody has said it already."""
        reason = self.notices.read(f"failed/{rank}")
        if reason is None:
            code = self.processes[rank].returncode
            reason = f"ended with code {code}" if code >= 0 else f"was ended by {_signal_name(-code)}"
            self.notices.post(f"failed/{rank}", reason)
        return reason

    def _code(self, rank: int) -> int:
        code = self.processes[rank].returncode
        return code if code >= 0 else 128 - code

    def _report(self, rank: int) -> int:
        """Say which process has failed and why; return the exit code."""
        code = self._code(rank)
        if code - 128 in self.signals:  # as it was told to
            self.print_error(f"trimtab: stopped by {_signal_name(code - 128)}{self._advice()}")
            return code
        name = f"process {rank} of {len(self.processes)} (pid {self.processes[rank].pid})"
        self.print_error(f"trimtab: {name} {self._reason(rank)}; the others were stopped{self._advice()}")
        return code

    def _advice(self) -> str:
        resume = self.notices.read("resume")
        return "" if resume is None else f". Go on with: {resume}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
