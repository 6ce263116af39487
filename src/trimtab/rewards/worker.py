"""The process that does the costly work: `python -m trimtab.rewards.worker MODULE:FUNCTION`.

It loads the function once and then forks a child for every job that comes in, one JSON line each. A child has limits on
time, processor and memory, hurries only at first (so that a short job is never held up by long ones), and is killed
when it does not come back. Nothing survives a job, so no answer can spoil the next one's verdict. This process itself
computes nothing, and so it cannot hang; it ends when its parent closes the pipe or dies.
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

MOST_AT_ONCE = 40
MOST_FRESH = 4 * (os.cpu_count() or 1)  # children that are in their first moments: most jobs need no more
FRESH = 0.25  # seconds that these last at most
HURRY = 0.06  # seconds of processor time before a child steps back behind the others
LONGEST_RESULT = 65_536
OUT_OF_TIME = 3  # a child's exit code

Function = Callable[..., Any]


@dataclass
class Child:
    """A job under way."""

    job: int
    pid: int
    pipe: int
    start: float
    deadline: float
    said: bytearray = field(default_factory=bytearray)


def main(path: str) -> None:
    """Load the function, say so, and do jobs until the parent is gone."""
    results = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whatever the function prints
    first, unread = _first_line()
    try:
        sys.path[:0] = [folder for folder in json.loads(first) if folder not in sys.path]
        function = load(path)
    except BaseException as error:
        _say(results, {"ready": False, "error": f"{type(error).__name__}: {error}"[:500]})
        return
    gc.collect()
    gc.freeze()  # children share these pages
    _say(results, {"ready": True})
    Forge(function, results, unread).run()


def _first_line() -> tuple[bytes, bytes]:
    """The first line of input, and what was read beyond it."""
    read = b""
    while b"\n" not in read and (chunk := os.read(0, 1 << 16)):
        read += chunk
    line, _, rest = read.partition(b"\n")
    return line, rest


def load(path: str) -> Function:
    """The function at `package.module:name`; the module's `prepare()`, where it has one, is called."""
    module_name, _, name = path.partition(":")
    module = importlib.import_module(module_name)
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"{path} is {type(function).__name__}, not a function")
    if module_name.startswith("trimtab.") and hasattr(module, "prepare"):
        module.prepare()
    result: Function = function
    return result


class Forge:
    """Takes jobs, forks children, and reports what became of them."""

    def __init__(self, function: Function, results: int, unread: bytes = b"") -> None:
        self.function = function
        self.results = results
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ)
        self.children: dict[int, Child] = {}
        self.waiting: list[tuple[int, int, dict[str, Any]]] = []
        self.unread = bytearray(unread)

    def run(self) -> None:
        """Until standard input ends."""
        os.set_blocking(0, False)
        self.take_in(b"")
        while True:
            for key, _ in self.selector.select(self.timeout()):
                if key.fd == 0:
                    if not self.read_jobs():
                        return self.stop()
                else:
                    self.listen(self.children[key.fd])
            now = time.monotonic()
            for child in [child for child in self.children.values() if child.deadline <= now]:
                self.finish(child, {"outcome": "too_costly"})
            self.start_waiting()

    def timeout(self) -> float | None:
        """Seconds until something is due: a child's end, or a place for the next job."""
        now = time.monotonic()
        due = [child.deadline for child in self.children.values()]
        due += [child.start + FRESH for child in self.children.values() if self.waiting and child.start + FRESH > now]
        return max(0.0, min(due) - now) if due else None

    def start_waiting(self) -> None:
        """Fork children for jobs that wait, the shortest first, as many as may run at once."""
        now = time.monotonic()
        while self.waiting and len(self.children) < MOST_AT_ONCE:
            if sum(_fresh(child, now) for child in self.children.values()) >= MOST_FRESH:
                return
            self.start(heapq.heappop(self.waiting)[2])

    def read_jobs(self) -> bool:
        """Take in what has arrived; False at the end of input."""
        try:
            chunk = os.read(0, 1 << 20)
        except BlockingIOError:
            return True
        self.take_in(chunk)
        return bool(chunk)

    def take_in(self, chunk: bytes) -> None:
        """Jobs from what was read, and children for them."""
        self.unread += chunk
        *lines, rest = self.unread.split(b"\n")
        self.unread = bytearray(rest)
        for line in lines:
            job = json.loads(line)
            heapq.heappush(self.waiting, (len(line), job["id"], job))
        self.start_waiting()

    def start(self, job: dict[str, Any]) -> None:
        """Fork a child for a job."""
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(read_end)
                _work(self.function, job, write_end)
            finally:
                os._exit(1)
        os.close(write_end)
        os.set_blocking(read_end, False)
        now = time.monotonic()
        child = Child(job["id"], pid, read_end, now, now + job["seconds"])
        self.children[read_end] = child
        self.selector.register(read_end, selectors.EVENT_READ)

    def listen(self, child: Child) -> None:
        """Read what a child says; when it has said all, it is done."""
        chunk = os.read(child.pipe, LONGEST_RESULT)
        child.said += chunk
        if chunk and len(child.said) <= LONGEST_RESULT:
            return
        try:
            said = json.loads(child.said)
        except ValueError:
            said = {"outcome": _why(child.pid), "error": "the worker's child said nothing"}
        self.finish(child, said)

    def finish(self, child: Child, result: dict[str, Any]) -> None:
        """Bury a child and report."""
        self.selector.unregister(child.pipe)
        os.close(child.pipe)
        del self.children[child.pipe]
        with contextlib.suppress(ChildProcessError, ProcessLookupError):  # it may be buried already
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
        _say(self.results, {"id": child.job, "seconds": time.monotonic() - child.start, **result})

    def stop(self) -> None:
        """Nobody waits any more."""
        for child in self.children.values():
            os.kill(child.pid, signal.SIGKILL)


def _fresh(child: Child, now: float) -> bool:
    """Whether a child still has its first moments before it, by the clock and by what it has computed."""
    if now > child.start + FRESH:
        return False
    try:
        with open(f"/proc/{child.pid}/stat", "rb") as file:
            ticks = file.read().rpartition(b")")[2].split()[11:13]
    except (OSError, IndexError):
        return True
    return sum(map(int, ticks)) <= HURRY * os.sysconf("SC_CLK_TCK")


def _why(pid: int) -> str:
    """Why a child ended without a word: a limit, or something else."""
    for _ in range(40):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return "too_costly" if os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == OUT_OF_TIME else "crashed"
        time.sleep(0.005)
    return "crashed"


def _work(function: Function, job: dict[str, Any], pipe: int) -> None:
    """In the child: set limits, call the function, write the result."""
    os.dup2(1, 0)
    os.closerange(3, pipe)
    os.closerange(pipe + 1, pipe + 2 * MOST_AT_ONCE)
    _limit(job["memory"], job["processor"])
    try:
        result = {"outcome": "done", "value": function(*job["arguments"])}
        said = json.dumps(result)
    except (MemoryError, RecursionError):
        said = '{"outcome": "too_costly"}'
    except BaseException as error:
        said = json.dumps({"outcome": "crashed", "error": f"{type(error).__name__}: {error}"[:500]})
    data = said.encode()
    while data:
        data = data[os.write(pipe, data) :]
    os._exit(0)


def _limit(memory: int, seconds: float) -> None:
    """Memory and processor time. Once it has had its hurry, a child steps back behind the others; then it is out."""
    import resource

    def out_of_hurry(*_: object) -> None:
        os.nice(10)
        signal.signal(signal.SIGVTALRM, lambda *_: os._exit(OUT_OF_TIME))
        signal.setitimer(signal.ITIMER_VIRTUAL, max(seconds - HURRY, 0.01))

    _die_with_parent()
    used = _address_space()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
    signal.signal(signal.SIGVTALRM, out_of_hurry)
    signal.setitimer(signal.ITIMER_VIRTUAL, HURRY)
    sys.setrecursionlimit(2_000)


def _address_space() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 1 << 30  # no /proc: the limit is looser by this


def _die_with_parent() -> None:
    """Linux: be killed when the process that forked this one dies.

    For children only: what counts is the thread that made a process, and the worker itself may be started by a thread
    that ends. It notices the end of its input.
    """
    try:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    except (OSError, AttributeError):
        pass


def _say(pipe: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    try:
        while data:
            data = data[os.write(pipe, data) :]
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
