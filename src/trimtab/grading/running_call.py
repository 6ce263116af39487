"""A running call as the fork server knows it: its worker process, its output so far, and when its time is over."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from trimtab.grading.forked_worker import BOOST_CPU_SECONDS

NEW_SECONDS = 0.25  # a worker is new for at most so long
MAX_QUEUED_SECONDS = 30.0  # that a worker without a CPU is forgiven


@dataclass
class RunningCall:
    """A call and the worker process that runs it; that of a session waits for its next call without a deadline."""

    id: int
    pid: int
    pipe: int
    start: float
    seconds: float
    max_result: int
    output: bytearray = field(default_factory=bytearray)
    session: int | None = None
    calls: int = -1  # a session's pipe for calls
    earlier: tuple[float, float] = (0.0, 0.0)  # seconds on and waiting for a CPU in earlier calls of the session
    deadline: float = 0.0

    def __post_init__(self) -> None:
        self.deadline = self.start + self.seconds

    def is_new(self, now: float) -> bool:
        """Return whether the worker still runs at normal priority, by the clock and by its CPU time."""
        if now > self.start + NEW_SECONDS:
            return False
        return sum(map(int, _stat(self.pid)[11:13])) <= BOOST_CPU_SECONDS * os.sysconf("SC_CLK_TCK")

    def deadline_without_queueing(self, now: float) -> float:
        """Return the deadline if the time in which the worker waited for a CPU does not count."""
        ran, queued = (time - before for time, before in zip(cpu_times(self.pid), self.earlier, strict=True))
        latest = self.start + self.seconds + MAX_QUEUED_SECONDS
        # The wait that a worker is in at this moment is not in the kernel's figures: it is looked at again soon.
        if ran < self.seconds and _is_runnable(self.pid):
            return min(now + 0.1, latest)
        return min(self.start + self.seconds + queued, latest)


def cpu_times(pid: int) -> tuple[float, float]:
    """Return for how many seconds a process was on a CPU, and waited for one; 0 where the kernel does not tell."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            ran, queued, _ = map(int, file.read().split())
    except (OSError, ValueError):
        return 0.0, 0.0
    return ran * 1e-9, queued * 1e-9


def _is_runnable(pid: int) -> bool:
    """Return whether a process runs or waits for a CPU, rather than for time or data."""
    return _stat(pid)[:1] == [b"R"]


def _stat(pid: int) -> list[bytes]:
    """Return the fields of a process from its state on; none where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []
