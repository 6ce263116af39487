"""The tools of a run, by name, and the processes that they run in."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

from trimtab.agents.calculator import calculator
from trimtab.agents.schemas import argument_problem
from trimtab.agents.tool_catalog import ToolCatalog
from trimtab.agents.tool_results import ToolResult, of_program, of_worker
from trimtab.agents.types import Conversation
from trimtab.data import Problem
from trimtab.grading import WorkerLimits, WorkerSession, call_worker, start_worker
from trimtab.own_parts import OwnPartError
from trimtab.text import nearest, shown
from trimtab.workers import Sandbox, Session

RESULT_BYTES = 1 << 20  # of a result as JSON, where a character may have 12
HOST = "trimtab.agents.tool_process"

_T = TypeVar("_T")


class ToolSet(ToolCatalog):
    """The tools that conversations may call. It lives as long as the trainer; `close` ends its processes.

    `use` names them: `python`, `python_session`, `calculator`, or a function `python:MODULE:NAME`. `environment` names
    a class of the user's own, whose public methods are tools too. At most `workers` calls run at once, each with at
    most `memory_mb` beyond what its module takes (the sandbox has a limit of its own).
    """

    def __init__(
        self,
        use: Sequence[str] = (),
        *,
        environment: str | None = None,
        workers: int = 4,
        memory_mb: int = 2048,
        sandbox_level: str = "full",
    ) -> None:
        if workers < 1 or memory_mb < 1:
            raise ValueError(f"workers={workers}, memory_mb={memory_mb}: both must be 1 or more")
        self.workers, self.memory_mb = workers, memory_mb
        super().__init__(use, environment)
        self._prepare()
        sandboxed = {"python", "python_session"} & self.names
        self.sandbox = Sandbox(workers=workers, level=sandbox_level) if sandboxed else None
        self.start()

    def _prepare(self) -> None:
        self._owner, self._lock = os.getpid(), threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self.opened: set[OpenTools] = set()  # those with a process of their own

    def start(self) -> None:
        """Start the processes that load the user's modules, without waiting for them."""
        for name in self._functions.values():
            start_worker(f"{HOST}:call_function@{name}")
        if self.environment is not None:
            start_worker(self._host)

    @property
    def _host(self) -> str:
        return f"{HOST}:EnvironmentHost@{self.environment}"

    def in_thread(self, work: Callable[[], _T]) -> Future[_T]:
        """Run something beside this thread, at most `workers` at once."""
        if self._owner != os.getpid():  # a fork has no threads, and its locks may be held by those of the parent
            self._prepare()
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="trimtab-tools")
            return self._threads.submit(work)

    def open(self, problem: Problem) -> OpenTools:
        """Return the tools of one conversation; nothing is started before the first call."""
        return OpenTools(self, problem)

    def openings(self, problems: Sequence[Problem], timeout: float) -> list[str | None]:
        """Return what the environment's `reset` says of each problem; it belongs to the prompt.

        An error in it is raised: it comes from the user's code and data, and not from what a model wrote.
        """
        if not self.has_opening:
            return [None] * len(problems)

        def opening(problem: Problem) -> str | None:
            tools = self.open(problem)
            try:
                text = tools.reset(timeout)
            finally:
                tools.close()
            if tools.failed is not None:
                which = problem.location or shown(problem.prompt[-1]["content"])
                advice = "" if problem.answer else " (it has no answer; for a warm start's file: columns.answer)"
                raise OwnPartError(f"{self.environment}: reset failed for {which}{advice}: {tools.failed.error}")
            return text

        futures = [self.in_thread(partial(opening, problem)) for problem in problems]
        return [future.result() for future in futures]

    def call_function(self, tool: str, arguments: Mapping[str, Any], timeout: float) -> ToolResult:
        """Call a tool that keeps nothing."""
        if tool == "calculator":
            try:
                return ToolResult("ok", calculator(arguments["expression"]))
            except ValueError as error:
                return ToolResult("exception", f"Error: {error}")
        if tool == "python":
            assert self.sandbox is not None
            return of_program(self.sandbox.run(arguments["code"], timeout=timeout), timeout)
        function = f"{HOST}:call_function@{self._functions[tool]}"
        answer = call_worker(function, (dict(arguments),), self.limits(timeout))
        return replace(of_worker(answer, timeout, self.memory_mb), gone=False)  # there is nothing to miss

    def limits(self, timeout: float) -> WorkerLimits:
        """Return what one call of the user's code may take."""
        return WorkerLimits(timeout, timeout, self.memory_mb << 20, RESULT_BYTES)

    def session(self) -> WorkerSession:
        """Return a process of its own for an environment."""
        return WorkerSession(self._host)

    def is_environments(self, tool: str) -> bool:
        """Return whether a tool is a method of the environment."""
        return tool in self._environment_tools

    def close(self) -> None:
        """End all processes."""
        if self._owner != os.getpid():
            return
        with self._lock:
            if self._threads is not None:
                self._threads.shutdown(wait=False, cancel_futures=True)
                self._threads = None
        for tools in list(self.opened):  # of conversations that were broken off
            tools.close()
        if self.sandbox is not None:
            self.sandbox.close()


class OpenTools:
    """The tools of one conversation: its interpreter and its environment, started when they are needed."""

    def __init__(self, tools: ToolSet, problem: Problem) -> None:
        self.tools, self.problem = tools, problem
        self.schemas = tools.of_problem(problem)
        self.interpreter: Session | None = None
        self.environment: WorkerSession | None = None
        self.failed: ToolResult | None = None  # why there is no environment
        self.reset_failed = False

    def call(self, tool: str, arguments: Mapping[str, Any], timeout: float) -> ToolResult:
        """Call a tool by name; whatever happens is a result in words."""
        if tool not in self.schemas:
            hint = nearest(tool, self.schemas) if self.schemas else "there are none"
            return ToolResult("unknown_tool", f"Error: there is no tool {shown(tool)}: {hint}")
        problem = argument_problem(self.schemas[tool], arguments)
        if problem:
            return ToolResult("bad_arguments", f"Error: {problem}")
        start = time.monotonic()
        result = self._run(tool, arguments, timeout)
        return replace(result, seconds=time.monotonic() - start)

    def _run(self, tool: str, arguments: Mapping[str, Any], timeout: float) -> ToolResult:
        if tool == "python_session":
            return self._run_in_session(arguments["code"], timeout)
        if not self.tools.is_environments(tool):
            return self.tools.call_function(tool, arguments, timeout)
        self.reset(timeout)
        if self.failed is None:
            assert self.environment is not None
            limits = self.tools.limits(timeout)
            answer = self.environment.call("call", (tool, dict(arguments)), limits)
            result = of_worker(answer, timeout, self.tools.memory_mb)
            if not result.gone:
                return result
            self._fail(result)
        assert self.failed is not None
        return self.failed

    def reset(self, timeout: float) -> str | None:
        """Start the environment, if that was not done, and return what it says of the problem."""
        if self.environment is not None or self.failed is not None:
            return None
        self.environment = self.tools.session()
        self.tools.opened.add(self)
        answer = self.environment.call("reset", (_problem_fields(self.problem),), self.tools.limits(timeout))
        if answer.outcome == "done":
            opening: str | None = answer.value
            return opening
        self.reset_failed = True
        self._fail(of_worker(answer, timeout, self.tools.memory_mb))
        return None

    def _fail(self, result: ToolResult) -> None:
        self.failed = replace(result, gone=True)
        self.close()

    def reward(self, conversation: Conversation, timeout: float) -> ToolResult | float | None:
        """Return the environment's reward; a result in words where it failed."""
        self.reset(timeout)
        if self.failed is not None or self.environment is None:
            return self.failed
        fields = {
            "messages": [asdict(message) for message in conversation.messages],
            "calls": [asdict(call) for call in conversation.calls],
            "ended": conversation.ended,
            "void_turns": conversation.void_turns,
        }
        answer = self.environment.call("reward", (fields,), self.tools.limits(timeout))
        if answer.outcome != "done":
            return of_worker(answer, timeout, self.tools.memory_mb)
        value: float | None = answer.value
        return value

    def _run_in_session(self, code: str, timeout: float) -> ToolResult:
        assert self.tools.sandbox is not None
        if self.interpreter is None:
            self.interpreter = self.tools.sandbox.session(timeout=timeout)
            self.tools.opened.add(self)
        result = of_program(self.interpreter.run(code, timeout=timeout), timeout)
        if self.interpreter.ended:
            self.interpreter = None  # the next call gets a new one
            return replace(result, text=f"{result.text}\nThe interpreter has ended: its names are gone.")
        return result

    @property
    def started(self) -> bool:
        """Whether there is a process to end."""
        return self.interpreter is not None or self.environment is not None

    def close(self) -> None:
        """End the interpreter and the environment."""
        self.tools.opened.discard(self)
        if self.interpreter is not None:
            self.interpreter.close()
            self.interpreter = None
        if self.environment is not None:
            self.environment.close()
            self.environment = None


def _problem_fields(problem: Problem) -> dict[str, Any]:
    fields = {**vars(problem), "prompt": [dict(message) for message in problem.prompt], "extra": dict(problem.extra)}
    plain: dict[str, Any] = json.loads(json.dumps(fields, default=str))
    return plain
