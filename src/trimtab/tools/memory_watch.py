"""The memory that all processes of a run take together, which no rlimit bounds."""

from __future__ import annotations

import os

# How often a run is looked at; the first time after as long, when most runs have ended. A look takes 50 microseconds,
# and in 10 ms two cores fill some 50 MB.
WATCH_SECONDS = 0.01
WATCH_IDLE_SECONDS = 1.0  # while a session waits, and its first process is stopped


class MemoryWatch:
    """Adds up the memory of a run's processes by /proc."""

    def __init__(self, proc: int) -> None:
        self.proc = proc
        self.inherited = self._own_pages("self")  # shared with the server until it is written to

    def used_bytes(self, pidfd: int) -> int:
        """Return the bytes that a process and its descendants have beyond what they share with the server.

        For a process without children it is 0: its own limit holds.
        """
        pages = 0
        # PIDs of this process's namespace mean nothing to the /proc of outside, which translates a descriptor.
        info = dict(line.split(":\t", 1) for line in self._read(f"self/fdinfo/{pidfd}").splitlines() if ":\t" in line)
        waiting = [info.get("Pid", "-1").strip()]
        if not self._children(waiting[0]):
            return 0
        while waiting:
            pid = waiting.pop()
            own = self._own_pages(pid)
            # What was started by `exec` shares nothing with the server.
            pages += own - self.inherited if own >= self.inherited else own
            waiting += self._children(pid)
        return pages * os.sysconf("SC_PAGE_SIZE")

    def _own_pages(self, pid: str) -> int:
        fields = self._read(f"{pid}/statm").split()
        return int(fields[1]) - int(fields[2]) if fields else 0  # resident, without files and shared memory

    def _children(self, pid: str) -> list[str]:
        try:
            folder = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.proc)
        except OSError:  # it has ended
            return []
        try:
            threads = os.listdir(folder)
        finally:
            os.close(folder)
        return [child for thread in threads for child in self._read(f"{pid}/task/{thread}/children").split()]

    def _read(self, name: str) -> str:
        try:
            with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.proc), encoding="utf-8") as file:
                return file.read()
        except OSError:  # it has ended, or this /proc hides it
            return ""
