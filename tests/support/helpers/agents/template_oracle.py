"""What a chat template writes for a conversation, asked by `apply_chat_template` alone."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

Message = Mapping[str, Any]


class TemplateOracle:
    """The texts of a tokenizer's chat template, and which tokens of them are markup."""

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int]) -> None:
        self.tokenizer, self.end_tokens = tokenizer, end_tokens
        added = tokenizer.added_tokens_decoder
        self.markup = {n for n, token in added.items() if token.special or not token.content.isalnum()}
        literals = sorted((str(added[number].content) for number in self.markup), key=len, reverse=True)
        self._literal = re.compile("|".join(map(re.escape, literals)))

    def render(self, messages: Sequence[Message], tools: Sequence[Any]) -> str | None:
        """Return a conversation as text, with the beginning of the next answer; None if the template refuses it."""
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=True,
                tokenize=False,
            )
        except TemplateError:
            return None
        return str(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with special ones."""
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(tokens), **options))

    def raw(self, tokens: Sequence[int]) -> str:
        """Return the text of a sampled message without the token that ends it."""
        return self.decode(tokens[:-1] if tokens[-1] in self.end_tokens else tokens)

    def markup_of(self, tokens: Sequence[int]) -> list[int]:
        """Return those of tokens that are markup."""
        return [number for number in tokens if number in self.markup]

    def has_markup(self, value: Any) -> bool:
        """Return whether texts imitate markup."""
        return self._literal.search(json.dumps(value, ensure_ascii=False)) is not None

    def without_markup(self, value: Any) -> Any:
        """Return the same with letters for imitated markup; the assistant's reasoning stays reasoning."""
        if isinstance(value, str):
            return self._literal.sub(lambda found: "z" * len(found[0]), value)
        if isinstance(value, Mapping):
            changed = {self.without_markup(key): self.without_markup(each) for key, each in value.items()}
            if value.get("role") == "assistant":
                changed["content"] = self._literal.sub(_but_thinking, value["content"])
            return changed
        return [self.without_markup(each) for each in value] if isinstance(value, list | tuple) else value

    def tail(self, before: Sequence[Message], raw: str, after: Sequence[Message], tools: Sequence[Any]) -> str | None:
        """Return what a template writes behind a sampled message; None if it writes anything before it differently."""
        answer = stand_in(raw)
        begun = self.render(before, tools)
        whole = self.render([*before, answer, *after], tools)
        if begun is None or whole is None or not whole.startswith(begun + answer["content"]):
            return None
        return whole[len(begun + answer["content"]) :]


def _but_thinking(found: re.Match[str]) -> str:
    return found[0] if "think" in found[0] else "z" * len(found[0])


def stand_in(raw: str) -> dict[str, str]:
    """Return a message of the form of a sampled one, which a template cannot trim."""
    if "</think>" in raw:
        return {"role": "assistant", "content": "<think>\nQthought\n</think>\n\nQanswer"}
    return {"role": "assistant", "content": "<think>\nQthought" if "<think>" in raw else "Qanswer"}


def composed(text: str) -> str:
    """Return a text as Qwen's tokenizers write it."""
    return unicodedata.normalize("NFC", text)


def encodable(value: Any) -> Any:
    """Return the same without halves of surrogate pairs, which no tokenizer takes."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as templates take them: `content` is a text, and arguments are objects."""
    return [_plain(message) for message in messages]


def _plain(message: Message) -> dict[str, Any]:
    content = message.get("content") or ""
    if isinstance(content, list):
        [part] = content
        content = part["text"]
    role = "system" if message["role"] == "developer" else message["role"]
    read: dict[str, Any] = {"role": role, "content": encodable(content)}
    if message.get("reasoning_content"):
        read["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_call_id"):
        read["tool_call_id"] = message["tool_call_id"]
    if message.get("tool_calls"):
        functions = [call["function"] for call in message["tool_calls"]]
        read["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": each["name"], "arguments": encodable(json.loads(each["arguments"]))},
            }
            for each in functions
        ]
    return read


def said(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return for each message what it says: two messages that say the same are the same to the tree."""
    names: dict[str, str] = {}
    keys = []
    for message, read in zip(messages, plain(messages), strict=True):
        for call in message.get("tool_calls") or ():
            names[call["id"]] = call["function"]["name"]
        text = read["content"].strip() if read["role"] == "assistant" else read["content"]
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in read.get("tool_calls", ())]
        keys.append(json.dumps([read["role"], text, names.get(read.get("tool_call_id", "")), calls], sort_keys=True))
    return tuple(keys)
