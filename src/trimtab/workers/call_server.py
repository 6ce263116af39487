"""The fork server of a function: `python -P -m trimtab.workers.call_server SOCKET FUNCTION FOLDERS`.

It loads the function once and forks a worker for every call that arrives, one JSON line each. A worker has limits on
wall-clock time, CPU time and memory, and is killed when it exceeds them. Nothing survives a call, so no answer can
affect the next verdict.

A call may name a session: then the function (a class) is called once, in a worker that stays for the further calls of
this session, each of a method and with its own deadline.

A module whose calls wait for something else most of the time says so by `MOSTLY_WAITS = True`: they all start at once.
"""

from __future__ import annotations

import contextlib
import heapq
import importlib
import json
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from trimtab.own_parts import OwnPartError, load_part, own_traceback
from trimtab.workers.jail import confine
from trimtab.workers.linux import adopt_orphans, close_from, kill_descendants, limit_memory
from trimtab.workers.supervisor import Child, Supervisor, freeze_memory

MAX_WORKERS = 40
# Only so many workers at normal priority run at once (see `BOOST_CPU_SECONDS`): most calls need no more.
MAX_NEW_WORKERS = 4 * (os.cpu_count() or 1)
# Workers start at normal priority and are reniced after so much CPU time, so that a short call is never held up by long
# ones.
BOOST_CPU_SECONDS = 0.06
NEW_SECONDS = 0.25  # a worker is new for at most so long
MAX_QUEUED_SECONDS = 30.0  # that a worker without a CPU is forgiven
MAX_LOAD_SECONDS = 600
MAX_FILES = 65_536  # open in the server: each of a thousand sessions has a socket
EXIT_OUT_OF_TIME = 97
CHANNEL = 3  # a worker's descriptor for calls and results
# What a process does to itself: by a bug of the libraries that the answer led into.
OWN_SIGNALS = frozenset(
    (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP)
)

Message = dict[str, Any]
Function = Callable[..., Any]
Plain = Callable[[Any], Any] | None  # makes what JSON can hold of a value that it cannot


@dataclass
class Worker(Child):
    """A worker process and the call that it runs; that of a session waits for its next call without a deadline."""

    channel: socket.socket
    message: Message
    output: bytearray = field(default_factory=bytearray)
    earlier: tuple[float, float] = (0.0, 0.0)  # seconds on and waiting for a CPU in earlier calls of the session

    @property
    def session(self) -> int | None:
        """The number of its session, if it has one."""
        return self.message.get("session")

    def begin(self, message: Message) -> None:
        """Note the next call of the session."""
        self.message, self.output, self.earlier = message, bytearray(), cpu_times(self.pid)
        self.start = time.monotonic()
        self.deadline = self.start + message["seconds"]

    def is_new(self, now: float) -> bool:
        """Return whether the worker still runs at normal priority, by the clock and by its CPU time."""
        if now > self.start + NEW_SECONDS:
            return False
        return sum(map(int, _stat(self.pid)[11:13])) <= BOOST_CPU_SECONDS * os.sysconf("SC_CLK_TCK")

    def deadline_without_queueing(self, now: float) -> float:
        """Return the deadline if the time in which the worker waited for a CPU does not count."""
        seconds: float = self.message["seconds"]
        ran, queued = (time - before for time, before in zip(cpu_times(self.pid), self.earlier, strict=True))
        latest = self.start + seconds + MAX_QUEUED_SECONDS
        # The wait that a worker is in at this moment is not in the kernel's figures: it is looked at again soon.
        if ran < seconds and _stat(self.pid)[:1] == [b"R"]:
            return min(now + 0.1, latest)
        return min(self.start + seconds + queued, latest)


class CallServer(Supervisor[Worker]):
    """Forks workers for calls, the shortest message first, and reports their results."""

    def __init__(self, requests: socket.socket, function: Function, plain: Plain, mostly_waits: bool = False) -> None:
        super().__init__(requests)
        self.function, self.plain, self.mostly_waits = function, plain, mostly_waits
        self.sessions: dict[int, Worker] = {}
        self.waiting: list[tuple[int, int, Message]] = []  # a heap
        self.unread = bytearray()

    def accept(self) -> None:
        """Read what has arrived, and queue the calls of whole lines."""
        chunk = receive(self.requests, 1 << 20)
        if not chunk:
            for worker in (*self.running.values(), *self.sessions.values()):
                self.kill(worker)
            os._exit(0)
        self.unread += chunk
        if b"\n" not in chunk:
            return
        *lines, rest = self.unread.split(b"\n")
        self.unread = rest
        for line in lines:
            message = json.loads(line)
            if "close" not in message:
                heapq.heappush(self.waiting, (len(line), message["id"], message))
            elif message["close"] in self.sessions:
                self.finish(self.sessions[message["close"]], {"outcome": "crashed", "error": "the session was closed"})

    def next_start(self) -> float:
        """Return when a new worker turns old, so that a waiting call can start."""
        now = time.monotonic()
        turns_old = (worker.start + NEW_SECONDS for worker in self.running.values() if self.waiting)
        return min((each for each in turns_old if each > now), default=math.inf)

    def start_waiting(self, now: float, idle: bool) -> None:
        """Start waiting calls, the shortest first, as many as may run at once."""
        while self.waiting and (self.mostly_waits or self.has_room(now)):
            self.start(heapq.heappop(self.waiting)[2])

    def has_room(self, now: float) -> bool:
        """Return whether another call may run beside those that do."""
        if len(self.running) >= MAX_WORKERS:
            return False
        return sum(worker.is_new(now) for worker in self.running.values()) < MAX_NEW_WORKERS

    def start(self, message: Message) -> None:
        """Fork a worker for a call, or hand the call to the worker of its session."""
        session = message.get("session")
        if session is not None and not message["opens"]:
            self.resume(message)
            return
        channel, theirs = socket.socketpair()
        with theirs:
            pid = self.fork(lambda: run_worker(self.function, self.plain, message, theirs.fileno()))
        now = time.monotonic()
        worker = Worker(pid, now, now + message["seconds"], channel, message)
        self.running[pid] = worker
        self.watch(channel.fileno(), lambda: self.read(worker))
        if session is not None:
            self.sessions[session] = worker

    def resume(self, message: Message) -> None:
        """Start the next call of a session."""
        worker = self.sessions.get(message["session"])
        if worker is None:
            self.send({"id": message["id"], "outcome": "crashed", "error": "its process is gone", "gone": True})
            return
        worker.begin(message)
        self.running[worker.pid] = worker
        with contextlib.suppress(OSError):  # it has died: the end of its output says so
            worker.channel.sendall(_line(message))

    def look(self, worker: Worker, now: float) -> None:
        """End a call whose time is over; that in which others had the CPU does not count."""
        # On a busy machine an honest call must not go unpaid because others had the CPU.
        worker.deadline = worker.deadline_without_queueing(now)
        if worker.deadline <= now:
            self.finish(worker, {"outcome": "too_costly", "limit": "time"})

    def read(self, worker: Worker) -> None:
        """Read a worker's output; with its newline or its end the call is finished."""
        chunk = receive(worker.channel, 1 << 16)
        worker.output += chunk
        if len(worker.output) > worker.message["result"]:
            self.finish(worker, {"outcome": "too_costly", "limit": "result", "error": "the result is too long"})
        elif not chunk or chunk.endswith(b"\n"):
            try:
                result = json.loads(worker.output)
            except ValueError:
                result = None
            if not isinstance(result, dict) or "outcome" not in result:
                result = None  # the function has written to its channel itself
            self.finish(worker, result, alive=bool(chunk) and worker.session is not None)

    def finish(self, worker: Worker, result: Message | None, alive: bool = False) -> None:
        """Report the result, or how the worker ended without one; kill and reap it unless it is to stay `alive`."""
        ran = self.running.pop(worker.pid, None) is not None
        told = {"id": worker.message["id"], "seconds": time.monotonic() - worker.start}
        if alive and result is not None:
            self.send(told | result)
            return
        self.unwatch(worker.channel.fileno())
        worker.channel.close()
        if worker.session is not None:
            del self.sessions[worker.session]
        status = self.reap(worker)
        if ran:  # else a session's worker ended between two calls: the next one is told
            self.send(told | (outcome_of(status) if result is None else result) | {"gone": True})

    def kill(self, worker: Worker) -> None:
        """Kill a worker and its process group; of a session, all that it has started."""
        if worker.session is not None:
            kill_descendants(worker.pid)
        super().kill(worker)

    def send(self, message: Message) -> None:
        """Send a message to the client."""
        try:
            self.requests.sendall(_line(message))
        except OSError:  # it is gone
            os._exit(0)


def outcome_of(status: int) -> Message:
    """Return the outcome of a worker that ended without a result: killed by a limit or its own error, or crashed.

    A signal from outside says nothing about the call: the kernel kills whom it likes when memory is short.
    """
    code = os.waitstatus_to_exitcode(status)
    nothing = {"error": "the worker wrote no result"}
    if code in (-signal.SIGXCPU, EXIT_OUT_OF_TIME):
        return {"outcome": "too_costly", "limit": "time", **nothing}
    if -code in OWN_SIGNALS:
        return {"outcome": "too_costly", "limit": "signal", **nothing}
    if code >= 0:
        return {"outcome": "crashed", **nothing}
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return {"outcome": "crashed", "error": f"the worker was killed from outside ({name}): is memory short?"}


def receive(connection: socket.socket, most: int) -> bytes:
    """Return what has arrived, empty if the other side has ended."""
    try:
        return connection.recv(most)
    except ConnectionError:  # it has died with something unread
        return b""


def cpu_times(pid: int) -> tuple[float, float]:
    """Return for how many seconds a process was on a CPU, and waited for one; 0 if the kernel does not tell."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            ran, queued, _ = map(int, file.read().split())
    except (OSError, ValueError):
        return 0.0, 0.0
    return ran * 1e-9, queued * 1e-9


def _stat(pid: int) -> list[bytes]:
    """Return the fields of a process from its state on; none if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def run_worker(function: Function, plain: Plain, message: Message, channel: int) -> None:
    """Set limits, call the function and write the result; in a session, go on with what is asked for next."""
    os.dup2(channel, CHANNEL)
    close_from(CHANNEL + 1)
    in_session = "session" in message
    if in_session:
        adopt_orphans()
    _set_limits(message["memory"], None if in_session else message["cpu_seconds"])
    made = cache(function)  # in a session, the object that the methods are of
    call = (lambda name, *arguments: getattr(made(), name)(*arguments)) if in_session else function
    with socket.socket(fileno=CHANNEL) as results, results.makefile("rb") as calls:
        results.sendall(_result(call, plain, message))
        for line in calls if in_session else ():
            results.sendall(_result(call, plain, json.loads(line)))
    os._exit(0)


def _result(function: Function, plain: Plain, message: Message) -> bytes:
    """Call the function and return the result as a line of JSON."""
    result: Message
    try:
        value = function(*message["arguments"], **message["keywords"])
        try:
            return _line({"outcome": "done", "value": value}, plain)
        except (TypeError, ValueError) as error:  # the function's own errors have a traceback, this has none
            result = {"outcome": "crashed", "error": str(error)[:500]}
    except (MemoryError, RecursionError) as error:
        result = {"outcome": "too_costly", "limit": "memory" if isinstance(error, MemoryError) else "recursion"}
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"[:500]
        result = {"outcome": "crashed", "error": text, "traceback": own_traceback(error)}
    return _line(result)


def _line(message: Message, plain: Plain = None) -> bytes:
    """Write out what was printed, and return a message as a line of JSON."""
    with contextlib.suppress(Exception):  # it would be lost: `_exit` writes nothing; the disk may be full
        sys.stdout.flush()
    return json.dumps(message, default=plain).encode() + b"\n"


def _set_limits(memory: int, cpu_seconds: float | None) -> None:
    """Limit memory and CPU time; after `BOOST_CPU_SECONDS` lower the priority, after `cpu_seconds` exit."""

    def lower_priority(*_: object) -> None:
        os.nice(10)
        if cpu_seconds is None:
            return
        signal.signal(signal.SIGVTALRM, lambda *_: os._exit(EXIT_OUT_OF_TIME))
        signal.setitimer(signal.ITIMER_VIRTUAL, max(cpu_seconds - BOOST_CPU_SECONDS, 0.01))

    limit_memory(memory)
    if cpu_seconds is not None:
        # A second limit for code that never returns to the interpreter, where no signal handler runs.
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_seconds) + 1, int(cpu_seconds) + 2))
    signal.signal(signal.SIGVTALRM, lower_priority)
    signal.setitimer(signal.ITIMER_VIRTUAL, BOOST_CPU_SECONDS)
    sys.setrecursionlimit(2_000)


def load(path: str) -> tuple[Function, Plain, bool]:
    """Import the function at `package.module:name`.

    Its module may have a `warm_up()`, a `plain_result(value)` and a `MOSTLY_WAITS`.
    """
    path, _, part = path.partition("@")
    module_name, _, name = path.partition(":")
    module = importlib.import_module(module_name)
    function: Function = getattr(module, name)
    if hasattr(module, "warm_up"):
        module.warm_up()
    if part:
        function = partial(function, load_part(part))
    else:
        confine()  # a part of the user's may need files and the network
    return function, getattr(module, "plain_result", None), getattr(module, "MOSTLY_WAITS", False)


def main(requests: socket.socket, path: str, folders: list[str]) -> None:
    """Load the function, or report why it cannot be loaded, and serve calls until the client is gone."""
    os.dup2(2, 1)  # what the function prints must not mix with what the client prints
    # By whole lines: several workers write to one file, and each may be killed at any time.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    # The end of the socket is not seen while a module loads. SIGALRM ends a server that hangs there after its client.
    signal.alarm(MAX_LOAD_SECONDS)
    try:
        sys.path += [folder for folder in folders if folder not in sys.path]
        loaded = load(path)
    except BaseException as error:
        text = str(error) if isinstance(error, OwnPartError) else f"{type(error).__name__}: {error}"
        requests.sendall(_line({"error": text[:500]}))
        return
    signal.alarm(0)
    freeze_memory()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    CallServer(requests, *loaded).serve()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], json.loads(sys.argv[3]))
