"""Calls of functions in worker processes, within limits, from any thread of any process.

There is one server (`call_server`) per function and per calling process. It is started at the first call and stopped
at exit. A function is `package.module:name` of trimtab's own; `package.module:name@PART` gets a part of the user's own
as its first argument.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from trimtab.own_parts import module_folders
from trimtab.workers.server_process import ServerProcess, package_path

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


class CallClient(ServerProcess):
    """The server process of one function, and the thread that reads its results."""

    def __init__(self, function: str) -> None:
        self.lock, self.send_lock = threading.Lock(), threading.Lock()
        self.futures: dict[int, Future[WorkerResult]] = {}
        self.numbers = itertools.count()
        self.error = ""
        self.outcome: WorkerOutcome = "crashed"  # of every call, once there is an error
        environment = {**os.environ, "PYTHONPATH": package_path(), "OMP_NUM_THREADS": "1"}
        with open(_printed[0], "ab") if _printed else contextlib.nullcontext() as printed:
            output = printed if is_users(function) else subprocess.DEVNULL  # None: standard error
            super().__init__(
                "trimtab.workers.call_server", [function, json.dumps(search_path(function))], socket.SOCK_STREAM,
                stdout=output, stderr=output, env=environment,
            )  # fmt: skip
        self.thread = threading.Thread(target=self.read_results, name="trimtab-workers", daemon=True)
        self.thread.start()

    def submit(
        self, arguments: tuple[Any, ...], limits: WorkerLimits, keywords: Mapping[str, Any], **session: Any
    ) -> Future[WorkerResult]:
        """Send a call; `session` is the number of its session, and whether it is the first there (`opens`)."""
        future: Future[WorkerResult] = Future()
        with self.lock:
            number = next(self.numbers)
            if self.error:  # the reading thread has ended
                future.set_result(WorkerResult(self.outcome, error=self.error, gone=True))
                return future
            self.futures[number] = future
        self.send({"id": number, "arguments": arguments, "keywords": keywords, **asdict(limits), **session})
        return future

    def send(self, message: object) -> None:
        """Send a message to the server; several threads may call this."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self.send_lock:
                self.requests.sendall(data)
        except OSError:
            self.fail("the worker is gone")

    def read_results(self) -> None:
        """Resolve futures until the server ends; runs in a thread."""
        # A server that was killed with a call unread resets the connection.
        with contextlib.suppress(ConnectionError), self.requests.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                if "id" not in message:  # the function cannot be loaded
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

    def stop(self) -> None:
        """End the server, and wait until each pending call has a result."""
        self.close()
        self.thread.join(2)


def is_users(function: str) -> bool:
    """Return whether a worker's function is given a part of the user's."""
    return "@" in function


def search_path(function: str) -> list[str]:
    """Return the folders that the server adds to the end of its `sys.path`: this process's, without the current one.

    A part of the user's own may also lie beside the recipe or in the current folder, which are the last.
    """
    own = module_folders() if is_users(function) else []
    try:
        here = os.getcwd()
    except FileNotFoundError:  # it has been deleted, and relative entries lead nowhere
        return [*(folder for folder in sys.path if os.path.isabs(folder)), *own]
    return [*(folder for folder in map(os.path.abspath, sys.path) if folder != here), *own]


_printed: list[Path] = []  # the file that takes prints, if a run has named one
_clients: dict[str, CallClient] = {}
_lock = threading.Lock()


def client(function: str) -> CallClient:
    """Return this process's client for a function; a new one if the last has ended."""
    with _lock:
        known = _clients.get(function)
        if known is not None and known.usable and not known.error:
            return known
        if known is not None:
            known.stop()
        _clients[function] = CallClient(function)
        return _clients[function]


def start_worker(function: str) -> None:
    """Start the server of a function before it is needed, without waiting for it."""
    client(function)


def stop_worker(function: str) -> None:
    """End the server of a function, and with it all its workers; a new one is started when it is needed."""
    with _lock:
        known = _clients.pop(function, None)
    if known is not None:
        known.stop()


def submit_call(
    function: str,
    arguments: tuple[Any, ...],
    limits: WorkerLimits = LIMITS,
    keywords: Mapping[str, Any] | None = None,
) -> Future[WorkerResult]:
    """Have a worker call a function. The future always gets a result, and never an exception."""
    return client(function).submit(arguments, limits, keywords or {})


def result_of(future: Future[WorkerResult], function: str, seconds: float = 0.0) -> WorkerResult:
    """Return the result of a call; a server that does not answer far beyond its limits is killed."""
    try:
        return future.result(START_SECONDS + GRACE_SECONDS + seconds)
    except TimeoutError:
        client(function).process.kill()
        return WorkerResult("crashed", error="the worker did not answer", gone=True)


def call_worker(function: str, arguments: tuple[Any, ...], limits: WorkerLimits) -> WorkerResult:
    """Have a worker call a function, and return its result."""
    return result_of(submit_call(function, arguments, limits), function, limits.seconds)


class WorkerSession:
    """One worker for all calls of one object: `function()` makes it there, at the first call of a method.

    For one call at a time. Once a result is `gone`, so are the worker and the object: further results say so.
    """

    _numbers = itertools.count()

    def __init__(self, function: str) -> None:
        self.function, self.number, self.opened = function, next(self._numbers), False

    def call(self, method: str, arguments: tuple[Any, ...], limits: WorkerLimits) -> WorkerResult:
        """Call a method and return its result; the memory is limited by the first call's limits."""
        opens, self.opened = not self.opened, True
        future = client(self.function).submit((method, *arguments), limits, {}, session=self.number, opens=opens)
        return result_of(future, self.function, limits.seconds)

    def close(self) -> None:
        """End the worker."""
        with _lock:
            known = _clients.get(self.function)
        if self.opened and known is not None and not known.error:
            known.send({"close": self.number})


def close() -> None:
    """Stop this process's servers; new ones are started when they are needed."""
    with _lock:
        for known in _clients.values():
            known.stop()
        _clients.clear()


def keep_output(path: Path | None) -> None:
    """Append to a file what users' rules and tools print, here and in workers; None: to standard error again.

    Standard output may be a live display or a stream of verdicts, which it would garble.
    """
    if path is not None and path.exists() and not path.is_file():  # opening a named pipe would block
        raise ValueError(f"{path} is not a regular file: remove it")
    before, _printed[:] = _printed.copy(), [] if path is None else [path]
    if _printed == before:
        return
    with _lock:  # a server keeps the file that it was started with
        for function in [each for each in _clients if is_users(each)]:
            _clients.pop(function).stop()


@contextlib.contextmanager
def redirected() -> Iterator[None]:
    """Send what this process prints in the block where the workers' prints go."""
    if not _printed:
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    with (
        open(_printed[0], "a", encoding="utf-8", errors="backslashreplace") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        yield


def _forget_clients() -> None:
    """Forget the clients in a forked child: the servers, and the threads that read from them, are the parent's."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _clients.clear()


os.register_at_fork(after_in_child=_forget_clients)
