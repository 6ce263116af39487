"""Text of a chat template with words from outside in it, as tokens: markup in those words stays text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from trimtab.agents.reply_template import ObservedText

PIECE = 1 << 16  # characters that are tokenized at a time: up to 1 KB of memory for each
CUT_TOKENS = 256  # a cut in the middle of a word or token adds at most so many
THINKING = ("<think>", "</think>")


class ChatTooLongError(ValueError):
    """A conversation has more tokens than the model takes."""


class ProtectedText:
    """Hides the markup in words from outside while a template is rendered, and encodes it as plain text afterwards."""

    def __init__(self, tokenizer: Any, observed: ObservedText) -> None:
        self.tokenizer, self.observed = tokenizer, observed
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            backend.no_truncation()
            backend.no_padding()
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.flags = {token.content: token for number, token in added.items() if number in observed.markup}
        numbers = {tokenizer.convert_ids_to_tokens(number): number for number in observed.markup}
        self.numbers: dict[str, int] = {content: number for content, number in numbers.items() if content}
        self.literals = sorted(self.numbers, key=len, reverse=True)
        # Nobody can write these into a message: they are made anew in each process.
        stamp = secrets.token_hex(8)
        self.hidden = {literal: f"Q{stamp}n{number:06d}Q" for number, literal in enumerate(self.literals)}
        self.shown = {hidden: literal for literal, hidden in self.hidden.items()}
        self._literal = _pattern(self.literals)
        self._not_thinking = _pattern([literal for literal in self.literals if literal not in THINKING])
        self._stamp = f"Q{stamp}n"
        self._any = re.compile(rf"({self._stamp}\d{{6}}Q)|{self._literal.pattern}")
        self._special = _pattern(sorted(tokenizer.all_special_tokens, key=len, reverse=True))

    def hide(self, value: Any) -> Any:
        """Return a text, or the texts in lists and objects, with other words for markup."""
        if isinstance(value, str):
            return self._literal.sub(lambda found: self.hidden[found[0]], value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(each) for key, each in value.items()}
        return [self.hide(each) for each in value] if isinstance(value, list | tuple) else value

    def hide_in_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message with other words for markup; the assistant's may have blocks of reasoning."""
        hidden = {key: value if key == "role" else self.hide(value) for key, value in message.items()}
        if message["role"] == "assistant":
            hidden["content"] = self._not_thinking.sub(lambda found: self.hidden[found[0]], message["content"])
        return hidden

    def encode(self, text: str, limit: int) -> list[int]:
        """Return the tokens of what a template wrote; what was hidden is plain text again."""
        self.check_length(text, limit)
        if self._stamp not in text:
            return self.observed.encode_markup(text)
        ids: list[int] = []
        run, position, stripping = "", 0, False
        for found in self._any.finditer(text):
            before = text[position : found.start()]
            run += before.lstrip() if stripping and not run else before
            position = found.end()
            if found[1]:
                run += self.shown.get(found[1], "")
                continue
            token = self.flags.get(found[0])
            ids += self.observed.encode(run.rstrip() if token is not None and token.lstrip else run)
            ids.append(self.numbers[found[0]])
            run, stripping = "", token is not None and token.rstrip
        run += text[position:].lstrip() if stripping and not run else text[position:]
        return ids + self.observed.encode(run)

    def encode_prompt(self, text: str, limit: int) -> list[int]:
        """Return the tokens of a prompt without a template, with those that the tokenizer puts around each."""
        self.check_length(text, limit)
        if not self._literal.search(text):
            return list(self.tokenizer.encode(text, add_special_tokens=True))
        around: list[int] = self.tokenizer.encode("", add_special_tokens=True)
        return [*around, *self.observed.encode(text)]

    def check_length(self, text: str, limit: int) -> None:
        """Raise ChatTooLongError for a long text of more than `limit` tokens, without tokenizing it whole."""
        tokens = 0
        for start in range(0, len(text), PIECE) if len(text) > PIECE else ():
            tokens += len(self.observed.encode_markup(text[start : start + PIECE])) - CUT_TOKENS
            if tokens > limit:
                raise ChatTooLongError(f"{len(text):,} characters are more than {limit:,} tokens")

    def without_special(self, text: str) -> str:
        """Return a text without the names of special tokens."""
        return self._special.sub("", text)


def _pattern(literals: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, literals)) or r"(?!)")
