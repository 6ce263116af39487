"""The sandbox as a tool of verl, named in the file of `actor_rollout_ref.rollout.multi_turn.tool_config_path`:

    tools:
      - class_name: trimtab.engines.verl.tools.PythonTool
        config: {type: native, timeout: 10, max_characters: 4000, session: false}

Every agent loop worker has a sandbox of its own.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from trimtab.engines.python_tool import PythonLimits, PythonSession, python_tool


class PythonTool(BaseTool):
    """The tool `python`; with `session` an interpreter for each conversation, which keeps its names between calls."""

    def __init__(self, config: Mapping[str, Any], tool_schema: Any = None) -> None:
        options = {key: value for key, value in config.items() if key not in ("type", "session")}
        known = [field.name for field in fields(PythonLimits)]
        unknown = sorted(options.keys() - known)
        if unknown:
            raise ValueError(f"PythonTool has no option {', '.join(unknown)}: it has {', '.join(known)} and session")
        self._options = options
        self._python = python_tool(**options)
        self._keeps_names = bool(config.get("session", False))
        # By conversation. verl creates and releases a tool's instance for every call, so that those keep nothing.
        self._sessions: weakref.WeakKeyDictionary[Any, PythonSession] = weakref.WeakKeyDictionary()
        super().__init__(dict(config), tool_schema)

    def get_openai_tool_schema(self) -> Any:
        """Return the schema, made from the function's types and docstring."""
        function = PythonSession(**self._options).python if self._keeps_names else self._python
        return OpenAIFunctionToolSchema.model_validate(get_json_schema(function))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], agent_data: Any = None, **_: Any
    ) -> tuple[Any, float, dict[str, Any]]:
        """Run a program. Whatever goes wrong with it is the reply."""
        if not isinstance(parameters, Mapping) or set(parameters) != {"code"}:
            return ToolResponse(text="python takes one argument, code: the program as a string"), 0.0, {}
        python = self._session(agent_data).python if self._keeps_names else self._python
        # In a thread: the event loop of a worker runs all its conversations.
        text = await asyncio.to_thread(python, parameters["code"])
        return ToolResponse(text=text), 0.0, {}

    def _session(self, conversation: Any) -> PythonSession:
        """Return the interpreter of a conversation; it ends when verl drops the conversation."""
        if conversation not in self._sessions:
            self._sessions[conversation] = PythonSession(**self._options)
        return self._sessions[conversation]
