"""A run's processes together: the memory they take, which no rlimit bounds, and their end between turns."""

from __future__ import annotations

import contextlib
import os
import signal

# How often a run is looked at; the first time after as long, when most runs have ended. A look takes 50 microseconds,
# and in 10 ms two cores fill some 50 MB.
WATCH_SECONDS = 0.01
WATCH_IDLE_SECONDS = 1.0  # while a session waits, its first process is stopped and the others are killed


class MemoryWatch:
    """Adds up the memory of a run's processes by /proc."""

    def __init__(self, proc: int) -> None:
        self.proc = proc
        self.inherited = self._own_pages("self")  # shared with the server until it is written to

    def exceeds(self, pidfd: int, limit: int) -> bool:
        """Return whether a process and its descendants have more bytes beyond what they share with the server.

        A process without children never does: its own limit holds.
        """
        pids = self._tree(pidfd)
        if len(pids) == 1:
            return False
        # What was started by `exec` shares nothing with the server.
        pages = sum(own - self.inherited if own >= self.inherited else own for own in map(self._own_pages, pids))
        private = pages * os.sysconf("SC_PAGE_SIZE")
        if private + sum(self._kilobytes(f"{pid}/status", "RssShmem") for pid in pids) * 1024 <= limit:
            return False
        # What processes share is counted for each of them there; smaps divides it, but takes a millisecond for each.
        return private + sum(self._divided_shared_memory(pid) for pid in pids) * 1024 > limit

    def end_descendants(self, pidfd: int, keep: int) -> bool:
        """Kill what a process has started, but for the first `keep` with itself; return whether there was any."""
        running = [
            pid
            for pid in self._tree(pidfd)[keep:]
            if self._read(f"{pid}/stat").rpartition(")")[2][:2] not in ("", " Z")
        ]
        for pid in running:
            with contextlib.suppress(OSError):
                folder = os.open(pid, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.proc)
                try:
                    signal.pidfd_send_signal(folder, signal.SIGKILL)
                finally:
                    os.close(folder)
        return bool(running)

    def _tree(self, pidfd: int) -> list[str]:
        # PIDs of this process's namespace mean nothing to the /proc of outside, which translates a descriptor.
        info = dict(line.split(":\t", 1) for line in self._read(f"self/fdinfo/{pidfd}").splitlines() if ":\t" in line)
        pids = [info.get("Pid", "-1").strip()]
        for pid in pids:
            pids += self._children(pid)
        return pids

    def _divided_shared_memory(self, pid: str) -> int:
        return self._kilobytes(f"{pid}/smaps_rollup", "Pss_Shmem") or self._kilobytes(f"{pid}/status", "RssShmem")

    def _kilobytes(self, name: str, key: str) -> int:
        line = next((line for line in self._read(name).splitlines() if line.startswith(f"{key}:")), "")
        return int(line.split()[1]) if line else 0

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
