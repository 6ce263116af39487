"""The tools that a recipe names, and their schemas; nothing is started here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from trimtab.agents.calculator import calculator
from trimtab.agents.schemas import environment_schemas, function_schema
from trimtab.data import Problem
from trimtab.own_parts import OwnPartError, is_own, load_part
from trimtab.text import nearest, shown


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
            _require_module(name, "a tool")
            function = load_part(name)
            if inspect.isclass(function):
                raise OwnPartError(f"{name} is a class: name it as the environment (task.environment), not as a tool")
            tool = name.rpartition(":")[2]
            self._add(tool, function_schema(function, name))
            self._functions[tool] = name
        else:
            raise ValueError(f"there is no tool {shown(name)}: {nearest(name, BUILT_IN)}, or python:MODULE:NAME")

    def _add_environment(self, name: str) -> None:
        if not is_own(name):
            raise ValueError(f"environment {shown(name)}: name a class of your own, python:MODULE:NAME")
        _require_module(name, "an environment")
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


def _require_module(name: str, what: str) -> None:
    if ":" not in name.removeprefix("python:"):
        raise OwnPartError(
            f"{name}: {what} runs in a process of its own, which knows files only: put it in a file MODULE.py and "
            "write python:MODULE:NAME"
        )
