"""The tools of a run: their names and schemas, the processes that they run in, and what a call gave."""

from __future__ import annotations

import inspect
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

from trimtab.agents.calculator import calculator
from trimtab.agents.schemas import argument_problem, environment_schemas, function_schema
from trimtab.agents.types import Conversation, Outcome
from trimtab.data import Problem
from trimtab.own_parts import OwnPartError, is_own, load_part, require_module
from trimtab.text import nearest, shown
from trimtab.workers import (
    Result,
    Sandbox,
    Session,
    WorkerLimits,
    WorkerResult,
    WorkerSession,
    call_worker,
    start_worker,
)

RESULT_BYTES = 1 << 20  # of a result as JSON, where a character may have 12
HOST = "trimtab.agents.tool_process"

_T = TypeVar("_T")


@dataclass(frozen=True)
class ToolResult:
    """What a call gave: `text` is for the model, `error` (a traceback of the user's code) for the user.

    `gone`: the environment's process has ended with it.
    """

    outcome: Outcome
    text: str
    seconds: float = 0.0
    error: str = ""
    gone: bool = False


def of_program(result: Result, timeout: float) -> ToolResult:
    """Return what a sandboxed program gave, in words for the model."""
    printed = result.stdout.rstrip("\n")
    if result.kind == "refused":
        return ToolResult("bad_arguments", f"Error: {result.error}")
    if result.kind == "ok":
        return ToolResult("ok", printed or "The program printed nothing.")
    error = f"Error: it took more than {timeout:g} s" if result.kind == "timeout" else result.error.rstrip("\n")
    return ToolResult(result.kind, f"{printed}\n{error}" if printed else error)


def of_worker(result: WorkerResult, timeout: float, memory_mb: int) -> ToolResult:
    """Return what a call of the user's code gave, in words for the model."""
    if result.outcome == "done":
        outcome, text = result.value
        return ToolResult(outcome, text or "The tool returned nothing.")
    if result.outcome == "too_costly":
        kinds: dict[str, tuple[Outcome, str]] = {
            "memory": ("memory", f"it wanted more than {memory_mb} MB"),
            "recursion": ("exception", "it recursed too deep"),
            "result": ("output", "it returned too much"),
            "signal": ("killed", "it crashed"),
        }
        kind, words = kinds.get(result.limit, ("timeout", f"it took more than {timeout:g} s"))
        return ToolResult(kind, f"Error: {words}", error=words, gone=result.gone)
    if result.outcome == "not_loaded":
        raise OwnPartError(f"the tools' process cannot load the module: {result.error}")
    if not result.traceback and result.gone:
        return ToolResult("killed", "Error: it crashed", error=result.error, gone=True)
    return ToolResult("exception", f"Error: {result.error}", error=result.traceback or result.error, gone=result.gone)


def python(code: str) -> str:
    """Run a Python program and return what it prints. numpy and sympy are installed; nothing is kept between calls.

    Args:
        code: The program. Print what you want to see.
    """
    raise NotImplementedError(code)  # the sandbox runs it


def python_session(code: str) -> str:
    """Run Python and return what it prints. numpy and sympy are installed; names are kept until the conversation ends.

    Args:
        code: The program. Print what you want to see.
    """
    raise NotImplementedError(code)


BUILT_IN: dict[str, Callable[[str], str]] = {
    "python": python,
    "python_session": python_session,
    "calculator": calculator,
}


class ToolCatalog:
    """The tools that `use` and `environment` name; a missing type or docstring is an error."""

    def __init__(self, use: Sequence[str] = (), environment: str | None = None) -> None:
        self.environment = environment
        self.has_reward = self.has_opening = False
        self._schemas: dict[str, dict[str, Any]] = {}
        self._functions: dict[str, str] = {}  # tools of the user's own: tool to MODULE:NAME
        self._environment_tools: set[str] = set()
        for name in use:
            self._add_function(name)
        if environment is not None:
            self._add_environment(environment)
        if not self._schemas:
            raise ValueError(f"no tools: name some of {', '.join(BUILT_IN)}, or python:MODULE:NAME")

    def _add_function(self, name: str) -> None:
        if name in BUILT_IN:
            self._add(name, function_schema(BUILT_IN[name], name))
        elif is_own(name):
            require_module(name, "a tool")
            function = load_part(name)
            if inspect.isclass(function):
                raise OwnPartError(f"{name} is a class: name it as the environment (task.environment), not as a tool")
            tool = name.rpartition(":")[2]
            self._add(tool, function_schema(function, name))
            self._functions[tool] = name
        else:
            raise ValueError(
                f"there is no tool {shown(name)}: {nearest(name, BUILT_IN)} (one of your own: python:MODULE:NAME)"
            )

    def _add_environment(self, name: str) -> None:
        if not is_own(name):
            raise ValueError(f"environment {shown(name)}: name a class of your own, python:MODULE:NAME")
        require_module(name, "an environment")
        make: Any = load_part(name)
        for tool, schema in environment_schemas(make, name).items():
            self._add(tool, schema)
            self._environment_tools.add(tool)
        self.has_reward = callable(getattr(make, "reward", None))
        reset = getattr(make, "reset", None)
        if not callable(reset):
            raise OwnPartError(
                f"{name}: add a method reset(self, problem), which starts a conversation; it may be empty"
            )
        self.has_opening = inspect.signature(reset).return_annotation not in (None, "None")

    def _add(self, tool: str, schema: dict[str, Any]) -> None:
        if tool in self._schemas:
            raise ValueError(f"two tools are called {tool}: rename one of them")
        self._schemas[tool] = schema

    @property
    def names(self) -> set[str]:
        """The names of all tools."""
        return set(self._schemas)

    def of_problem(self, problem: Problem | None) -> dict[str, dict[str, Any]]:
        """Return the schemas by name of the tools that a problem may use: all, or those that extra["tools"] lists."""
        some = None if problem is None else problem.extra.get("tools")
        if not isinstance(some, list) or not all(isinstance(name, str) for name in some):
            return self._schemas
        for name in some:
            if name not in self._schemas:
                where = f"{problem.location}: " if problem is not None and problem.location else ""
                raise ValueError(
                    f"{where}the problem's tools name {shown(name)}, which is not in the recipe: "
                    f"{nearest(name, self._schemas)}"
                )
        return {name: schema for name, schema in self._schemas.items() if name in some}

    def schemas(self, problem: Problem | None = None) -> list[dict[str, Any]]:
        """Return the JSON schemas for the chat template's `tools=`; a problem may allow some only (extra["tools"])."""
        return list(self.of_problem(problem).values())


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
        answer = self.environment.call("reset", (problem_fields(self.problem),), self.tools.limits(timeout))
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
        """Return the environment's reward; a result in words if it failed."""
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


def problem_fields(problem: Problem) -> dict[str, Any]:
    """Return a problem as JSON can hold it."""
    fields = {**vars(problem), "prompt": [dict(message) for message in problem.prompt], "extra": dict(problem.extra)}
    plain: dict[str, Any] = json.loads(json.dumps(fields, default=str))
    return plain
