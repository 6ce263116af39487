"""Conversations in TRL and verl: trimtab's tools, replies that stay plain text, and the last message. Imports no torch.

Programs run in the sandbox, functions and environments of the user's own in processes that can be killed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from trimtab.agents import Call, Conversation, Message, ToolSet
from trimtab.data import Problem
from trimtab.own_parts import OwnPartError, look_beside
from trimtab.text import cut_middle, printable

if TYPE_CHECKING:
    from trimtab.engines.options import EngineOptions

LEFT_OUT = "\n... ({} characters left out) ...\n"
_log = logging.getLogger(__name__)
_failed: set[str] = set()  # parts whose first error has been logged


@lru_cache
def tool_set(use: tuple[str, ...], environment: str | None, workers: int, folders: tuple[str, ...]) -> ToolSet:
    """Start tools in this process; modules of the user's own are looked for in `folders`."""
    for folder in reversed(folders):
        look_beside(folder)
    return ToolSet(use, environment=environment, workers=workers)


class ConversationTools:
    """The tools of one conversation in an engine, whose turns are the engine's affair."""

    def __init__(self, options: EngineOptions, problem: Problem) -> None:
        self.options, self.problem = options, problem
        self.tools = options.tool_set
        self.calls: list[Call] = []
        self._open = self.tools.open(problem)

    def __del__(self) -> None:
        if hasattr(self, "_open"):
            self._open.close()

    def opening(self) -> str:
        """Return what the environment says of the problem; it belongs to the prompt."""
        if not self.tools.has_opening:
            return ""
        text = self._open.reset(self.options.tool_timeout)
        # An error in it is raised: it comes from the user's code and data, and not from what a model wrote.
        if self._open.failed is not None:
            raise OwnPartError(f"{self.options.environment}: reset failed: {self._open.failed.error}")
        return text or ""

    def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return its reply; what goes wrong is told in it."""
        result = self._open.call(tool, arguments, self.options.tool_timeout)
        if result.error:  # of the user's own code
            _log_once(tool, result.error)
        self.calls.append(Call(tool, arguments, result.outcome, result.seconds, result.text))
        return cut_middle(result.text, self.options.tool_characters, LEFT_OUT)

    def reward(self, messages: Sequence[Mapping[str, Any]]) -> float | None:
        """Return the environment's reward for the messages after the prompt; None leaves it to the reward function.

        An environment that a call has killed pays 0, and so does one whose `reward` fails.
        """
        if not self.tools.has_reward:
            return None
        found = [
            Message(message["role"], str(message.get("content") or ""), str(message.get("name") or ""))
            for message in messages
            if message["role"] in ("assistant", "tool")
        ]
        answered = bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        value = self._open.reward(
            Conversation(found, self.calls, "answer" if answered else "turns"), self.options.tool_timeout
        )
        if value is None or isinstance(value, float | int):
            return value
        _log_once("reward", value.error or value.text)
        return 0.0


def _log_once(part: str, error: str) -> None:
    """Log the first error of a tool, or of the reward, in this process: no other part of an engine tells the user."""
    if part not in _failed:
        _failed.add(part)
        _log.error("%s failed, and the run goes on:\n%s", part, printable(error))  # it may quote a call


class ReplyText:
    """Turns the tokens of chat markup in a tool's reply into plain text.

    Engines tokenize a reply together with the chat template around it, so `<|im_end|>` in a reply would end the turn,
    and a tool could write a message in the policy's name.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
        added |= dict.fromkeys(map(str, tokenizer.all_special_tokens), True)
        # Some vocabularies have added tokens for words or for runs of spaces: these are not markup.
        words = [word for word, special in added.items() if special or any(_is_sign(character) for character in word)]
        marks = sorted((word for word in words if len(word.strip()) > 1), key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, marks))) if marks else None

    def __call__(self, text: str) -> str:
        """Return the text with a space behind the first character of every mark."""
        # Again while one is left: a space can complete another mark, if hardly ever.
        for _ in range(8):
            if self._marks is None or self._marks.search(text) is None:
                return text
            text = self._marks.sub(lambda mark: f"{mark[0][0]} {mark[0][1:]}", text)
        return text


def _is_sign(character: str) -> bool:
    return not (character.isalnum() or character.isspace())


def last_message(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last assistant message of a completion, for reward functions.

    The last message of a conversation can be a tool's: TRL leaves it there if no room was left for an answer.
    """
    if isinstance(completion, str):
        return completion
    last = completion[-1] if completion else {}
    # Nothing is earned with an earlier message: the policy has not answered after the tool spoke.
    content = last.get("content") if last.get("role") == "assistant" else ""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content or "")


def last_sampled(ids: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """Return the tokens after the last one that the policy did not sample: its last message."""
    end = min(len(ids), len(sampled))
    start = end
    while start and sampled[start - 1]:
        start -= 1
    return list(ids[start:end])
