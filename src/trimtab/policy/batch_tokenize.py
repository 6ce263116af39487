"""Texts to tokens and back, many at a time and in parallel, as the tokenizer does it one by one.

A fast tokenizer of transformers leaves the work to a core in Rust, which is asked for a whole batch here; one that does
something of its own before or after is left to do so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def encode_texts(tokenizer: Any, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    """The tokens of each text, as `tokenizer.encode` gives them."""
    if not texts or not _is_plain(tokenizer, ("encode", "__call__", "_encode_plus")):
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"]
    return ids


def decode_texts(tokenizer: Any, responses: Sequence[Sequence[int]]) -> list[str]:
    """The text of each response without special tokens, as `tokenizer.decode` gives it."""
    if _is_plain(tokenizer, ("decode", "_decode")) and not _cleans_up(tokenizer):
        # transformers itself would go through all tokens in Python first, and then decode one response at a time.
        lists = [tokens if isinstance(tokens, list) else list(tokens) for tokens in responses]
        texts: list[str] = tokenizer.backend_tokenizer.decode_batch(lists, skip_special_tokens=True)
        return texts
    return [tokenizer.decode(list(tokens), skip_special_tokens=True) for tokens in responses]


def _is_plain(tokenizer: Any, methods: Sequence[str]) -> bool:
    """Whether it is a fast tokenizer whose methods are those that all of them share."""
    from transformers import PreTrainedTokenizerFast as Fast

    if not isinstance(tokenizer, Fast):
        return False
    return all(getattr(getattr(tokenizer, name), "__func__", None) is getattr(Fast, name) for name in methods)


def _cleans_up(tokenizer: Any) -> bool:
    """Whether it takes spaces out of what it decoded: those with BPE do so only where they are forced to."""
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True)
    return forced or type(tokenizer.backend_tokenizer.model).__name__ != "BPE"
