"""The sandbox's fork server: `python -P -m trimtab.workers.server DESCRIPTOR OPTIONS`.

It enters a jail, loads numpy and sympy once, and forks a process for every run. It never sees a program or its output:
those pass between the client and the run over descriptors that it hands on, so there is nothing in its memory, which
each run inherits, that belongs to another run. It ends when its client closes the socket or dies.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from trimtab.worker_process import address_space, die_with_parent
from trimtab.workers import runner
from trimtab.workers.jail import Limits, Walls, drop_root, enter_network_namespace, enter_pid_namespace, find_walls
from trimtab.workers.linux import PR_SET_NO_NEW_PRIVS, close_from, prctl, use_huge_pages
from trimtab.workers.memory_watch import WATCH_IDLE_SECONDS, WATCH_SECONDS, MemoryWatch
from trimtab.workers.visible_files import VisibleFiles, find_visible_files

SPARES = 2  # runs that stand ready in their jails
MAX_MESSAGE = 4096
RETRY_SECONDS = 1.0  # after a process could not be made
# What programs of mathematics import; numpy itself loads these parts at their first use, 20 ms later than here.
_READY = ("numpy.fft", "numpy.linalg", "numpy.polynomial", "numpy.random")
_STANDARD = ("collections", "decimal", "fractions", "functools", "heapq", "itertools", "math", "random", "statistics")


@dataclass
class Run:
    """A process that runs a program, or stands ready to."""

    pid: int
    pidfd: int
    handover: socket.socket
    network: int = -1  # a descriptor of its namespace
    control: socket.socket | None = None
    start: float = 0.0
    deadline: float = float("inf")
    next_look: float = float("inf")  # at its memory
    reason: str = ""


@dataclass
class Server:
    """An event loop that hands requests to processes that stand ready, and kills what passes its deadline."""

    own_processes: ClassVar[int] = 1  # of a run, up to its interpreter
    requests: socket.socket
    walls: Walls
    memory: MemoryWatch
    address_space: int = 0  # of this process
    pid_namespace: int = -1  # a descriptor of this process's
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    spares: list[Run] = field(default_factory=list)
    no_spares_until: float = 0.0
    running: dict[int, Run] = field(default_factory=dict)  # by PID
    networks: list[int] = field(default_factory=list)  # descriptors of namespaces that no run has

    def serve(self) -> None:
        """Serve until the client is gone."""
        self.selector.register(self.requests, selectors.EVENT_READ, self.accept)
        while True:
            # A fork takes milliseconds, in which no run's end would be noticed: spares are made between runs.
            idle = len(self.spares) >= (1 if self.running else SPARES)
            events = self.selector.select(self.timeout(idle))
            for key, _ in events:
                handle: Callable[[], None] = key.data
                handle()
            now = time.monotonic()
            for run in list(self.running.values()):
                if run.deadline <= now:
                    self.kill(run, "timeout")
                elif run.next_look <= now:
                    self.look(run, now)
            if not events and not idle and now >= self.no_spares_until:
                self.add_spare()

    def look(self, run: Run, now: float) -> None:
        """Kill a run that takes too much memory, or what a session has left running while it waits."""
        waits = run.deadline == float("inf")
        run.next_look = now + WATCH_SECONDS
        if waits and not self.memory.end_descendants(run.pidfd, self.own_processes):
            run.next_look = now + WATCH_IDLE_SECONDS
        elif not waits and self.memory.exceeds(run.pidfd, self.walls.limits.memory_mb << 20):
            self.kill(run, "memory")

    def timeout(self, idle: bool) -> float | None:
        """Return the seconds until something is to be done: a deadline, or a spare to be made."""
        due = min((min(run.deadline, run.next_look) for run in self.running.values()), default=float("inf"))
        due = due if idle else min(due, self.no_spares_until)
        return None if due == float("inf") else max(0.0, due - time.monotonic())

    def add_spare(self) -> None:
        """Fork a process ahead of its use; where there is no room for one, try again later."""
        try:
            self.spares.append(self.fork())
        except OSError:
            self.no_spares_until = time.monotonic() + RETRY_SECONDS

    def accept(self) -> None:
        """Hand a request to a process that stands ready."""
        message, descriptors = receive(self.requests, 4)
        if not message:
            os._exit(0)  # with the PID namespace end all that is in it
        control, rest = socket.socket(fileno=descriptors[0]), descriptors[1:]
        try:
            run = self.spares.pop(0) if self.spares else self.fork()
        except OSError as error:
            control.send(json.dumps({"status": 9, "reason": "", "ms": 0.0, "failure": str(error)}).encode())
            for descriptor in (control.detach(), *rest):
                os.close(descriptor)
            return
        run.control, run.start = control, time.monotonic()
        run.next_look = run.start + WATCH_SECONDS
        header = json.loads(message)
        if header["seconds"]:
            run.deadline = run.start + header["seconds"]
        self.running[run.pid] = run
        self.selector.register(control, selectors.EVENT_READ, lambda: self.listen(run))
        with contextlib.suppress(BrokenPipeError):  # it died already, which its descriptor tells
            socket.send_fds(run.handover, [b"session" if header["session"] else b"run"], rest)
        for descriptor in rest:
            os.close(descriptor)

    def fork(self) -> Run:
        """Fork a process that walls itself in and waits for a program."""
        if self.walls.namespaces:
            enter_pid_namespace(self.pid_namespace)
            enter_network_namespace(self.networks, self.walls.proc)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                self.become_run(theirs, parent)
            finally:
                os._exit(1)
        theirs.close()
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # too many open files
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            ours.close()
            raise
        run = Run(pid, pidfd, ours, self.networks.pop() if self.networks else -1)
        self.selector.register(run.pidfd, selectors.EVENT_READ, lambda: self.reap(run))
        return run

    def become_run(self, handover: socket.socket, parent: int) -> None:
        """Wall this process in, wait for a program and run it."""
        try:
            if not self.walls.namespaces:
                die_with_parent(parent)
                os.setsid()
            self.walls.build_run(self.address_space)
            _seed_random_numbers()
        except Exception as error:
            handover.send(f"{type(error).__name__}: {error}"[:MAX_MESSAGE].encode())
            return
        message, descriptors = receive(handover, 3)
        if not message:
            return
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
            self.selector.unregister(run.control)
            self.kill(run, "closed")
            return
        order = json.loads(message)
        if "kill" in order:
            self.kill(run, order["kill"])
            return
        seconds = order["seconds"]
        run.start = time.monotonic()
        run.deadline = run.start + seconds if seconds else float("inf")
        run.next_look = run.start + WATCH_SECONDS if seconds else run.start
        # Threads that a session left running wait with it.
        signal.pidfd_send_signal(run.pidfd, signal.SIGCONT if seconds else signal.SIGSTOP)

    def status_of(self, status: int) -> int:
        """Return a run's own wait status from that of the process that was started for it."""
        return status

    def kill(self, run: Run, reason: str) -> None:
        """Kill a run and, with its PID namespace, all it has started."""
        run.reason, run.deadline, run.next_look = run.reason or reason, float("inf"), float("inf")
        self.kill_group(run)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(run.pidfd, signal.SIGKILL)

    def kill_group(self, run: Run) -> None:
        """Kill what a run has started, where no PID namespace ends with it."""
        if not self.walls.namespaces:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(run.pid, signal.SIGKILL)

    def reap(self, run: Run) -> None:
        """Report how a run ended; the first process of a PID namespace ends after all others."""
        status = self.status_of(os.waitpid(run.pid, 0)[1])
        ms = 1e3 * (time.monotonic() - run.start)
        self.selector.unregister(run.pidfd)
        os.close(run.pidfd)
        if run.network >= 0:
            self.networks.append(run.network)
        failure = _failure(run.handover)
        run.handover.close()
        if run in self.spares:  # its walls could not be built
            self.spares.remove(run)
            self.no_spares_until = time.monotonic() + RETRY_SECONDS
        if not self.running.pop(run.pid, None) or run.control is None:
            return
        self.kill_group(run)
        with contextlib.suppress(KeyError):
            self.selector.unregister(run.control)
        with contextlib.suppress(OSError):  # the client has gone
            run.control.send(
                json.dumps({"status": status, "reason": run.reason, "ms": ms, "failure": failure}).encode()
            )
        run.control.close()


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
    """Give a run random numbers of its own; all would have the server's. The module `random` does so itself."""
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
    gc.collect()
    gc.freeze()  # keeps the collector from writing to pages that the runs share


def serve(descriptor: int, start: Callable[[socket.socket], Server]) -> None:
    """Start a server on a socket, or send why it cannot be started, and serve."""
    requests = socket.socket(fileno=descriptor)
    os.environ.pop("PYTHONPATH", None)
    try:
        server = start(requests)
        requests.send(json.dumps({"ready": True}).encode())
    except Exception as error:
        requests.send(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}).encode())
        os._exit(1)
    server.serve()


def start_server(requests: socket.socket, options: dict[str, Any]) -> Server:
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
        die_with_parent(0)  # the parent is outside this PID namespace, where PIDs are 0
        load(options["packages"])
    else:
        load(options["packages"])
        if not reasons["uid"]:
            drop_root()
    _forget_the_server(files)
    _warm_up()
    walls.filter()
    use_huge_pages(_read(proc, "self/maps"))
    space = address_space(proc)
    own = os.open("self/ns/pid", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    return Server(requests, walls, MemoryWatch(proc), space, own)


def _read(proc: int, name: str) -> str:
    with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc), encoding="utf-8", errors="replace") as file:
        return file.read()


if __name__ == "__main__":
    serve(int(sys.argv[1]), lambda requests: start_server(requests, json.loads(sys.argv[2])))
