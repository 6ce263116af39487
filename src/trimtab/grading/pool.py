"""The client side of the grading workers: send calls to a fork server from any thread of any process.

There is one server process per function and per calling process. It is started at the first call and stopped at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from trimtab.grading.rule_output import set_file, worker_output
from trimtab.own_parts import module_folders
from trimtab.process import unheeded_in_children
from trimtab.worker_process import package_path, write_all

START_SECONDS = 60.0  # to load the function
GRACE_SECONDS = 10.0  # beyond all limits, before a server is killed

# not_loaded: there is no such function, or its module cannot be imported
WorkerOutcome = Literal["done", "too_costly", "crashed", "not_loaded"]


@dataclass(frozen=True)
class WorkerLimits:
    """What a call may take: wall-clock seconds from its start, CPU seconds, and bytes beyond what the server has.

    Seconds in which it could run but other processes had the CPU are not counted (up to half a minute of them).
    `result` is the number of bytes that its result may have as JSON.
    """

    seconds: float = 1.5
    cpu_seconds: float = 1.0
    memory: int = 256 << 20
    result: int = 65_536


LIMITS = WorkerLimits()


@dataclass(frozen=True)
class WorkerCall:
    """A call `function(*arguments, **keywords)` for a worker; `extracted` is the answer that it grades."""

    function: str
    arguments: tuple[Any, ...]
    extracted: str | None = None
    limits: WorkerLimits = LIMITS
    keywords: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerResult:
    """The outcome of a call: its value, or an error with a traceback, and the wall-clock seconds it ran.

    `limit` is what a costly call exceeded: time, memory, recursion, result (its length); or signal, where it crashed.
    `gone`: the worker has ended, and a session with it.
    """

    outcome: WorkerOutcome
    value: Any = None
    error: str = ""
    traceback: str = ""
    seconds: float = 0.0
    limit: str = ""
    gone: bool = False


class ForkServerClient:
    """The server process of one function, and the thread that reads its results."""

    def __init__(self, function: str) -> None:
        self.lock = threading.Lock()
        self.futures: dict[int, Future[WorkerResult]] = {}
        self.count = 0
        self.error = ""
        self.outcome: WorkerOutcome = "crashed"  # of every call, once there is an error
        self.write_lock = threading.Lock()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(package_path()), "OMP_NUM_THREADS": "1"}
        # -P: without it `python -m` looks for every module in the current folder first, and a `sympy.py` that came
        # with downloaded data would run.
        # `subprocess` and not `multiprocessing`: daemonic processes may use it, and it copies none of this process's
        # memory, threads and CUDA state.
        command, pipe = [sys.executable, "-P", "-m", "trimtab.grading.fork_server", function], subprocess.PIPE
        with unheeded_in_children(), worker_output() as output:  # the step under way still needs its verdicts
            errors = output if is_users(function) else subprocess.DEVNULL
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, env=environment)
        # Plain descriptors, because a forked child must be able to close them: a file object may be locked there.
        self.pipes = [_plain_descriptor(self.process.stdin), _plain_descriptor(self.process.stdout)]
        self.write(search_path(function))
        self.thread = threading.Thread(target=self.read_results, name="trimtab-rewards", daemon=True)
        self.thread.start()

    def submit(
        self,
        arguments: tuple[Any, ...],
        limits: WorkerLimits,
        keywords: Mapping[str, Any],
        session: Mapping[str, Any] | None = None,
    ) -> Future[WorkerResult]:
        """Send a call; `session` has the number of its session, and whether it is the first (`opens`)."""
        future: Future[WorkerResult] = Future()
        with self.lock:
            self.count += 1
            call = {"id": self.count, "arguments": arguments, "keywords": keywords, **asdict(limits)}
            message = {**call, **(session or {})}
            if self.error:  # the reading thread has ended
                future.set_result(WorkerResult(self.outcome, error=self.error, gone=True))
                return future
            self.futures[self.count] = future
        try:
            self.write(message)
        except OSError:
            self.fail("the worker is gone")
        return future

    def write(self, message: object) -> None:
        """Write a line to the server; several threads may call this."""
        with self.write_lock:
            write_all(self.pipes[0], json.dumps(message).encode() + b"\n")

    def read_results(self) -> None:
        """Resolve futures until the server ends; runs in a thread."""
        unread = b""
        while chunk := os.read(self.pipes[1], 1 << 16):
            *lines, unread = (unread + chunk).split(b"\n")
            for message in map(json.loads, lines):
                if "ready" in message:
                    if not message["ready"]:
                        self.outcome = "not_loaded"
                        self.fail(message["error"])
                    continue
                with self.lock:
                    future = self.futures.pop(message.pop("id"), None)
                if future is not None:
                    future.set_result(WorkerResult(**message))
        self.fail(self.error or "the worker ended")

    def fail(self, error: str) -> None:
        """Resolve every pending call with the error."""
        with self.lock:
            self.error = error
            futures, self.futures = self.futures, {}
        for future in futures.values():
            future.set_result(WorkerResult(self.outcome, error=error, gone=True))

    def close(self) -> None:
        """Stop the process and wait for it."""
        os.close(self.pipes[0])
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.thread.join(2)
        os.close(self.pipes[1])


def is_users(function: str) -> bool:
    """Return whether a worker's function is the user's, or is given a part of the user's."""
    return not function.startswith("trimtab.") or "@" in function


def search_path(function: str) -> list[str]:
    """Return the folders that the server adds to the end of its `sys.path`: this process's, without the current one.

    A function of the user's own may also lie beside the recipe or in the current folder, which are the last.
    """
    own = module_folders() if is_users(function) else []
    try:
        here = os.getcwd()
    except FileNotFoundError:  # it has been deleted, and relative entries lead nowhere
        return [*(folder for folder in sys.path if os.path.isabs(folder)), *own]
    return [*(folder for folder in map(os.path.abspath, sys.path) if folder != here), *own]


_clients: dict[str, ForkServerClient] = {}
_lock = threading.Lock()


def submit_call(
    function: str, arguments: tuple[Any, ...], limits: WorkerLimits = LIMITS, keywords: Mapping[str, Any] | None = None
) -> Future[WorkerResult]:
    """Have a worker call `package.module:function`. The future always gets a result, and never an exception."""
    return client(function).submit(arguments, limits, keywords or {})


def client(function: str) -> ForkServerClient:
    """Return this process's client for a function; a new one where the last has ended."""
    with _lock:
        known = _clients.get(function)
        if known is not None and known.process.poll() is None and not known.error:
            return known
        if known is not None:
            known.close()
        _clients[function] = ForkServerClient(function)
        return _clients[function]


def wait(future: Future[WorkerResult], function: str, seconds: float = 0.0) -> WorkerResult:
    """Return the result of a call; a server that does not answer far beyond its limits is killed."""
    try:
        return future.result(START_SECONDS + GRACE_SECONDS + seconds)
    except TimeoutError:
        client(function).process.kill()
        return WorkerResult("crashed", error="the worker did not answer", gone=True)


def call_worker(
    function: str, arguments: tuple[Any, ...], limits: WorkerLimits, keywords: Mapping[str, Any] | None = None
) -> WorkerResult:
    """Have a worker call `package.module:function`, and return its result."""
    return wait(submit_call(function, arguments, limits, keywords), function, limits.seconds)


class WorkerSession:
    """A worker of its own for the calls of one object: `function()` makes it there, at the first call of a method.

    For one call at a time. Once a result is `gone`, so are the worker and the object: further results say so.
    """

    _numbers = itertools.count()

    def __init__(self, function: str) -> None:
        self.function, self.number, self.opened = function, next(self._numbers), False

    def call(self, method: str, arguments: tuple[Any, ...], limits: WorkerLimits) -> WorkerResult:
        """Call a method and return its result; the memory is limited by the first call's limits."""
        session = {"session": self.number, "opens": not self.opened}
        self.opened = True
        future = client(self.function).submit((method, *arguments), limits, {}, session)
        return wait(future, self.function, limits.seconds)

    def close(self) -> None:
        """End the worker."""
        with _lock:
            known = _clients.get(self.function)
        if self.opened and known is not None and not known.error:
            with contextlib.suppress(OSError):  # the server has ended, and the worker with it
                known.write({"close": self.number})


def start_worker(function: str) -> None:
    """Start the server of a function before it is needed, without waiting for it."""
    client(function)


def close() -> None:
    """Stop this process's servers; new ones are started when they are needed."""
    with _lock:
        for known in _clients.values():
            known.close()
        _clients.clear()


def keep_output(path: Path | None) -> None:
    """Append to a file what users' rules and tools print, here and in workers; None: to standard error again."""
    if not set_file(path):
        return
    with _lock:  # a server keeps the file that it was started with
        for function in [each for each in _clients if is_users(each)]:
            _clients.pop(function).close()


def _reset_after_fork() -> None:
    """Drop the clients in a forked child: the servers, and the threads that read from them, are the parent's."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    for known in _clients.values():
        for pipe in known.pipes:
            os.close(pipe)
        known.process.returncode = 0  # so that Popen does not wait for a process that is not ours
    _clients.clear()


def _plain_descriptor(pipe: IO[bytes] | None) -> int:
    assert pipe is not None
    with pipe:
        return os.dup(pipe.fileno())


os.register_at_fork(after_in_child=_reset_after_fork)
atexit.register(close)
