"""The fork server of a grading function: `python -P -m trimtab.grading.fork_server MODULE:FUNCTION`.

It loads the function once and forks a worker for every call that arrives, one JSON line each. A worker has limits on
wall-clock time, CPU time and memory, and is killed when it exceeds them. Nothing survives a call, so no answer can
affect the next verdict. The server itself computes nothing, so it cannot hang; it ends when its parent closes the pipe
or dies.

A call may name a session: then the function (a class) is called once, in a worker that stays for the further calls of
this session, each of a method and with a deadline of its own. MODULE:FUNCTION@PART hands a part of the user's own to
the function as its first argument.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import importlib
import json
import math
import os
import selectors
import signal
import sys
import time
from functools import partial
from typing import Any

from trimtab.grading.forked_worker import EXIT_OUT_OF_TIME, Function, run_call, run_session
from trimtab.grading.running_call import NEW_SECONDS, RunningCall, cpu_times
from trimtab.own_parts import PREFIX, OwnPartError, load_part
from trimtab.worker_process import die_with_parent, write_all
from trimtab.workers import confine

MAX_WORKERS = 40
# Only so many workers at normal priority run at once (see `BOOST_CPU_SECONDS`): most calls need no more.
MAX_NEW_WORKERS = 4 * (os.cpu_count() or 1)
MAX_LOAD_SECONDS = 600
# What a process does to itself: by a bug of the libraries that the answer led into.
OWN_SIGNALS = frozenset(
    (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP)
)


def main(path: str) -> None:
    """Load the function, report it, and serve calls until the parent is gone."""
    results = os.dup(1)
    os.dup2(2, 1)  # what the function prints must not reach the results
    # By whole lines: several workers write to one file, and each may be killed at any time.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
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
    _allow_descriptors()
    _send(results, {"ready": True})
    ForkServer(function, results, unread).run()


def _allow_descriptors() -> None:
    """Raise the limit on open files: each of a thousand sessions has two pipes."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _first_line() -> tuple[bytes, bytes]:
    """Return the first line of input, and what was read beyond it."""
    read = b""
    while b"\n" not in read and (chunk := os.read(0, 1 << 16)):
        read += chunk
    line, _, rest = read.partition(b"\n")
    return line, rest


def load(path: str) -> Function:
    """Import the function at `package.module:name`; call its module's `warm_up()` where a module of ours has one."""
    path, _, part = path.partition("@")
    module_name, _, name = path.partition(":")
    if not module_name.startswith("trimtab."):
        return load_part(f"{PREFIX}{path}")
    module = importlib.import_module(module_name)
    function: Function = getattr(module, name)
    if hasattr(module, "warm_up"):
        module.warm_up()
    if part:
        return partial(function, load_part(part))
    confine()  # a part of the user's may need files and the network
    return function


class ForkServer:
    """An event loop that reads calls, forks workers, and reports their results."""

    def __init__(self, function: Function, results: int, unread: bytes = b"") -> None:
        self.function = function
        self.results = results
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ)
        self.running: dict[int, RunningCall] = {}  # by pipe
        self.sessions: dict[int, RunningCall] = {}
        self.idle: dict[int, RunningCall] = {}  # workers of sessions that wait for a call, by pipe
        self.waiting: list[tuple[int, int, dict[str, Any]]] = []  # a heap, shortest message first
        self.unread = bytearray(unread)

    def run(self) -> None:
        """Serve until standard input ends."""
        os.set_blocking(0, False)
        self.enqueue(b"")
        while True:
            for key, _ in self.selector.select(self.timeout()):
                if key.fd != 0:
                    call = self.running.get(key.fd) or self.idle.get(key.fd)
                    if call is not None:  # else its session was closed by what was read a moment ago
                        self.read_output(call)
                elif not self.read_calls():
                    for call in (*self.running.values(), *self.idle.values()):
                        _kill(call.pid)
                    return
            now = time.monotonic()
            for call in [call for call in self.running.values() if call.deadline <= now]:
                # On a busy machine an honest call must not go unpaid because others had the CPU.
                later = call.deadline_without_queueing(now)
                if later > now:
                    call.deadline = later
                else:
                    self.finish(call, {"outcome": "too_costly", "limit": "time"})
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
            if sum(call.is_new(now) for call in self.running.values()) >= MAX_NEW_WORKERS:
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
            if "close" in message:
                self.close_session(message["close"])
                continue
            heapq.heappush(self.waiting, (len(line), message["id"], message))
        self.start_waiting()

    def start(self, message: dict[str, Any]) -> None:
        """Fork a worker for a call, or hand the call to the worker of its session."""
        session = message.get("session")
        if session is not None and not message["opens"]:
            self.resume(message)
            return
        read_end, write_end = os.pipe()
        calls_read, calls_write = (-1, -1) if session is None else os.pipe()
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                die_with_parent(server)
                os.setpgid(0, 0)
                if session is None:
                    run_call(self.function, message, write_end)
                else:
                    run_session(self.function, message, calls_read, write_end)
            finally:
                os._exit(1)
        with contextlib.suppress(OSError):  # also here: it may have to be killed before it has done so itself
            os.setpgid(pid, pid)
        os.close(write_end)
        os.set_blocking(read_end, False)
        now, limits = time.monotonic(), (message["seconds"], message["result"])
        call = RunningCall(message["id"], pid, read_end, now, *limits, session=session, calls=calls_write)
        self.running[read_end] = call
        self.selector.register(read_end, selectors.EVENT_READ)
        if session is not None:
            os.close(calls_read)
            self.sessions[session] = call
            self.hand_over(call, message)

    def resume(self, message: dict[str, Any]) -> None:
        """Start the next call of a session."""
        call = self.sessions.get(message["session"])
        if call is None:
            _send(
                self.results, {"id": message["id"], "outcome": "crashed", "error": "its process is gone", "gone": True}
            )
            return
        self.running[call.pipe] = self.idle.pop(call.pipe)
        call.id, call.start, call.output = message["id"], time.monotonic(), bytearray()
        call.seconds, call.earlier = message["seconds"], cpu_times(call.pid)
        call.deadline = call.start + call.seconds
        self.hand_over(call, message)

    def hand_over(self, call: RunningCall, message: dict[str, Any]) -> None:
        """Write a call to the worker of its session, which reads one whenever it is idle."""
        with contextlib.suppress(BrokenPipeError):  # it has died: the end of its output says so
            write_all(call.calls, json.dumps(message).encode() + b"\n")

    def read_output(self, call: RunningCall) -> None:
        """Read a worker's output; at its end the call is finished."""
        chunk = os.read(call.pipe, 1 << 16)
        call.output += chunk
        if len(call.output) > call.max_result:
            self.finish(call, {"outcome": "too_costly", "limit": "result", "error": "the result is too long"})
            return
        answered = call.session is not None and call.output.endswith(b"\n")
        if chunk and not answered:
            return
        try:
            result = json.loads(call.output)
        except ValueError:
            result = {"error": "the worker wrote no result", **_outcome_without_result(call.pid)}
        self.finish(call, result, alive=answered)

    def finish(self, call: RunningCall, result: dict[str, Any], alive: bool = False) -> None:
        """Report the result; kill the worker process and reap it, unless it is that of a session and `alive`."""
        seconds = time.monotonic() - call.start
        if alive:
            self.idle[call.pipe] = self.running.pop(call.pipe)
            call.deadline = math.inf
        else:
            ran = self.running.get(call.pipe) is call
            self.end_worker(call)
            if not ran:  # a session's worker ended between two calls: the next one is told
                return
            result = {**result, "gone": True}
        _send(self.results, {"id": call.id, "seconds": seconds, **result})

    def end_worker(self, call: RunningCall) -> None:
        """Kill a worker process with all that it started, and reap it."""
        self.selector.unregister(call.pipe)
        os.close(call.pipe)
        self.running.pop(call.pipe, None)
        if call.session is not None:
            os.close(call.calls)
            self.idle.pop(call.pipe, None)
            del self.sessions[call.session]
        _kill(call.pid)
        with contextlib.suppress(ChildProcessError):  # already reaped
            os.waitpid(call.pid, 0)

    def close_session(self, session: int) -> None:
        """End a session, and the call that it may be in."""
        if session in self.sessions:
            self.finish(self.sessions[session], {"outcome": "crashed", "error": "the session was closed"})


def _kill(pid: int) -> None:
    """Kill a worker and the processes that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # already reaped
        os.killpg(pid, signal.SIGKILL)


def _outcome_without_result(pid: int) -> dict[str, str]:
    """Return the outcome of a worker that ended without a result: killed by a limit or an error of its own, or crashed.

    A signal from outside says nothing about the call: the kernel kills whom it likes when memory is short.
    """
    for _ in range(40):  # its pipe closes a moment before it can be waited for
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            killer = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            if killer == signal.SIGXCPU or os.WEXITSTATUS(status) == EXIT_OUT_OF_TIME:
                return {"outcome": "too_costly", "limit": "time"}
            if killer in OWN_SIGNALS:
                return {"outcome": "too_costly", "limit": "signal"}
            if killer:
                name = signal.Signals(killer).name if killer in set(signal.Signals) else f"signal {killer}"
                return {"outcome": "crashed", "error": f"the worker was killed from outside ({name}): is memory short?"}
            return {"outcome": "crashed"}
        time.sleep(0.005)
    return {"outcome": "crashed"}


def _send(pipe: int, message: dict[str, Any]) -> None:
    try:
        write_all(pipe, json.dumps(message).encode() + b"\n")
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
