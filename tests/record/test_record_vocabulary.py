"""The recorded vocabulary decodes as the tokenizer does, whatever the kind of tokenizer."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers.objectives.made_tokenizers import byte_level_bpe
from trimtab.objectives import segment_ids
from trimtab.objectives.segments import token_bytes
from trimtab.record import Vocabulary
from trimtab.trainer.model.loading import demo_tokenizer
from trimtab.trainer.train.recording import tokenizer_vocabulary

TEXTS = [
    "First, add 3.5 and 1,000. Then stop; is it right?",
    "Ein Übermaß an Öl – 12:30 Uhr!",
    "答案是 42。对吗？",
    "emoji 🤖👍🏽 and a\ttab\nand a line",
    "",
]


def byte_level() -> Any:
    """As Qwen and Llama 3 have it: characters beyond ASCII are cut into bytes."""
    inner = byte_level_bpe(TEXTS, 300, ["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def byte_fallback() -> Any:
    """Like Llama 2: words start with a low line, unknown characters are spelt as <0x..>."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghiklmnoprstuvx.,?;", "▁and"]
    vocabulary = {piece: n for n, piece in enumerate(dict.fromkeys(pieces))}
    inner = Tokenizer(models.BPE(vocabulary, [("▁", "a")][:0], unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")


def recorded(tokenizer: Any) -> Vocabulary:
    """The vocabulary of a model with seven logits more than the tokenizer has tokens."""
    return tokenizer_vocabulary(tokenizer, len(tokenizer) + 7)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_back_piece_by_piece(make: Any, text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False)
    vocabulary = recorded(tokenizer)
    pieces = vocabulary.pieces(ids)
    assert len(pieces) == len(ids)
    assert (
        "".join(pieces) == vocabulary.decode(ids) == tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    )


@pytest.mark.parametrize("make", [byte_level, byte_fallback, demo_tokenizer])
def test_special_tokens_have_a_name_and_no_part_in_the_text(make: Any) -> None:
    tokenizer = make()
    vocabulary, end = recorded(tokenizer), tokenizer.eos_token_id
    assert vocabulary.is_special(end) and vocabulary.pieces([end]) == [tokenizer.eos_token]
    beyond = len(tokenizer)
    assert vocabulary.is_special(beyond) and vocabulary.pieces([beyond]) == [f"<{beyond}>"]
    assert len(vocabulary) == len(tokenizer) + 7


@pytest.mark.parametrize("make", [byte_level, byte_fallback, demo_tokenizer])
def test_subsentences_are_the_same_with_and_without_the_tokenizer(make: Any) -> None:
    tokenizer = make()
    vocabulary = recorded(tokenizer)
    for text in TEXTS:
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id, len(tokenizer)]
        assert torch.equal(segment_ids(ids, vocabulary.text_bytes), segment_ids(ids, tokenizer))


def test_the_table_of_bytes_holds_what_is_not_special() -> None:
    tokenizer = byte_level()
    table = token_bytes(range(len(tokenizer) + 3), tokenizer)
    assert tokenizer.eos_token_id not in table and len(tokenizer) not in table
    assert set(table.values()) >= {b"a", b"\n", "ü".encode()[:1]}


def test_a_broken_character_at_the_end_is_shown_as_such() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("ok 🤖", add_special_tokens=False)
    vocabulary = recorded(tokenizer)
    whole = vocabulary.pieces(ids)
    cut = vocabulary.pieces(ids[:-1])
    assert "".join(whole) == "ok 🤖" and (cut == whole[:-1] or "".join(cut).endswith("\ufffd"))


def test_the_text_of_tokens_is_their_pieces_together_however_characters_are_cut() -> None:
    cut = ["ü".encode()[:1], "ü".encode()[1:], "🤖".encode()[:2], "🤖".encode()[2:], "€".encode()[:2], "€".encode()[2:]]
    broken = [b"\xff", b"\x80", b"\xc0", b"\xed\xa0\x80", b"\xf4\x90", b"", b"a", b"<end>"]
    vocabulary = Vocabulary([*cut, *broken], [False] * 14)
    draw = Random(0)
    for _ in range(2000):
        tokens = [draw.randrange(-1, 16) for _ in range(draw.randrange(9))]
        assert vocabulary.decode(tokens) == "".join(vocabulary.pieces(tokens)), tokens
