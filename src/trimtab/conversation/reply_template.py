"""A tool's reply as the tokens that the model's own chat template would add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from trimtab.conversation.tool_set import ToolSet
from trimtab.tasks import Problem

# plain: for models without a chat template, NAME(TEXT)
CallFormat = Literal["hermes", "llama", "fenced", "plain"]


class ReplyTemplate:
    """How calls are written and replies are given with one tokenizer.

    `notes` are sentences for the user before the first step: what the template does not do as trained.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: ToolSet,
        *,
        chat: bool = True,
        call_format: CallFormat | Literal["auto"] = "auto",
    ) -> None:
        self.notes: list[str] = []
        raise NotImplementedError

    def prompts(self, problems: Sequence[Problem]) -> list[list[Mapping[str, str]]]:
        """Return the messages of each prompt: with what the environment's `reset` says of the problem.

        Where the chat template does not write the tools down, a system message does.
        """
        raise NotImplementedError
