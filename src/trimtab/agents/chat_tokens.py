"""Conversations as tokens: rendered as a whole, or continued behind stored tokens exactly as the template would."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trimtab.agents.call_formats import CallFormat

ChatMessage = Mapping[str, Any]  # as OpenAI's interface has them, checked by `chat_requests`
Reason = Literal["rewritten", "roles"]


class ChatRenderError(ValueError):
    """The chat template refuses a conversation; the message says why, for who sent it."""


class ChatTooLongError(ValueError):
    """A conversation has more tokens than the model takes."""


@dataclass(frozen=True)
class Shape:
    """The roles of a conversation and how its template writes them; opaque to all but `ChatTokens`."""


@dataclass(frozen=True)
class Context:
    """A conversation as tokens, up to and including the beginning of the next answer.

    `opened`: this beginning opens a block of reasoning.
    """

    tokens: list[int]
    shape: Shape
    opened: bool = False


@dataclass(frozen=True)
class ReadMessage:
    """A sampled message in words.

    `text` is all of it without special tokens, `raw` with them. `content` is without reasoning, calls and what follows
    a stop string; `reasoning` is None if there is none. `calls` have the name and arguments of calls.
    """

    text: str
    raw: str
    content: str
    reasoning: str | None
    calls: tuple[tuple[str, Mapping[str, Any]], ...]


class ChatTokens:
    """Writes conversations as tokens for one tokenizer, and reads what was sampled. Any thread may call it.

    `chat`: the model's chat template is used if it has one. `end_tokens` are those that end a message, by default the
    tokenizer's.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat: bool = True,
        call_format: CallFormat | Literal["auto"] = "auto",
        end_tokens: Collection[int] | None = None,
    ) -> None:
        raise NotImplementedError

    def begin(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], limit: int) -> Context:
        """Render a whole conversation, of at most `limit` tokens.

        Raise ChatRenderError or ChatTooLongError.
        """
        raise NotImplementedError

    def go_on(
        self, shape: Shape, sampled: Sequence[int], opened: bool, messages: Sequence[ChatMessage], limit: int
    ) -> Context | Reason:
        """Return what follows a sampled message: the tokens that the template writes for these messages behind it.

        `shape` and `opened` are those of the context that the message was sampled from. The result's tokens come
        behind `sampled`. If it cannot be proven that the template writes the rest as before, the reason is returned.
        """
        raise NotImplementedError

    def read(
        self, sampled: Sequence[int], opened: bool, tools: Sequence[Mapping[str, Any]], stop: Sequence[str] = ()
    ) -> ReadMessage:
        """Return a sampled message in words; calls are looked for if there are tools."""
        raise NotImplementedError
