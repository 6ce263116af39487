"""The sandbox's fork server: `python -P -m trimtab.tools.server DESCRIPTOR OPTIONS`.

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
from dataclasses import dataclass, field, replace
from typing import Any

from trimtab.tools import runner
from trimtab.tools.jail import (
    Limits,
    drop_root,
    enter_pid_namespace,
    enter_run_jail,
    enter_server_jail,
    give_up_privileges,
    limit_resources,
    lock_files,
)
from trimtab.tools.landlock import landlock_version
from trimtab.tools.linux import PR_SET_NO_NEW_PRIVS, close_from, die_with_parent, prctl
from trimtab.tools.seccomp import build_filter
from trimtab.tools.visible_files import VisibleFiles, find_visible_files

SPARES = 2  # runs that stand ready in their jails
MAX_MESSAGE = 4096
# What programs of mathematics import; numpy itself loads these parts at their first use, 20 ms later than here.
_READY = ("numpy.fft", "numpy.linalg", "numpy.polynomial", "numpy.random")
_STANDARD = ("collections", "decimal", "fractions", "functools", "heapq", "itertools", "math", "random", "statistics")


@dataclass(frozen=True)
class Walls:
    """How a run is walled in on this machine, found out once."""

    limits: Limits
    files: VisibleFiles
    proc: int  # a descriptor of /proc as it was outside
    namespaces: bool
    landlock: int  # its version, 0 where it is missing
    seccomp: bool

    def build_server(self) -> None:
        """Wall in the server itself, where there are namespaces."""
        if self.namespaces:
            enter_server_jail(self.files, self.proc)

    def build_run(self, address_space: int) -> None:
        """Wall in this process, which becomes a run."""
        if self.namespaces:
            enter_run_jail(self.limits, self.proc)
        if self.landlock:
            lock_files(self.landlock, None if self.namespaces else self.files.paths)
        limit_resources(self.limits, address_space)
        pid = 0 if self.namespaces else os.getpid()
        give_up_privileges(build_filter(processes=self.namespaces, pid=pid) if self.seccomp else b"")


@dataclass
class Run:
    """A process that runs a program, or stands ready to."""

    pid: int
    pidfd: int
    handover: socket.socket
    control: socket.socket | None = None
    start: float = 0.0
    deadline: float = float("inf")
    reason: str = ""


@dataclass
class Server:
    """An event loop that hands requests to processes that stand ready, and kills what passes its deadline."""

    requests: socket.socket
    walls: Walls
    address_space: int
    pid_namespace: int
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    spares: list[Run] = field(default_factory=list)
    running: dict[int, Run] = field(default_factory=dict)  # by PID

    def serve(self) -> None:
        """Serve until the client is gone."""
        self.selector.register(self.requests, selectors.EVENT_READ, self.accept)
        while True:
            # A spare is made when nothing else is to be done: the run that was just asked for comes first.
            idle = len(self.spares) >= SPARES
            events = self.selector.select(self.timeout() if idle else 0)
            for key, _ in events:
                handle: Callable[[], None] = key.data
                handle()
            now = time.monotonic()
            for run in [run for run in self.running.values() if run.deadline <= now]:
                self.kill(run, "timeout")
            if not events and not idle:
                self.spares.append(self.fork())

    def timeout(self) -> float | None:
        """Return the seconds until the next deadline."""
        deadline = min((run.deadline for run in self.running.values()), default=float("inf"))
        return None if deadline == float("inf") else max(0.0, deadline - time.monotonic())

    def accept(self) -> None:
        """Hand a request to a process that stands ready."""
        message, descriptors = receive(self.requests, 4)
        if not message:
            os._exit(0)  # with the PID namespace end all that is in it
        control, rest = socket.socket(fileno=descriptors[0]), descriptors[1:]
        run = self.spares.pop(0) if self.spares else self.fork()
        run.control, run.start = control, time.monotonic()
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
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                self.become_run(theirs, parent)
            finally:
                os._exit(1)
        theirs.close()
        run = Run(pid, os.pidfd_open(pid), ours)
        self.selector.register(run.pidfd, selectors.EVENT_READ, lambda: self.reap(run))
        return run

    def become_run(self, handover: socket.socket, parent: int) -> None:
        """Wall this process in, wait for a program and run it."""
        try:
            if not self.walls.namespaces:
                die_with_parent(parent)
                os.setsid()
            self.walls.build_run(self.address_space)
            _forget_the_server(self.walls.files)
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
        # Threads that a session left running wait with it.
        signal.pidfd_send_signal(run.pidfd, signal.SIGCONT if seconds else signal.SIGSTOP)

    def kill(self, run: Run, reason: str) -> None:
        """Kill a run and, with its PID namespace, all it has started."""
        run.reason, run.deadline = run.reason or reason, float("inf")
        with contextlib.suppress(ProcessLookupError):
            if not self.walls.namespaces:
                os.killpg(run.pid, signal.SIGKILL)
            signal.pidfd_send_signal(run.pidfd, signal.SIGKILL)

    def reap(self, run: Run) -> None:
        """Report how a run ended; the first process of a PID namespace ends after all others."""
        _, status = os.waitpid(run.pid, 0)
        ms = 1e3 * (time.monotonic() - run.start)
        self.selector.unregister(run.pidfd)
        os.close(run.pidfd)
        failure = _failure(run.handover)
        run.handover.close()
        if run in self.spares:
            self.spares.remove(run)
        if not self.running.pop(run.pid, None) or run.control is None:
            return
        if not self.walls.namespaces:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(run.pid, signal.SIGKILL)
        with contextlib.suppress(KeyError):
            self.selector.unregister(run.control)
        with contextlib.suppress(OSError):  # the client has gone
            run.control.send(json.dumps({"status": status, "reason": run.reason, "ms": ms, "failure": failure}).encode())
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
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # else all runs have the server's random numbers; `random` reseeds itself


def receive(connection: socket.socket, descriptors: int) -> tuple[bytes, list[int]]:
    """Receive a message with descriptors."""
    message, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE, descriptors)
    return message, fds


def find_walls(limits: Limits, files: VisibleFiles, proc: int, without: list[str]) -> tuple[Walls, dict[str, str]]:
    """Try each layer in a process of its own; return what holds, and for each layer why it does not."""
    version = 0
    reasons = dict.fromkeys(("namespaces", "landlock", "seccomp"), "")
    with contextlib.suppress(OSError):
        version = landlock_version()
    bare = Walls(limits, files, proc, namespaces=False, landlock=0, seccomp=False)
    for name, walls in {
        "namespaces": replace(bare, namespaces=True),
        "landlock": replace(bare, landlock=version or 1),
        "seccomp": replace(bare, seccomp=True),
    }.items():
        reasons[name] = "switched off" if name in without else _failure_of(walls)
    holds = {name: not reason for name, reason in reasons.items()}
    return replace(bare, **{**holds, "landlock": version if holds["landlock"] else 0}), reasons


def _failure_of(walls: Walls) -> str:
    """Return why walls cannot be built around a run, empty if they can."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            walls.build_server()
            if os.fork() == 0:
                walls.build_run(1 << 40)
            else:
                os.wait()
        except BaseException as error:
            os.write(write_end, f"{error}"[:500].encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as file:
        reason = file.read().decode("utf-8", "replace")
    os.waitpid(pid, 0)
    return reason


def _may_drop_root(files: VisibleFiles) -> bool:
    """Return whether nobody could still read the interpreter, which without namespaces keeps its place."""
    pid = os.fork()
    if pid == 0:
        drop_root()
        os._exit(0 if all(os.access(path, os.R_OK) for path in files.paths) else 1)
    return os.waitpid(pid, 0)[1] == 0


def load(packages: list[str]) -> None:
    """Load the packages that programs find ready."""
    for name in (*packages, *(_READY if "numpy" in packages else ()), *_STANDARD):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # keeps the collector from writing to pages that the runs share


def main(descriptor: int, options: dict[str, Any]) -> None:
    """Report what holds on this machine, enter the jail, load the packages, and serve."""
    requests = socket.socket(fileno=descriptor)
    os.environ.pop("PYTHONPATH", None)
    try:
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        files = find_visible_files(options["packages"])
        walls, reasons = find_walls(Limits(**options["limits"]), files, proc, options["without"])
        reasons["uid"] = "" if walls.namespaces or os.geteuid() or _may_drop_root(files) else "unreadable"
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
        space = _address_space(proc)
        own = os.open("self/ns/pid", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        requests.send(json.dumps({"ready": True}).encode())
    except Exception as error:
        requests.send(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}).encode())
        os._exit(1)
    Server(requests, walls, space, own).serve()


def _address_space(proc: int) -> int:
    with open(os.open("self/statm", os.O_RDONLY, dir_fd=proc), "rb") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
