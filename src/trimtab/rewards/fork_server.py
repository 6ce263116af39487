"""The fork server of a grading function: `python -P -m trimtab.rewards.fork_server MODULE:FUNCTION`.

It loads the function once and forks a worker for every call that arrives, one JSON line each. A worker has limits on
wall-clock time, CPU time and memory, and is killed when it exceeds them. Nothing survives a call, so no answer can
affect the next verdict. The server itself computes nothing, so it cannot hang; it ends when its parent closes the pipe
or dies.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import importlib
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trimtab.own_parts import PREFIX, OwnPartError, load_part
from trimtab.rewards.python_rule import own_traceback
from trimtab.rewards.verdicts import plain_result
from trimtab.worker_process import die_with_parent, limit_memory, write_all

MAX_WORKERS = 40
# Workers start at normal priority and are reniced after BOOST_CPU_SECONDS, so that a short call is never held up by
# long ones. A worker counts as new until then, and only so many new ones run at once: most calls need no more.
MAX_NEW_WORKERS = 4 * (os.cpu_count() or 1)
NEW_SECONDS = 0.25  # a worker is new for at most so long
BOOST_CPU_SECONDS = 0.06
EXIT_OUT_OF_TIME = 3
MAX_LOAD_SECONDS = 600

Function = Callable[..., Any]


@dataclass
class RunningCall:
    """A call and the worker process that runs it."""

    id: int
    pid: int
    pipe: int
    start: float
    deadline: float
    max_result: int
    output: bytearray = field(default_factory=bytearray)


def main(path: str) -> None:
    """Load the function, report it, and serve calls until the parent is gone."""
    results = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whatever the function prints must not reach the results
    first, unread = _first_line()
    # The end of input is not seen while a module loads. SIGALRM ends a server that hangs there after its parent died.
    signal.alarm(MAX_LOAD_SECONDS)
    try:
        sys.path += [folder for folder in json.loads(first) if folder not in sys.path]
        function = load(path)
    except OwnPartError as error:
        _send(results, {"ready": False, "error": str(error).removeprefix(f"{PREFIX}{path}: ")[:500]})
        return
    except BaseException as error:
        _send(results, {"ready": False, "error": f"{type(error).__name__}: {error}"[:500]})
        return
    signal.alarm(0)
    gc.collect()
    gc.freeze()  # keeps the collector from writing to pages that the workers share
    _send(results, {"ready": True})
    ForkServer(function, results, unread).run()


def _first_line() -> tuple[bytes, bytes]:
    """Return the first line of input, and what was read beyond it."""
    read = b""
    while b"\n" not in read and (chunk := os.read(0, 1 << 16)):
        read += chunk
    line, _, rest = read.partition(b"\n")
    return line, rest


def load(path: str) -> Function:
    """Import the function at `package.module:name`; call its module's `warm_up()` where a module of ours has one."""
    module_name, _, name = path.partition(":")
    if not module_name.startswith("trimtab."):
        return load_part(f"{PREFIX}{path}")
    module = importlib.import_module(module_name)
    function: Function = getattr(module, name)
    if hasattr(module, "warm_up"):
        module.warm_up()
    return function


class ForkServer:
    """An event loop that reads calls, forks workers, and reports their results."""

    def __init__(self, function: Function, results: int, unread: bytes = b"") -> None:
        self.function = function
        self.results = results
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ)
        self.running: dict[int, RunningCall] = {}  # by pipe
        self.waiting: list[tuple[int, int, dict[str, Any]]] = []  # a heap, shortest message first
        self.unread = bytearray(unread)

    def run(self) -> None:
        """Serve until standard input ends."""
        os.set_blocking(0, False)
        self.enqueue(b"")
        while True:
            for key, _ in self.selector.select(self.timeout()):
                if key.fd != 0:
                    self.read_output(self.running[key.fd])
                elif not self.read_calls():
                    for call in self.running.values():
                        os.kill(call.pid, signal.SIGKILL)
                    return
            now = time.monotonic()
            for call in [call for call in self.running.values() if call.deadline <= now]:
                self.finish(call, {"outcome": "too_costly"})
            self.start_waiting()

    def timeout(self) -> float | None:
        """Return the seconds until a deadline, or until a new worker turns old and a waiting call can start."""
        now = time.monotonic()
        due = [call.deadline for call in self.running.values()]
        if self.waiting:
            due += [old for call in self.running.values() if (old := call.start + NEW_SECONDS) > now]
        return max(0.0, min(due) - now) if due else None

    def start_waiting(self) -> None:
        """Fork workers for waiting calls, the shortest first, as many as may run at once."""
        now = time.monotonic()
        while self.waiting and len(self.running) < MAX_WORKERS:
            if sum(_is_new(call, now) for call in self.running.values()) >= MAX_NEW_WORKERS:
                return
            self.start(heapq.heappop(self.waiting)[2])

    def read_calls(self) -> bool:
        """Read what has arrived; return False at the end of input."""
        try:
            chunk = os.read(0, 1 << 20)
        except BlockingIOError:
            return True
        self.enqueue(chunk)
        return bool(chunk)

    def enqueue(self, chunk: bytes) -> None:
        """Queue the calls of whole lines and start what may start."""
        self.unread += chunk
        *lines, rest = self.unread.split(b"\n")
        self.unread = bytearray(rest)
        for line in lines:
            message = json.loads(line)
            heapq.heappush(self.waiting, (len(line), message["id"], message))
        self.start_waiting()

    def start(self, message: dict[str, Any]) -> None:
        """Fork a worker for a call."""
        read_end, write_end = os.pipe()
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                os.close(read_end)
                die_with_parent(server)
                _run_call(self.function, message, write_end)
            finally:
                os._exit(1)
        os.close(write_end)
        os.set_blocking(read_end, False)
        now = time.monotonic()
        deadline, max_result = now + message["seconds"], message["result"]
        self.running[read_end] = RunningCall(message["id"], pid, read_end, now, deadline, max_result)
        self.selector.register(read_end, selectors.EVENT_READ)

    def read_output(self, call: RunningCall) -> None:
        """Read a worker's output; at its end the call is finished."""
        chunk = os.read(call.pipe, 1 << 16)
        call.output += chunk
        if len(call.output) > call.max_result:
            self.finish(call, {"outcome": "too_costly", "error": "the result is too long"})
            return
        if chunk:
            return
        try:
            result = json.loads(call.output)
        except ValueError:
            result = {"outcome": _outcome_without_result(call.pid), "error": "the worker wrote no result"}
        self.finish(call, result)

    def finish(self, call: RunningCall, result: dict[str, Any]) -> None:
        """Kill the worker process, reap it, and report the result."""
        self.selector.unregister(call.pipe)
        os.close(call.pipe)
        del self.running[call.pipe]
        with contextlib.suppress(ChildProcessError, ProcessLookupError):  # already reaped
            os.kill(call.pid, signal.SIGKILL)
            os.waitpid(call.pid, 0)
        _send(self.results, {"id": call.id, "seconds": time.monotonic() - call.start, **result})


def _is_new(call: RunningCall, now: float) -> bool:
    """Return whether a worker still runs at normal priority, by the clock and by its CPU time."""
    if now > call.start + NEW_SECONDS:
        return False
    try:
        with open(f"/proc/{call.pid}/stat", "rb") as file:
            ticks = file.read().rpartition(b")")[2].split()[11:13]
    except (OSError, IndexError):
        return True
    return sum(map(int, ticks)) <= BOOST_CPU_SECONDS * os.sysconf("SC_CLK_TCK")


def _outcome_without_result(pid: int) -> str:
    """Return the outcome of a worker that ended without a result: killed by a limit, or crashed."""
    for _ in range(40):  # its pipe closes a moment before it can be waited for
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            limited = os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == EXIT_OUT_OF_TIME
            return "too_costly" if limited else "crashed"
        time.sleep(0.005)
    return "crashed"


def _run_call(function: Function, message: dict[str, Any], pipe: int) -> None:
    """Set limits, call the function and write the result; runs in the forked worker."""
    os.dup2(1, 0)
    os.closerange(3, pipe)
    os.closerange(pipe + 1, pipe + 2 * MAX_WORKERS)
    _set_limits(message["memory"], message["cpu_seconds"])
    try:
        value = function(*message["arguments"], **message["keywords"])
        try:
            output = json.dumps({"outcome": "done", "value": value}, default=plain_result)
        except (TypeError, ValueError) as error:  # the function's own errors have a traceback, this has none
            output = json.dumps({"outcome": "crashed", "error": str(error)[:500]})
    except (MemoryError, RecursionError):
        output = '{"outcome": "too_costly"}'
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"[:500]
        output = json.dumps({"outcome": "crashed", "error": text, "traceback": own_traceback(error)})
    write_all(pipe, output.encode())
    os._exit(0)


def _set_limits(memory: int, cpu_seconds: float) -> None:
    """Limit memory and CPU time; after `BOOST_CPU_SECONDS` lower the priority, after `cpu_seconds` exit."""
    import resource

    def lower_priority(*_: object) -> None:
        os.nice(10)
        signal.signal(signal.SIGVTALRM, lambda *_: os._exit(EXIT_OUT_OF_TIME))
        signal.setitimer(signal.ITIMER_VIRTUAL, max(cpu_seconds - BOOST_CPU_SECONDS, 0.01))

    limit_memory(memory)
    # A second limit for code that never returns to the interpreter, where no signal handler runs.
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_seconds) + 1, int(cpu_seconds) + 2))
    signal.signal(signal.SIGVTALRM, lower_priority)
    signal.setitimer(signal.ITIMER_VIRTUAL, BOOST_CPU_SECONDS)
    sys.setrecursionlimit(2_000)


def _send(pipe: int, message: dict[str, Any]) -> None:
    try:
        write_all(pipe, json.dumps(message).encode() + b"\n")
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
