"""Conversations as tokens: rendered as a whole, or continued behind stored tokens exactly as the template would.

A template is asked what it writes around a message with contents that can be told apart, in a worker within limits.
What it writes depends on the roles of a conversation, not on its words, so each sequence of roles is asked for once.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trimtab.agents.call_formats import CallFormat, format_of, instructions
from trimtab.agents.protected_text import ChatTooLongError, ProtectedText
from trimtab.agents.reply_template import ANSWER, CALL_ID, LIMITS, PROBE, QUESTION, THOUGHT, TRANSFORMS, ObservedText
from trimtab.agents.sampled_message import MADE, ReadMessage, Think, read_message, think_of, written_calls
from trimtab.text import shorten
from trimtab.workers import RENDER, call_worker, special_tokens, template_of

__all__ = ["ChatRenderError", "ChatTokens", "ChatTooLongError", "Context", "ReadMessage", "Shape"]

ChatMessage = Mapping[str, Any]  # as OpenAI's interface has them, checked by `chat_requests`
Reason = Literal["rewritten", "roles"]

MAX_CACHED_TOKENS = 2_000_000  # of rendered conversations: a group's samples all begin with the same
MAX_SHAPES = 20_000
TOOL = {
    "type": "function",
    "function": {
        "name": "Qtool",
        "description": "Qdescription",
        "parameters": {"type": "object", "properties": {"Qkey": {"type": "string"}}, "required": ["Qkey"]},
    },
}
MADE_LENGTH = len("Qtail0000")
CALL = {"id": CALL_ID, "type": "function", "function": {"name": "Qtool", "arguments": {"Qkey": "Qvalue"}}}


class ChatRenderError(ValueError):
    """The chat template cannot render a conversation; the message says why, for who sent it."""


class ChatRefusedError(ChatRenderError):
    """The chat template itself refuses a conversation, such as one with roles that it does not know."""


@dataclass(eq=False)
class Shape:
    """The roles of a conversation, as messages of made words, and what may follow: opaque to all but `ChatTokens`."""

    messages: tuple[dict[str, Any], ...] = ()
    tools: bool = False
    children: dict[Any, Step | Reason] = field(default_factory=dict)


@dataclass(frozen=True)
class _Slot:
    """Where something from outside stands in what a template writes: a part of the message of this number."""

    part: Literal["content", "name", "tool_call_id"]
    message: int
    transform: Callable[[str], str] = str


@dataclass(frozen=True)
class Step:
    """What a template writes behind a message of the model: markup and slots in turn."""

    pieces: tuple[str | _Slot, ...]
    shape: Shape
    opened: bool


@dataclass(frozen=True)
class Context:
    """A conversation as tokens, up to and including the beginning of the next answer.

    `opened`: this beginning opens a block of reasoning.
    """

    tokens: list[int]
    shape: Shape
    opened: bool = False


class ChatTokens:
    """Writes conversations as tokens for one tokenizer, and reads what was sampled. Any thread may call it.

    `chat`: the model's chat template is used if it has one. `end_tokens` are those that end a message, by default the
    tokenizer's. `tools_problem` says why no calls can be read, if so. `notes` are sentences for the user beforehand.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat: bool = True,
        call_format: CallFormat | Literal["auto"] = "auto",
        end_tokens: Collection[int] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template_of(tokenizer) if chat else None
        if self.template is None and chat and getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"{type(tokenizer).__name__} renders chats in a way of its own, which cannot be continued: use a "
                "tokenizer with a chat template, or set model.chat=false"
            )
        self.end_tokens = frozenset({tokenizer.eos_token_id} if end_tokens is None else end_tokens)
        self.text = ObservedText(tokenizer)
        self.protected = ProtectedText(tokenizer, self.text)
        self.tools_problem, self.notes = "", list[str]()
        self.call_format: CallFormat = "plain"
        try:
            self.call_format = format_of(self.template) if call_format == "auto" else call_format
        except ValueError as error:
            self.tools_problem = str(error)
        self.separator = next((each for each in ("\n", " ") if self.text.encode(each)), "")
        self._special = special_tokens(tokenizer)
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Context] = OrderedDict()
        self._known_tokens = 0
        self._shapes: dict[str, Shape] = {}
        self._steps = 0
        self.takes_system = self.takes_tool = self.writes_tools = self.writes_calls = True
        if self.template is not None:
            self._ask()

    def _ask(self) -> None:
        """Find out what the template knows: system messages, tools, their replies, and calls in messages."""
        asked = {"role": "user", "content": QUESTION}
        answer = {"role": "assistant", "content": ANSWER}
        self._render([[asked]], [])  # raises if it cannot even do this

        def writes(messages: list[dict[str, Any]], words: Sequence[str], tools: list[Any] | None = None) -> bool:
            try:
                [text] = self._render([messages], tools or [])
            except ChatRenderError:
                return False
            return all(word in text for word in words)

        self.takes_system = writes([{"role": "system", "content": "Qsystem"}, asked], ["Qsystem"])
        own = self.call_format == ("" if self.tools_problem else format_of(self.template))
        self.writes_tools = own and writes([asked], ["Qdescription"], [TOOL])
        calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        self.writes_calls = own and writes([asked, calling], ["Qtool", "Qvalue"])
        reply = {"role": "tool", "content": "Qreply", "tool_call_id": CALL_ID, "name": "Qtool"}
        before = calling if self.writes_calls else answer
        self.takes_tool = writes([asked, before, reply], ["Qreply"])
        if not self.writes_tools:
            where = "system" if self.takes_system else "first"
            self.notes.append(f"the chat template does not write tools down: they go into the {where} message")
        if not self.takes_tool:
            self.notes.append("the chat template has no messages of tools: replies are given as the user's messages")

    def begin(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], limit: int) -> Context:
        """Render a whole conversation, of at most `limit` tokens.

        Raise ChatRenderError or ChatTooLongError.
        """
        # Not with sorted keys: templates write arguments and tools in the order that they came in.
        key = hashlib.blake2b(json.dumps([messages, tools]).encode()).digest()
        known = self.known(key)
        if known is None:
            known = self._begin(messages, tools, limit)
            self._remember(key, known)
        return Context(list(known.tokens), known.shape, known.opened)

    def known(self, key: bytes) -> Context | None:
        """Return a conversation that was rendered not long ago."""
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
            return found

    def _remember(self, key: bytes, context: Context) -> None:
        with self._lock:
            if key in self._known or len(context.tokens) > MAX_CACHED_TOKENS:
                return
            self._known[key] = context
            self._known_tokens += len(context.tokens)
            while self._known_tokens > MAX_CACHED_TOKENS:
                self._known_tokens -= len(self._known.popitem(last=False)[1].tokens)

    def _forget(self) -> None:
        self._shapes.clear()
        self._known.clear()
        self._known_tokens = self._steps = 0

    def _begin(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], limit: int) -> Context:
        if self.template is None:
            text = "\n".join(message["content"] for message in messages)
            return Context(self.protected.encode_prompt(text, limit), Shape())
        given = self._for_template(messages, tools)
        written = list(tools) if self.writes_tools else []
        made, key = _made_messages(given), bool(written)
        name = json.dumps([made, key])
        hidden = [self.protected.hide_in_message(message) for message in given]
        [text] = self._render([hidden], self.protected.hide(written))
        with self._lock:
            if len(self._shapes) > MAX_SHAPES:
                self._forget()
            shape = self._shapes.setdefault(name, Shape(tuple(made), key))
        tokens = self.protected.encode(text, limit)
        return Context(tokens, shape, _opens_thinking(text))

    def _for_template(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return messages as this template can write them; what it has no form for is put into words."""
        given = [self._of_known_role(message) for message in messages]
        if tools and not self.writes_tools:
            words = instructions([_with_parameters(tool) for tool in tools], self.call_format)
            if given[0]["role"] == "system" or not self.takes_system:
                given[0]["content"] = f"{words}\n\n{given[0]['content']}"
            else:
                given.insert(0, {"role": "system", "content": words})
        return given

    def _of_known_role(self, message: ChatMessage) -> dict[str, Any]:
        given = dict(message)
        if given["role"] == "tool" and not self.takes_tool:
            given = {"role": "user", "content": given["content"]}
        if given.get("tool_calls") and not self.writes_calls:
            text = written_calls(given.pop("tool_calls"), self.call_format)
            given["content"] = f"{given['content']}\n{text}" if given["content"] else text
        return given

    def go_on(
        self, shape: Shape, sampled: Sequence[int], opened: bool, messages: Sequence[ChatMessage], limit: int
    ) -> Context | Reason:
        """Return what follows a sampled message: the tokens that the template writes for these messages behind it.

        `shape` and `opened` are those of the context that the message was sampled from. The result's tokens come
        behind `sampled`. If it cannot be proven that the template writes the rest as before, the reason is returned.
        """
        if self.template is None:
            text = "".join(self.separator + message["content"] for message in messages)
            self.protected.check_length(text, limit)
            return Context(self.text.encode(text), shape)
        step = self.follow(shape, think_of(self.raw(sampled), opened), opened, messages)
        if isinstance(step, str):
            return step
        given = [self._of_known_role(message) for message in messages]
        parts = []
        for piece in step.pieces:
            if isinstance(piece, _Slot):
                value = str(given[piece.message].get(piece.part) or "")
                parts.append(self.protected.hide(piece.transform(value)))
            else:
                parts.append(piece)
        tokens = self.protected.encode("".join(parts), limit)
        if tokens and sampled and tokens[0] == sampled[-1]:
            del tokens[0]  # the end of a message that the model has written itself
        return Context(tokens, step.shape, step.opened)

    def follow(self, shape: Shape, think: Think, opened: bool, messages: Sequence[ChatMessage]) -> Step | Reason:
        """Return what the template writes behind a message of the model, or why that cannot be said."""
        given = [self._of_known_role(message) for message in messages]
        key = (think, opened, *map(_kind, given))
        found = shape.children.get(key)
        if found is None:
            found = self._ask_step(shape, think, opened, given)
            with self._lock:
                self._steps += 1
                if self._steps > MAX_SHAPES:  # contexts that are in use keep what they need
                    self._forget()
                found = shape.children.setdefault(key, found)
        return found

    def _ask_step(self, shape: Shape, think: Think, opened: bool, messages: Sequence[ChatMessage]) -> Step | Reason:
        answer = MADE[think]
        tail = [_made_tail(number, message) for number, message in enumerate(messages)]
        begun = [*shape.messages, {"role": "assistant", "content": answer}]
        probed = [message | ({"content": PROBE} if message["content"] else {}) for message in tail]
        tools = [TOOL] if shape.tools else []
        try:
            before, text, probe = self._render([list(shape.messages), [*begun, *tail], [*begun, *probed]], tools)
        except ChatRefusedError:
            return "roles"
        start = before + (answer.removeprefix("<think>\n") if opened else answer)
        if not text.startswith(start) or not probe.startswith(start):
            return "rewritten"
        pieces = _pieces(text[len(start) :], probe[len(start) :], tail)
        if pieces is None:
            return "roles"
        return Step(pieces, Shape((*begun, *tail), shape.tools), _opens_thinking(text))

    def raw(self, sampled: Sequence[int]) -> str:
        """Return a sampled message with its special tokens, but for the one that ends it."""
        body = list(sampled[:-1] if len(sampled) and sampled[-1] in self.end_tokens else sampled)
        return str(self.tokenizer.decode(body, skip_special_tokens=False))

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, special ones too."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))

    def read(
        self, sampled: Sequence[int], opened: bool, tools: Sequence[Mapping[str, Any]], stop: Sequence[str] = ()
    ) -> ReadMessage:
        """Return a sampled message in words; calls are looked for if there are tools."""
        text = str(self.tokenizer.decode(list(sampled), skip_special_tokens=True))
        schemas = {tool["function"]["name"]: _with_parameters(tool) for tool in tools}
        without_special = self.protected.without_special
        return read_message(text, self.raw(sampled), opened, self.call_format, schemas, stop, without_special)

    def _render(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], tools: Sequence[Mapping[str, Any]]
    ) -> list[str]:
        """Return conversations as text, in a worker within limits."""
        given = [[dict(message) for message in messages] for messages in conversations]
        arguments = self.template, given, self._special, [list(tools)] * len(given)
        answer = call_worker(RENDER, arguments, LIMITS)
        if answer.outcome == "too_costly":
            raise ChatRenderError("the model's chat template cannot be rendered: it is too costly")
        if answer.outcome != "done":  # the worker's own trouble, which says nothing about the messages
            raise RuntimeError(f"the model's chat template cannot be rendered: {shorten(answer.error, 300)}")
        if "texts" not in answer.value:
            raise ChatRefusedError(f"the model's chat template refuses it: {shorten(answer.value['error'], 300)}")
        texts: list[str] = answer.value["texts"]
        return texts


def _opens_thinking(text: str) -> bool:
    return text.endswith("<think>\n")


def _kind(message: ChatMessage) -> tuple[Any, ...]:
    """Return what a template may look at in a message behind the model's, besides its words."""
    given = tuple(bool(message.get(part)) for part in ("content", "name", "tool_call_id"))
    return message["role"], *given


def _made_tail(number: int, message: ChatMessage) -> dict[str, Any]:
    """Return a message of made words for one behind the model's."""
    made = {"role": message["role"], "content": f"Qtail{number:04d}" if message["content"] else ""}
    if message.get("name"):
        made["name"] = f"Qname{number:04d}"
    if message.get("tool_call_id"):
        made["tool_call_id"] = f"Qcall{number:04d}"
    return made


def _made_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return a conversation in made words: what it has is kept, what it says is not."""
    made = []
    for message in messages:
        kept: dict[str, Any] = {"role": message["role"], "content": "Qtext" if message["content"] else ""}
        if message["role"] == "assistant" and "</think>" in message["content"]:
            kept["content"] = f"<think>\n{THOUGHT}\n</think>\n\nQtext"
        kept |= {part: "Qpart" for part in ("name", "tool_call_id", "reasoning_content") if message.get(part)}
        if message.get("tool_calls"):
            kept["tool_calls"] = [CALL] * len(message["tool_calls"])
        made.append(kept)
    return made


_PARTS: dict[str, Literal["content", "name", "tool_call_id"]] = {
    "Qtail": "content",
    "Qname": "name",
    "Qcall": "tool_call_id",
}


def _pieces(text: str, probe: str, tail: Sequence[ChatMessage]) -> tuple[str | _Slot, ...] | None:
    """Return markup and slots of what a template wrote behind a message; None if a content is not there as it is.

    `probe` is the same with all contents replaced by `PROBE`, which shows what the template does to them.
    """
    marks = _marks(text)
    contents = [mark.message for _, mark in marks if mark.part == "content"]
    if contents != [number for number, message in enumerate(tail) if message["content"]]:
        return None
    pieces: list[str | _Slot] = []
    position = at = 0
    for index, (start, mark) in enumerate(marks):
        markup = text[position:start]
        position = start + MADE_LENGTH
        if not probe.startswith(markup, at):
            return None
        at += len(markup)
        following = text[position : marks[index + 1][0] if index + 1 < len(marks) else len(text)]
        if mark.part == "content":
            fits = [t for t in TRANSFORMS if probe.startswith(t(PROBE) + following, at)]
            if not fits:
                return None
            pieces += [markup, _Slot("content", mark.message, fits[0])]
            at += len(fits[0](PROBE))
        else:
            pieces += [markup, mark]
            at += MADE_LENGTH
    if probe[at:] != text[position:]:
        return None
    return (*pieces, text[position:])


def _marks(text: str) -> list[tuple[int, _Slot]]:
    """Return where made words stand for parts of messages, in order."""
    found = re.finditer(r"(Qtail|Qname|Qcall)(\d{4})", text)
    return [(each.start(), _Slot(_PARTS[each[1]], int(each[2]))) for each in found]


def _with_parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool whose function has parameters, which OpenAI's interface lets it leave out."""
    function = dict(tool["function"])
    parameters = dict(function.get("parameters") or {})
    parameters.setdefault("type", "object")
    parameters["properties"] = parameters.get("properties") or {}
    return {**tool, "function": {**function, "parameters": parameters}}
