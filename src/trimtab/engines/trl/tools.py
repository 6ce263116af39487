"""trimtab's tools for TRL's `environment_factory=`, and the reward of an environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, get_type_hints

from trimtab.agents import BUILT_IN
from trimtab.data import Problem
from trimtab.engines.conversations import ConversationTools
from trimtab.engines.options import EngineOptions, read_options
from trimtab.own_parts import load_part, module_folders


class ToolEnvironment:
    """An environment in TRL's form around trimtab's tools; `tool_environment` adds a method for each tool."""

    # TRL shows every public method but `reset` to the model as a tool: there must be no others here.
    _options: ClassVar[EngineOptions]

    def __init__(self) -> None:
        self._tools: ConversationTools | None = None

    def reset(self, **row: Any) -> str | None:
        """Begin the conversation of a row; return what the environment says of it, for the prompt."""
        self._tools = ConversationTools(self._options, _problem(row))
        return self._tools.opening() or None

    def _call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        assert self._tools is not None
        return self._tools.call(tool, arguments)


def tool_environment(*tools: str, **options: Any) -> type[ToolEnvironment]:
    """Return a class for `environment_factory=` with these tools: `tool_environment("python", tool_timeout=5.0)`.

    `tools`: `python`, `python_session`, `calculator`, or functions `python:MODULE:NAME`; `options`: `environment`, a
    class `python:MODULE:NAME` whose public methods are tools too, `tool_timeout`, `tool_workers` and `tool_characters`.
    """
    read = read_options("trl", {"tools": tools, "tool_folders": module_folders(), **options})
    names = read.tool_set.names  # now: an engine shows the model every error of a tool as its reply, and trains on
    like = {name.rpartition(":")[2]: BUILT_IN.get(name) or load_part(name) for name in tools}
    if read.environment is not None:
        own = load_part(read.environment)
        like |= {name: getattr(own, name) for name in names - like.keys()}
    methods = {name: _method(name, function) for name, function in like.items()}
    return type("ToolEnvironment", (ToolEnvironment,), {"_options": read, **methods})


def _method(tool: str, like: Callable[..., Any]) -> Callable[..., str]:
    """Return a method that calls a tool, with the types and docstring from which TRL makes the tool's schema."""

    def call(self: ToolEnvironment, **arguments: Any) -> str:
        return self._call(tool, arguments)

    signature = inspect.signature(like)
    given = [parameter for name, parameter in signature.parameters.items() if name != "self"]
    receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    call.__name__ = call.__qualname__ = tool
    call.__doc__ = inspect.getdoc(like)
    call.__annotations__ = {name: hint for name, hint in get_type_hints(like).items() if name != "return"}
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[receiver, *given], return_annotation=inspect.Signature.empty
    )
    return call


def environment_reward(
    completions: Sequence[Sequence[Mapping[str, Any]]], environments: Sequence[Any], **_: Any
) -> list[float | None]:
    """Return the rewards of the environment's own `reward`: `reward_funcs=[environment_reward, ...]`."""
    pairs = zip(completions, environments, strict=True)
    return [None if own._tools is None else own._tools.reward(messages) for messages, own in pairs]


def _problem(row: Mapping[str, Any]) -> Problem:
    """Return a row of TRL's data as a problem: its columns are in `extra`."""
    prompt = row.get("prompt") or ()
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
    extra = {name: value for name, value in row.items() if name != "prompt"}
    return Problem(messages, str(row.get("answer", "")), str(row.get("rule", "math")), "trl", extra=extra)
