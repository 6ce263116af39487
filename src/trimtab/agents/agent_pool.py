"""The processes in which users' agents run: so many at a time, each reused for the next rollout until it is killed."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import count
from typing import Literal

from trimtab.agents.agent_command import program_path
from trimtab.agents.tool_set import problem_fields
from trimtab.data import Problem
from trimtab.own_parts import OwnPartError
from trimtab.text import shown
from trimtab.workers import WorkerLimits, WorkerResult, WorkerSession, start_worker, stop_worker

HOST = "trimtab.agents.agent_process:AgentHost@"
PROGRAM = "python:trimtab.agents.agent_command:run_program"
# Bytes of address space beyond what the agent's module takes. A program has none: of a JavaScript engine's address
# space most is never used.
MEMORY, ANY_MEMORY = 16 << 30, 1 << 46
RESULT_BYTES = 1 << 22  # of a result as JSON

STOP_SECONDS = 0.05  # between two looks for what is to be killed
HIDDEN = "[key]"


@dataclass(frozen=True)
class AgentRun:
    """How the agent ended for one problem: what it returned, or the error that a person gets to see.

    `reward` is a number, a bool, one number for each request, or None: the task's rule decides. It grades `text`, the
    last line of a program, or if that is None the last assistant message.
    """

    outcome: Literal["returned", "failed", "timeout"]
    seconds: float
    reward: float | bool | list[float] | None = None
    text: str | None = None
    error: str = ""


@dataclass(frozen=True)
class Access:
    """What an agent needs for a rollout: where the endpoint is, its key, and a seed for its own random numbers."""

    base_url: str
    key: str
    seed: int


class AgentWorker:
    """A place for one agent at a time; its process is forked at the first rollout, and again after it was killed."""

    def __init__(self, pool: AgentPool) -> None:
        self.pool = pool
        self.session: WorkerSession | None = None

    def run(self, problem: Problem, access: Access) -> AgentRun:
        """Run the agent for a problem; whatever happens is a result."""
        pool = self.pool
        if self.session is None:
            self.session = WorkerSession(pool.function)
        arguments = (
            problem_fields(problem), access.base_url, access.key, access.seed, pool.timeout, list(pool.command)
        )  # fmt: skip
        result = self.session.call("run", arguments, pool.limits)
        if result.gone:
            self.session.close()
            self.session = None
        return _ended(result, pool.timeout, access.key)

    def close(self) -> None:
        """Kill the process, and whatever it has started."""
        if self.session is not None:
            self.session.close()
            self.session = None


class AgentPool:
    """Runs an agent, a function of the user's or a command, for many problems, at most `concurrency` at a time."""

    def __init__(
        self, function: str | None = None, command: Sequence[str] = (), *, concurrency: int = 64, timeout: float = 300.0
    ) -> None:
        self.command, self.concurrency, self.timeout = tuple(command), concurrency, timeout
        self.name = function or " ".join(command)
        self.function = HOST + (PROGRAM if self.command else function or "")
        # The limit on CPU time is that of a call without a session.
        memory = ANY_MEMORY if self.command else MEMORY
        self.limits = WorkerLimits(timeout, timeout, memory, RESULT_BYTES)
        self._workers = [AgentWorker(self) for _ in range(concurrency)]
        self._stopping = threading.Event()
        self._running: list[Future[None]] = []
        self._closed = False
        with _lock:
            _pools[self.function] += 1
        start_worker(self.function)

    def check(self) -> None:
        """Raise if the agent cannot be loaded, or there is no such program."""
        if self.command and shutil.which(self.command[0], path=program_path()) is None:
            raise OwnPartError(f"agent.command: there is no program {shown(self.command[0])}")
        worker = WorkerSession(self.function)
        result = worker.call("ready", (), self.limits)
        worker.close()
        if result.outcome != "done":
            _ended(result, self.timeout, HIDDEN)  # raises if it cannot be loaded
            raise OwnPartError(f"the agent's process does not start: {result.error}")

    def start(self, rollouts: int, run: Callable[[int, AgentWorker], None]) -> list[Future[None]]:
        """Begin so many rollouts in threads; `run` is called with the number of each and a worker for it.

        They begin in order. An error in `run` ends the thread that called it, and is the result of its future.
        """
        numbers, lock = count(), threading.Lock()
        self._stopping = stopping = threading.Event()

        def work(worker: AgentWorker) -> None:
            while not stopping.is_set():
                with lock:
                    number = next(numbers)
                if number >= rollouts:
                    return
                run(number, worker)

        used = self._workers[:rollouts]
        threads = ThreadPoolExecutor(max(1, len(used)), thread_name_prefix="trimtab-agents")
        self._running = [threads.submit(work, worker) for worker in used]
        threads.shutdown(wait=False)  # when all have ended
        return self._running

    def stop(self) -> None:
        """Kill the agents that run, and begin no further rollout of this `start`."""
        self._stopping.set()
        while True:  # one that was about to begin has a process only now
            for worker in self._workers:
                worker.close()
            if not wait(self._running, STOP_SECONDS).not_done:
                return

    def close(self) -> None:
        """End all processes; their server too, if no other pool of this process uses it."""
        self.stop()
        with _lock:
            _pools[self.function] -= not self._closed
            self._closed = True
            if not _pools[self.function]:
                stop_worker(self.function)


_lock = threading.Lock()
_pools: Counter[str] = Counter()  # that are open, by the function of their server


def _ended(result: WorkerResult, timeout: float, key: str) -> AgentRun:
    """Return how a rollout ended; neither an answer nor an error has the rollout's key in it."""
    if result.outcome == "done":
        text = result.value.get("text")
        hidden = None if text is None else text.replace(key, HIDDEN)
        return AgentRun("returned", result.seconds, result.value.get("reward"), hidden)
    if result.outcome == "not_loaded":
        raise OwnPartError(f"the agent's process cannot load it: {result.error}")
    if result.limit == "time":
        return AgentRun("timeout", result.seconds, error=f"it took more than {timeout:g} s (agent.timeout)")
    words = {
        "memory": f"it wanted more than {MEMORY >> 30} GB of memory",
        "recursion": "it recursed too deep",
        "result": f"it returned more than {RESULT_BYTES:,} bytes",
        "signal": "it crashed",
    }
    error = result.traceback or words.get(result.limit) or result.error
    if result.gone and not result.traceback and not result.limit:
        error = f"its process ended without a result: {error}"
    return AgentRun("failed", result.seconds, error=error.replace(key, HIDDEN))
