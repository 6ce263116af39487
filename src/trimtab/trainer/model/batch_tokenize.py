"""Encode and decode batches of texts in parallel, with the same result as the tokenizer gives one by one.

A fast tokenizer of transformers hands the whole batch to its Rust core here. A tokenizer that overrides the methods
involved is called text by text instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def encode_batch(tokenizer: Any, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    """Return the tokens of each text, as `tokenizer.encode` does."""
    if not texts or not _uses_shared_methods(tokenizer, ("encode", "__call__", "_encode_plus")):
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"]
    return ids


def decode_batch(tokenizer: Any, responses: Sequence[Sequence[int]]) -> list[str]:
    """Return the text of each response without special tokens, as `tokenizer.decode` does."""
    if _uses_shared_methods(tokenizer, ("decode", "_decode")) and not _cleans_up_spaces(tokenizer):
        # Not tokenizer.batch_decode: it goes through all tokens in Python and then decodes one response at a time.
        lists = [tokens if isinstance(tokens, list) else list(tokens) for tokens in responses]
        texts: list[str] = tokenizer.backend_tokenizer.decode_batch(lists, skip_special_tokens=True)
        return texts
    return [tokenizer.decode(list(tokens), skip_special_tokens=True) for tokens in responses]


def _uses_shared_methods(tokenizer: Any, methods: Sequence[str]) -> bool:
    """Return whether this is a fast tokenizer that overrides none of the methods."""
    from transformers import PreTrainedTokenizerFast as Fast

    if not isinstance(tokenizer, Fast):
        return False
    return all(getattr(getattr(tokenizer, name), "__func__", None) is getattr(Fast, name) for name in methods)


def _cleans_up_spaces(tokenizer: Any) -> bool:
    """Return whether `decode` removes spaces before punctuation, which the Rust core does not."""
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    # transformers ignores the flag above for BPE unless this one forces it; a version without this one may not.
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True)
    return forced or type(tokenizer.backend_tokenizer.model).__name__ != "BPE"
