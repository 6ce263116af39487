"""Batch tokenization gives the same tokens and texts as one by one, also for tokenizers with overridden methods."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from helpers.objectives.made_tokenizers import byte_level_bpe
from trimtab.grading import grade
from trimtab.trainer.model import Policy
from trimtab.trainer.model.loading import demo_tokenizer
from trimtab.workers import calls

SMOLLM2 = Path(os.environ.get("TRIMTAB_CACHE", "~/.cache/trimtab")).expanduser() / "smollm2-135m-instruct"
TEXTS = ["12+3=", "So , it 's 1 . Right ?", "Ein Übermaß – 答案是 42。", "emoji 🤖👍🏽\tand a\nline", " ", ""]
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}<s>assistant: "


def byte_level(kind: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast, **options: Any) -> Any:
    """Return a byte-level BPE tokenizer (as Qwen's and Llama 3's) with a start-of-text token."""
    inner = byte_level_bpe(TEXTS, 300, ["<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return kind(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", **options)


def word_pieces() -> Any:
    """Return a WordPiece tokenizer (as BERT's), which removes spaces before punctuation when it decodes."""
    words = ["[UNK]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz0123456789.,?'", "##s", "so", "it", "right"]
    inner = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="[SEP]", clean_up_tokenization_spaces=True)


def forced() -> Any:
    """Return a byte-level tokenizer that is forced to remove spaces before punctuation."""
    flag = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    return byte_level(clean_up_tokenization_spaces=True, **{flag: True})


class UpperCase(PreTrainedTokenizerFast):
    """A tokenizer that overrides `decode` and `encode`."""

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        return super().decode(*args, **kwargs).upper()

    def encode(self, text: str, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().encode(text.upper(), **kwargs)


class UpperCaseInside(PreTrainedTokenizerFast):
    """A tokenizer that overrides what `decode` and `encode` call."""

    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return super()._decode(*args, **kwargs).upper()

    def _encode_plus(self, text: Any, **kwargs: Any) -> Any:
        alone = isinstance(text, str)
        return super()._encode_plus(text.upper() if alone else text, **kwargs)


class ByteTokenizer:
    """A tokenizer that is not of transformers: tokens are bytes."""

    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [*text.encode(), *([0] if add_special_tokens else [])]

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return bytes(token for token in tokens if token or not skip_special_tokens).decode(errors="replace")


def smollm2() -> Any:
    if not (SMOLLM2 / "tokenizer.json").exists():
        pytest.skip("no SmolLM2 here: `trimtab train smollm2` makes its folder")
    return AutoTokenizer.from_pretrained(SMOLLM2)


TOKENIZERS = {
    "demo": demo_tokenizer,
    "byte level": byte_level,
    "byte level, clean-up ignored": lambda: byte_level(clean_up_tokenization_spaces=True),
    "byte level, clean-up forced": forced,
    "word pieces, clean-up": word_pieces,
    "overridden decode": lambda: byte_level(UpperCase),
    "overridden _decode": lambda: byte_level(UpperCaseInside),
    "not of transformers": ByteTokenizer,
    "SmolLM2": smollm2,
}
PLAIN = ("demo", "byte level", "byte level, clean-up ignored", "SmolLM2")
OVERRIDDEN = ("byte level, clean-up forced", "word pieces, clean-up", "overridden decode", "overridden _decode")


@cache
def policy(name: str, chat: bool = False) -> Policy:
    """Return a policy without a model, for its tokenizer."""
    return Policy(None, TOKENIZERS[name](), torch.device("cpu"), chat=chat)


def size(name: str) -> int:
    return 256 if name == "not of transformers" else len(policy(name).tokenizer)


# From tokens to texts.


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_responses_are_decoded_together_as_one_by_one(name: str, data: st.DataObject) -> None:
    """Special tokens, bytes that are no UTF-8 and empty responses among them."""
    token = st.integers(0, size(name) - 1)
    responses = data.draw(st.lists(st.lists(token, max_size=12), max_size=6))
    assert policy(name).decode_batch(responses) == [policy(name).decode(tokens) for tokens in responses]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_responses_may_be_lists_or_tuples(name: str) -> None:
    ours = policy(name)
    responses = [ours.tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    one_by_one = [ours.decode(tokens) for tokens in responses]
    assert ours.decode_batch(responses) == one_by_one
    assert ours.decode_batch(tuple(map(tuple, responses))) == one_by_one
    assert ours.decode_batch([]) == []


def test_bytes_that_are_not_utf8_become_replacement_characters() -> None:
    tokenizer = policy("byte level").tokenizer
    robot = tokenizer.encode("🤖", add_special_tokens=False)
    texts = policy("byte level").decode_batch([robot[:-1], [tokenizer.eos_token_id], [*robot, tokenizer.eos_token_id]])
    assert texts[0].startswith("\ufffd")
    assert texts[1:] == ["", "🤖"]


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_tokenizer_decodes_a_batch_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = policy(name)
    expected = ours.decode([3, 4])
    monkeypatch.setattr(PreTrainedTokenizerFast, "_decode", lambda *_, **__: pytest.fail("decoded one by one"))
    assert ours.decode_batch([[3, 4]] * 3) == [expected] * 3


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_overridden_methods_are_used(name: str) -> None:
    """The Rust core alone would give another text."""
    ours = policy(name)
    tokens = ours.tokenizer.backend_tokenizer.encode("so , it 's right", add_special_tokens=False).ids
    core = ours.tokenizer.backend_tokenizer.decode(tokens)
    assert ours.decode_batch([tokens]) == [ours.decode(tokens)] != [core]


def test_a_method_set_on_one_instance_is_used() -> None:
    tokenizer = byte_level()
    tokenizer.decode = lambda tokens, skip_special_tokens: f"{len(tokens)} tokens"
    assert Policy(None, tokenizer, torch.device("cpu")).decode_batch([[5, 6, 7], []]) == ["3 tokens", "0 tokens"]


def test_without_the_flag_that_exempts_bpe_transformers_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level(clean_up_tokenization_spaces=True)
    del tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output

    def decode(self: Any, token_ids: list[int], skip_special_tokens: bool = False, **_: Any) -> Any:
        return self.clean_up_tokenization(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    monkeypatch.setattr(PreTrainedTokenizerFast, "_decode", decode)
    tokens = tokenizer.encode("So , it 's 1 .", add_special_tokens=False)
    assert Policy(None, tokenizer, torch.device("cpu")).decode_batch([tokens]) == ["So, it's 1."]


# From texts to tokens.


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("chat", [False, True])
def test_prompts_are_encoded_together_as_one_by_one(name: str, chat: bool) -> None:
    ours = policy(name, chat)
    prompts = [[{"role": "user", "content": text}, {"role": "user", "content": text[:3]}] for text in TEXTS]
    assert ours.encode_batch(prompts) == [ours.encode(messages) for messages in prompts]
    assert ours.encode_batch([]) == []


@pytest.mark.parametrize("chat", [False, True])
def test_a_chat_template_is_filled_in_for_every_prompt(chat: bool) -> None:
    tokenizer = byte_level(chat_template=TEMPLATE)
    ours = Policy(None, tokenizer, torch.device("cpu"), chat=chat)
    prompts = [[{"role": "user", "content": text}] for text in TEXTS]
    encoded = ours.encode_batch(prompts)
    assert encoded == [ours.encode(messages) for messages in prompts]
    marks = [2 if chat else 1] * len(TEXTS)
    assert [ids.count(tokenizer.bos_token_id) for ids in encoded] == marks
    assert ("user: " in tokenizer.decode(encoded[0])) == chat


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_tokenizer_encodes_a_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = policy(name)
    prompts = [[{"role": "user", "content": text}] for text in ("1+2=", "3")]
    expected = [ours.encode(messages) for messages in prompts]
    monkeypatch.setattr(PreTrainedTokenizerFast, "encode", lambda *_, **__: pytest.fail("encoded one by one"))
    assert ours.encode_batch(prompts) == expected


# With worker processes.


def test_a_grader_that_starts_after_parallel_work_starts_quietly(capfd: pytest.CaptureFixture[str]) -> None:
    """The grader's process is not forked from the one whose tokenizer runs threads."""
    calls.close()
    assert len(policy("byte level").decode_batch([[5, 6, 7]] * 2000)) == 2000
    assert grade(r"so \boxed{\sin^2 x + \cos^2 x}", "1", "math").kind == "correct"
    calls.close()
    assert capfd.readouterr().err == ""
