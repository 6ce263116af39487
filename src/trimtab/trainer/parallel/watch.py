"""Notice that another process of a run has ended, is stopped or hangs, and say which one and why.

Connections do not suffice. Gloo notices the end of a process at once, but only inside an exchange; NCCL does not
notice it; a stopped process keeps its connections. So a thread of every process looks at the others twice a second.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NoReturn

LOST: Final = 4  # the exit code of a process that ends because another one has
LONGEST_WAIT = "TRIMTAB_LONGEST_WAIT"  # the variable with how many seconds processes wait for one that computes
STOPPED_SECONDS = 10.0  # a debugger or profiler stops a process for less
POLL_SECONDS = 0.5
GRACE = 3.0  # seconds for the main thread to notice by itself: it can then save more
REASON_SECONDS = 2.0  # for the news why a process has ended

_exchanges = 0  # begun by this process


def longest_wait() -> timedelta:
    """Return how long processes wait for one that computes: by default two hours."""
    # Sampling long responses may take many minutes, and so may writing a checkpoint.
    text = os.environ.get(LONGEST_WAIT, "7200")
    try:
        return timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        raise ValueError(f"the environment has {LONGEST_WAIT}={text}: it must be a number of seconds") from None


def count_exchange() -> None:
    """Note that this process begins an exchange with the others."""
    global _exchanges  # noqa: PLW0603
    _exchanges += 1


class Notices:
    """What processes tell each other about failures, in the store of torch.distributed that outlives them all."""

    def __init__(self, store: Any) -> None:
        self._store: Any = store
        # torchrun may start all processes again with the same store.
        self._prefix = f"trimtab/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def post(self, name: str, text: str) -> None:
        """Leave a text; nothing if the store is gone."""
        self._call(lambda store: store.set(f"{self._prefix}/{name}", text))

    def read(self, name: str) -> str | None:
        """Return what was left under a name; None if there is nothing."""
        key = f"{self._prefix}/{name}"
        found: bytes | None = self._call(lambda store: store.get(key) if store.check([key]) else None)
        return None if found is None else found.decode("utf-8", "replace")

    def _call(self, function: Callable[[Any], Any]) -> Any:
        if self._store is None:
            return None
        try:
            return function(self._store)
        except RuntimeError:
            self._store = None  # torch would print a stack of C++ for every further attempt
            return None


class StoppedProcesses:
    """Notices processes that stay stopped; `poll` is how many seconds pass between two looks at each."""

    def __init__(self, poll: float, seconds: float = STOPPED_SECONDS) -> None:
        self._enough = seconds / poll
        self._looks = Counter[int]()
        self.reason = f"was stopped (SIGSTOP) for {seconds:.0f} seconds"

    def look(self, pid: int) -> bool:
        """Look at a process; return whether it has been stopped for too long."""
        # Counted and not timed: who looks may have been stopped too, and then both go on.
        self._looks[pid] = self._looks[pid] + 1 if _state(pid) == "T" else 0
        return self._looks[pid] >= self._enough


class Watch:
    """A thread of one rank that watches the processes of all; `pids` are theirs in rank order."""

    def __init__(self, rank: int, pids: Sequence[int], store: Any) -> None:
        self.rank = rank
        self.pids = list(pids)
        self.notices = Notices(store)
        self._on_lost: Callable[[str], object] = lambda reason: None
        self._ended = threading.Event()
        self._killed: set[int] = set()
        self._limit = longest_wait().total_seconds()
        self._leading = (0, time.monotonic())  # the most exchanges that a process has begun, and since when
        self._thread = threading.Thread(target=self._run, name="trimtab-ranks", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def tell(self, on_lost: Callable[[str], object]) -> None:
        """Call `on_lost` with the reason before the thread ends this process."""
        self._on_lost = on_lost

    def end(self) -> None:
        """Stop watching: from now on processes may end."""
        self._ended.set()

    def post(self, kind: str, text: str) -> None:
        """Tell the others why this process ends: because it `failed`, or because another one has and it `left`."""
        self.notices.post(f"{kind}/{self.rank}", text)

    def reason(self) -> str | None:
        """Return which process is lost and why, waiting a little for that news; None if nothing is known."""
        found = None
        limit = time.monotonic() + REASON_SECONDS
        while True:
            for rank in self._others:
                if text := self.notices.read(f"failed/{rank}"):
                    return f"{self._name(rank)} {text}"
            if found is None:
                gone = [r for r in self._others if not _state(self.pids[r]) and not self.notices.read(f"left/{r}")]
                if gone:
                    # The process that started it may still tell by which signal it was ended.
                    found = f"{self._name(gone[0])} has ended"
                    limit = min(limit, time.monotonic() + 0.5)
            if time.monotonic() > limit:
                return found
            time.sleep(0.05)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(len(self.pids)) if rank != self.rank]

    def _name(self, rank: int) -> str:
        return f"process {rank} of {len(self.pids)} (pid {self.pids[rank]})"

    def _run(self) -> None:
        stopped = StoppedProcesses(POLL_SECONDS)
        lost_since = None
        while not self._ended.wait(POLL_SECONDS):
            for rank in self._others:
                if stopped.look(self.pids[rank]):
                    self._kill(rank, stopped.reason)
                if not _state(self.pids[rank]) or rank in self._killed:
                    lost_since = lost_since or time.monotonic()
            self._compare_exchanges()
            # The others give rank 0 the time to say it.
            if lost_since and time.monotonic() - lost_since > (GRACE if self.rank == 0 else 2 * GRACE):
                self._leave()

    def _compare_exchanges(self) -> None:
        """Kill the process that has not arrived for too long at an exchange in which this one waits."""
        own = _exchanges
        self.notices.post(f"exchanges/{self.rank}", str(own))
        begun = [int(self.notices.read(f"exchanges/{rank}") or 0) for rank in range(len(self.pids))]
        if max(begun) != self._leading[0]:
            self._leading = (max(begun), time.monotonic())
        behind = [rank for rank in self._others if begun[rank] < own]
        if behind and own == max(begun) and time.monotonic() - self._leading[1] > self._limit:
            self._kill(behind[0], f"did not arrive within {self._limit:g} seconds where the others wait for it")

    def _kill(self, rank: int, reason: str) -> None:
        """End a process that hangs: all others then end as they do when a process dies."""
        if rank not in self._killed:
            self._killed.add(rank)
            self.notices.post(f"failed/{rank}", f"{reason} and was killed")
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pids[rank], signal.SIGKILL)

    def _leave(self) -> NoReturn:
        """End this process, whose main thread computes, or waits for something that will not come."""
        try:
            if not self._ended.is_set():
                self._on_lost(self.reason() or "another process has ended")
        finally:
            os._exit(LOST)


def _state(pid: int) -> str:
    """Return a process's state as in /proc (R, S, D, T, ...); nothing if it has ended."""
    try:
        # After the name of the program, which may itself have spaces and brackets.
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2][:1]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return ""
        try:  # no Linux
            os.kill(pid, 0)
        except ProcessLookupError:
            return ""
        return "R"
    except OSError:
        return ""
    return "" if state in "ZX" else state
