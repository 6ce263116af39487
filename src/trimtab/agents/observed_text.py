"""Tokens of text that comes from outside: markup in it stays text, whatever it looks like."""

from __future__ import annotations

import json
from typing import Any


class ObservedText:
    """Encodes text without ever producing a special token, or another token that stands for markup.

    transformers' `split_special_tokens=True` is not enough: it concerns tokens that are marked as special, and Qwen's
    <tool_call> and <think> are not. So the tokenizer's core is used without such tokens. It may be called from many
    threads, since nothing in it changes.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.markup = {number for number, token in added.items() if _is_markup(token.content, token.special)}
        self.markup |= set(tokenizer.all_special_ids)
        self._core: Any = None
        self._markup_core: Any = None
        if hasattr(tokenizer, "backend_tokenizer"):
            self._core, self._markup_core = _cores(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of text from outside; what the vocabulary can only say by a special token is left out."""
        # A lone half of a surrogate pair cannot be encoded at all.
        text = text.encode("utf-8", "replace").decode()
        if self._core is not None:
            ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        else:
            ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        # A vocabulary of words or of sentence pieces holds its special tokens too, and unknown text becomes one.
        return [number for number in ids if number not in self.markup]

    def encode_markup(self, text: str) -> list[int]:
        """Return the tokens of what the chat template writes, markup included."""
        if self._markup_core is not None:
            ids: list[int] = self._markup_core.encode(text, add_special_tokens=False).ids
            return ids
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def _cores(tokenizer: Any) -> tuple[Any, Any]:
    """Return the core without tokens of markup, and one with them where the tokenizer itself would add spaces."""
    from tokenizers import Tokenizer, models

    backend = tokenizer.backend_tokenizer
    # The parts before the model, alone: all of Qwen's tokenizer as JSON and back takes seconds.
    shell = Tokenizer(models.BPE())
    shell.normalizer, shell.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    described = json.loads(shell.to_str())
    before = described["normalizer"], described["pre_tokenizer"]
    after = tuple(map(_without_prefix, before))
    described["normalizer"], described["pre_tokenizer"] = after
    kept = [token for token in tokenizer.added_tokens_decoder.values() if not _is_markup(token.content, token.special)]
    if not kept:
        parts = Tokenizer.from_str(json.dumps(described))
        core = Tokenizer(backend.model)  # shared, not copied
        core.normalizer, core.pre_tokenizer = parts.normalizer, parts.pre_tokenizer
    if kept or before != after:
        # Added tokens have numbers of their own, which only the whole description keeps.
        whole = json.loads(backend.to_str())
        whole["normalizer"], whole["pre_tokenizer"], whole["truncation"], whole["padding"] = *after, None, None
        markup_core = Tokenizer.from_str(json.dumps(whole)) if before != after else None
        whole["added_tokens"] = [
            token for token in whole["added_tokens"] if not _is_markup(token["content"], token["special"])
        ]
        return Tokenizer.from_str(json.dumps(whole)), markup_core
    return core, None


def _is_markup(content: str, special: bool) -> bool:
    """Return whether an added token is markup: special, or with signs in it; words and runs of spaces are none."""
    return special or not all(character.isalnum() or character.isspace() for character in content)


def _without_prefix(part: Any) -> Any:
    """Return a normalizer or pre-tokenizer that puts no space before the text: it is not the beginning of anything."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    changed = {
        key: [_without_prefix(each) for each in value] if isinstance(value, list) else value
        for key, value in part.items()
    }
    if part.get("type") == "Metaspace":
        changed["prepend_scheme"] = "never"
    if part.get("type") == "ByteLevel":
        changed["add_prefix_space"] = False
    return changed
