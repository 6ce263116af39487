"""The sandbox's fork server: `python -P -m trimtab.workers.sandbox_server SOCKET OPTIONS`.

It enters a jail, loads numpy and sympy once, and forks a process for every run. It never sees a program or its output:
those pass between the client and the run over descriptors that it hands on, so there is nothing in its memory, which
each run inherits, that belongs to another run. It ends when its client closes the socket or dies.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from trimtab.workers import runner
from trimtab.workers.jail import Limits, Walls, drop_root, enter_network_namespace, enter_pid_namespace, find_walls
from trimtab.workers.linux import (
    PR_SET_NO_NEW_PRIVS,
    address_space,
    close_from,
    die_with_parent,
    prctl,
    use_huge_pages,
)
from trimtab.workers.supervisor import Child, Supervisor, freeze_memory
from trimtab.workers.visible_files import VisibleFiles, find_visible_files

SPARES = 2  # runs that stand ready in their jails
MAX_MESSAGE = 4096
RETRY_SECONDS = 1.0  # after a process could not be made
# What programs of mathematics import; numpy itself loads these parts at their first use, 20 ms later than here.
_READY = ("numpy.fft", "numpy.linalg", "numpy.polynomial", "numpy.random")
_STANDARD = ("collections", "decimal", "fractions", "functools", "heapq", "itertools", "math", "random", "statistics")

# How often a run is looked at; the first time after as long, when most runs have ended. A look takes 50 microseconds,
# and in 10 ms two cores fill some 50 MB.
WATCH_SECONDS = 0.01
WATCH_IDLE_SECONDS = 1.0  # while a session waits, its first process is stopped and the others are killed


@dataclass
class Run(Child):
    """A process that runs a program, or stands ready to; a session between two programs has no deadline."""

    pidfd: int
    handover: socket.socket
    network: int  # a descriptor of its namespace
    control: socket.socket | None = None
    next_look: float = math.inf  # at its memory
    reason: str = ""

    @property
    def due(self) -> float:
        """The time of its deadline, or of the next look at its memory."""
        return min(self.deadline, self.next_look)


class SandboxServer(Supervisor[Run]):
    """Hands requests to processes that stand ready, and watches their memory."""

    own_processes: ClassVar[int] = 1  # of a run, up to its interpreter

    def __init__(self, requests: socket.socket, walls: Walls, proc: int, pid_namespace: int = -1) -> None:
        super().__init__(requests)
        self.walls = walls
        self.memory = MemoryWatch(proc)
        self.address_space = address_space(proc)
        self.pid_namespace = pid_namespace  # a descriptor of this process's
        self.spares: list[Run] = []
        self.no_spares_until = 0.0
        self.networks: list[int] = []  # descriptors of namespaces that no run has

    def look(self, run: Run, now: float) -> None:
        """Kill a run that takes too much time or memory, or what a session has left running while it waits."""
        if run.deadline <= now:
            self.end(run, "timeout")
            return
        waits = run.deadline == math.inf
        run.next_look = now + WATCH_SECONDS
        if waits and not self.memory.end_descendants(run.pidfd, self.own_processes):
            run.next_look = now + WATCH_IDLE_SECONDS
        elif not waits and self.memory.exceeds(run.pidfd, self.walls.limits.memory_mb << 20):
            self.end(run, "memory")

    def next_start(self) -> float:
        """Return when a spare is to be made: at once, unless there are enough or there was no room for one."""
        # A fork takes milliseconds, in which no run's end would be noticed: spares are made between runs.
        return math.inf if len(self.spares) >= (1 if self.running else SPARES) else self.no_spares_until

    def start_waiting(self, now: float, idle: bool) -> None:
        """Fork a process ahead of its use; if there is no room for one, try again later."""
        if idle and now >= self.next_start():
            try:
                self.spares.append(self.fork_run())
            except OSError:
                self.no_spares_until = now + RETRY_SECONDS

    def accept(self) -> None:
        """Hand a request to a process that stands ready."""
        message, descriptors = receive(self.requests, 4)
        if not message:
            os._exit(0)  # with the PID namespace end all that is in it
        control, rest = socket.socket(fileno=descriptors[0]), descriptors[1:]
        try:
            run = self.spares.pop(0) if self.spares else self.fork_run()
        except OSError as error:
            control.send(json.dumps({"status": 9, "reason": "", "ms": 0.0, "failure": str(error)}).encode())
            for descriptor in (control.detach(), *rest):
                os.close(descriptor)
            return
        header = json.loads(message)
        run.control, run.start = control, time.monotonic()
        run.next_look = run.start + WATCH_SECONDS
        if header["seconds"]:
            run.deadline = run.start + header["seconds"]
        self.running[run.pid] = run
        self.watch(control.fileno(), lambda: self.listen(run))
        with contextlib.suppress(BrokenPipeError):  # it died already, which its descriptor tells
            socket.send_fds(run.handover, [b"session" if header["session"] else b"run"], rest)
        for descriptor in rest:
            os.close(descriptor)

    def fork_run(self) -> Run:
        """Fork a process that walls itself in and waits for a program."""
        if self.walls.namespaces:
            enter_pid_namespace(self.pid_namespace)
            enter_network_namespace(self.networks, self.walls.proc)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            pid = self.fork(lambda: self.become_run(theirs))
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # too many open files
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            ours.close()
            raise
        run = Run(pid, 0.0, math.inf, pidfd, ours, self.networks.pop() if self.networks else -1)
        self.watch(pidfd, lambda: self.report(run))
        return run

    def become_run(self, handover: socket.socket) -> None:
        """Wall this process in, wait for a program and run it."""
        try:
            self.walls.build_run(self.address_space)
            _seed_random_numbers()
        except Exception as error:
            handover.send(f"{type(error).__name__}: {error}"[:MAX_MESSAGE].encode())
            return
        message, descriptors = receive(handover, 3)
        if not message:
            return
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the server does not heed the signals that stop a run
        # stdin is /dev/null; output and error go to the client; nothing else stays open but the channel.
        for target, source in enumerate(descriptors[1:], start=1):
            os.dup2(source, target)
        os.dup2(descriptors[0], 3)
        close_from(4)
        runner.run(3, session=message == b"session")

    def listen(self, run: Run) -> None:
        """Take the client's word about a run: a new deadline, none while a session waits, or its end."""
        assert run.control is not None
        try:
            message = run.control.recv(MAX_MESSAGE)
        except OSError:
            message = b""
        if not message:
            self.unwatch(run.control.fileno())
            self.end(run, "closed")
            return
        order = json.loads(message)
        if "kill" in order:
            self.end(run, order["kill"])
            return
        seconds = order["seconds"]
        run.start = time.monotonic()
        run.deadline = run.start + seconds if seconds else math.inf
        run.next_look = run.start + WATCH_SECONDS if seconds else run.start
        # Threads that a session left running wait with it.
        os.kill(run.pid, signal.SIGCONT if seconds else signal.SIGSTOP)

    def end(self, run: Run, reason: str) -> None:
        """Kill a run and all it has started; its descriptor tells when it has ended."""
        run.reason, run.deadline, run.next_look = run.reason or reason, math.inf, math.inf
        self.kill(run)

    def report(self, run: Run) -> None:
        """Reap a run and tell its client how it ended; the first process of a PID namespace ends after all others."""
        ms = 1e3 * (time.monotonic() - run.start)
        status = self.status_of(self.reap(run))
        self.unwatch(run.pidfd)
        os.close(run.pidfd)
        if run.network >= 0:
            self.networks.append(run.network)
        failure = _failure(run.handover)
        run.handover.close()
        if run.control is None:  # its walls could not be built
            self.spares.remove(run)
            self.no_spares_until = time.monotonic() + RETRY_SECONDS
            return
        self.unwatch(run.control.fileno())
        word = {"status": status, "reason": run.reason, "ms": ms, "failure": failure}
        with run.control, contextlib.suppress(OSError):  # the client has gone
            run.control.send(json.dumps(word).encode())

    def status_of(self, status: int) -> int:
        """Return a run's own wait status from that of the process that was started for it."""
        return status


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


def _failure(handover: socket.socket) -> str:
    """Return why a process could not wall itself in; empty if it could."""
    handover.setblocking(False)
    try:
        return handover.recv(MAX_MESSAGE).decode("utf-8", "replace")
    except OSError:
        return ""


def _forget_the_server(files: VisibleFiles) -> None:
    """Leave a program what a fresh interpreter would have."""
    sys.path[:] = files.search_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "trimtab"]:
        del sys.modules[name]


def _seed_random_numbers() -> None:
    """Give a run its own random numbers; all would have the server's. The module `random` does so itself."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(int.from_bytes(os.urandom(4)))  # without a number: 2 ms


def _warm_up() -> None:
    """Run what each run does first, so that the interpreter's caches for it are filled: 7 % more runs per second."""
    # A process that fills a cache itself first copies the page, which it shares with the server.
    main, streams = sys.modules["__main__"], (sys.stdin, sys.stdout, sys.stderr)
    for _ in range(20):  # the interpreter adapts a function to its types after 8 to 16 calls
        runner.open_streams()
        runner.execute("print(end='')", "program.py", runner.fresh_main())
        runner.flush()
        _seed_random_numbers()
        sys.meta_path.pop(0)
    sys.modules["__main__"] = main
    sys.stdin, sys.stdout, sys.stderr = streams


def receive(connection: socket.socket, descriptors: int) -> tuple[bytes, list[int]]:
    """Receive a message with descriptors."""
    message, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE, descriptors)
    return message, fds


def load(packages: list[str]) -> None:
    """Load the packages that programs find ready."""
    for name in (*packages, *(_READY if "numpy" in packages else ()), *_STANDARD):
        importlib.import_module(name)
    freeze_memory()


def start_server(requests: socket.socket, options: dict[str, Any]) -> SandboxServer:
    """Report what holds on this machine, enter the jail, load the packages."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    files = find_visible_files(options["packages"])
    walls, reasons = find_walls(Limits(**options["limits"]), files, proc, options["without"])
    requests.send(json.dumps({"reasons": reasons, "landlock": walls.landlock}).encode())
    if walls.namespaces:
        walls.build_server()
        if (pid := os.fork()) != 0:
            requests.close()
            os.waitpid(pid, 0)
            os._exit(0)
        die_with_parent(0)
        load(options["packages"])
    else:
        load(options["packages"])
        if not reasons["uid"]:
            drop_root()
    _forget_the_server(files)
    _warm_up()
    walls.filter()
    with open(os.open("self/maps", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc), "rb") as maps:
        use_huge_pages(maps.read().decode("utf-8", "replace"))
    own = os.open("self/ns/pid", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    return SandboxServer(requests, walls, proc, own)


def main(requests: socket.socket, options: dict[str, Any]) -> None:
    """Start a server, or send why it cannot be started, and serve."""
    os.environ.pop("PYTHONPATH", None)
    start = start_server
    try:
        if options["bubblewrap"]:
            from trimtab.workers.bubblewrap import start_server as start
        server = start(requests, options)
        requests.send(json.dumps({"ready": True}).encode())
    except Exception as error:
        requests.send(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}).encode())
        os._exit(1)
    server.serve()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))
