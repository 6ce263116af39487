"""Asking a worker process, from any thread of any process: jobs go out, results come back, and nothing can hang.

There is one worker process per function and per process that asks, started when it is first needed (by `subprocess`, so
that daemonic processes may, and nothing of this process, its threads and CUDA state, is copied) and stopped at exit.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import IO, Any, Literal

START_SECONDS = 60.0  # to load the function
PATIENCE = 10.0  # beyond all limits, before a worker is given up

Outcome = Literal["done", "too_costly", "crashed", "not_loaded"]


@dataclass(frozen=True)
class Limits:
    """What a job may take: seconds from its start, seconds of processor time, and bytes beyond what the worker has."""

    seconds: float = 1.5
    processor: float = 1.0
    memory: int = 256 << 20


@dataclass(frozen=True)
class Result:
    """What became of a job: its value, or why there is none, and how long it was worked on.

    `not_loaded`: there is no such function, or its module cannot be imported.
    """

    outcome: Outcome
    value: Any = None
    error: str = ""
    seconds: float = 0.0


class Worker:
    """The process for one function, and the thread that listens to it."""

    def __init__(self, function: str) -> None:
        self.function = function
        self.lock = threading.Lock()
        self.futures: dict[int, Future[Result]] = {}
        self.count = 0
        self.error = ""
        self.outcome: Outcome = "crashed"  # of all jobs, once there is an error
        self.writing = threading.Lock()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_own_path()), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trimtab.rewards.worker", function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        # Plain descriptors, because a forked child must be able to close them: a file object may be locked there.
        self.pipes = [_plain(self.process.stdin), _plain(self.process.stdout)]
        self.write(sys.path)
        self.thread = threading.Thread(target=self.listen, name="trimtab-rewards", daemon=True)
        self.thread.start()

    @property
    def alive(self) -> bool:
        """Whether it can take jobs."""
        return self.process.poll() is None and not self.error

    def submit(self, arguments: tuple[Any, ...], limits: Limits) -> Future[Result]:
        """Send a job."""
        future: Future[Result] = Future()
        with self.lock:
            self.count += 1
            job = {"id": self.count, "arguments": arguments, **asdict(limits)}
            if self.error:  # nobody would ever answer
                future.set_result(Result(self.outcome, error=self.error))
                return future
            self.futures[self.count] = future
        try:
            self.write(job)
        except OSError:
            self.fail("the worker is gone")
        return future

    def write(self, message: object) -> None:
        """A line to the worker; several threads may call this."""
        line = json.dumps(message).encode() + b"\n"
        with self.writing:
            while line:
                line = line[os.write(self.pipes[0], line) :]

    def listen(self) -> None:
        """In a thread: hand out results until the worker ends."""
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
                    future.set_result(Result(**message))
        self.fail(self.error or "the worker ended")

    def fail(self, error: str) -> None:
        """All that is under way has crashed."""
        with self.lock:
            self.error = error
            futures, self.futures = self.futures, {}
        for future in futures.values():
            future.set_result(Result(self.outcome, error=error))

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


LIMITS = Limits()
_workers: dict[str, Worker] = {}
_lock = threading.Lock()


def ask(function: str, arguments: tuple[Any, ...], limits: Limits = LIMITS) -> Future[Result]:
    """Have a worker call `package.module:function`. The future always gets a result, and never an exception."""
    return worker(function).submit(arguments, limits)


def worker(function: str) -> Worker:
    """This process's worker for a function; a new one where the last has ended."""
    with _lock:
        known = _workers.get(function)
        if known is None or not known.alive:
            if known is not None:
                known.close()
            known = _workers[function] = Worker(function)
        return known


def wait(future: Future[Result], function: str) -> Result:
    """The result of a job. A worker that says nothing far beyond its limits is ended, and the job has crashed."""
    try:
        return future.result(START_SECONDS + PATIENCE)
    except TimeoutError:
        broken = worker(function)
        broken.process.kill()
        return Result("crashed", error="the worker did not answer")


def close() -> None:
    """Stop this process's workers; new ones are started when they are needed."""
    with _lock:
        for known in _workers.values():
            known.close()
        _workers.clear()


def _forget() -> None:
    """In a forked child: the workers are the parent's, and so are the threads that listen to them."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    for known in _workers.values():
        for pipe in known.pipes:
            os.close(pipe)
        known.process.returncode = 0  # not ours to wait for
    _workers.clear()


def _plain(pipe: IO[bytes] | None) -> int:
    """A descriptor of our own for a pipe, instead of the file object."""
    assert pipe is not None
    with pipe:
        return os.dup(pipe.fileno())


def _own_path() -> list[str]:
    """Where the worker finds trimtab, installed or not."""
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return [here, *filter(None, [os.environ.get("PYTHONPATH")])]


os.register_at_fork(after_in_child=_forget)
atexit.register(close)
