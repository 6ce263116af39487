"""A tokenizer.json that makes gigabytes of a letter is refused before it is used; those in use are not."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from trimtab.trainer.model import demo_model, demo_tokenizer, load_policy
from trimtab.trainer.model.pretrained import MAX_GROWTH, _growth, check_growth


def described(**parts: Any) -> dict[str, Any]:
    made = Tokenizer(models.BPE({"a": 0}, []))
    for name, part in parts.items():
        setattr(made, name, part)
    found: dict[str, Any] = json.loads(made.to_str())
    return found


def chain(kind: Any, steps: list[Any]) -> Any:
    return kind.Sequence(steps)


TWICE = normalizers.Replace("a", "aa")
HOSTILE = {
    "normalizer": described(normalizer=chain(normalizers, [TWICE] * 30)),
    "sequences in sequences": described(normalizer=chain(normalizers, [chain(normalizers, [TWICE] * 5)] * 6)),
    "decoder": described(decoder=chain(decoders, [decoders.Replace("a", "aa")] * 30)),
    "a pattern of nothing": described(normalizer=chain(normalizers, [normalizers.Replace(Regex("x*"), "yy")] * 12)),
    "prepend": described(normalizer=chain(normalizers, [normalizers.Prepend("a" * 50), *[TWICE] * 3])),
    "one long replacement": described(normalizer=normalizers.Replace("a", "b" * 1000)),
    "letters of bytes": described(
        pre_tokenizer=chain(pre_tokenizers, [pre_tokenizers.ByteLevel(add_prefix_space=False)] * 30)
    ),
    "what a normal form makes is replaced again": described(
        normalizer=chain(normalizers, [normalizers.Replace("ل", "ﷺ"), normalizers.NFKC()] * 3)
    ),
    "a table": {
        "normalizer": {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode((4).to_bytes(4, "little") + b"tree" + b"x" * 900 + b"\0").decode(),
        }
    },
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_chain_that_makes_a_text_long_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=r"of tokenizer\.json may make a text .* times as long"):
        check_growth(HOSTILE[kind])


def with_token(token: str, kind: str) -> dict[str, Any]:
    vocabulary: Any = {"a": 0, token: 1} if kind == "BPE" else [["a", 0.0], [token, 0.0]]
    added = [{"content": token}] if kind == "added" else []
    return {"model": {"vocab": {} if kind == "added" else vocabulary}, "added_tokens": added}


@pytest.mark.parametrize("kind", ["BPE", "Unigram", "added"])
def test_a_token_of_thousands_of_characters_is_refused(kind: str) -> None:
    check_growth(with_token(" " * 512, kind))
    with pytest.raises(ValueError, match=r"a token of tokenizer\.json has 1,000,000 characters"):
        check_growth(with_token("x" * 1_000_000, kind))


@pytest.mark.parametrize("parts", [{"single": [{"Sequence": {"id": "A"}}] * 1000}, {"pair": [{}] * 1000}])
def test_a_template_that_repeats_the_text_is_refused(parts: dict[str, Any]) -> None:
    processor = {"type": "TemplateProcessing", "single": [], "pair": [], **parts}
    for described_as in (processor, {"type": "Sequence", "processors": [processor]}):
        with pytest.raises(ValueError, match=r"the post_processor of tokenizer\.json has more than 100 parts"):
            check_growth({"post_processor": described_as})


def test_a_special_token_of_many_tokens_is_refused() -> None:
    """A hundred parts of a template may each be this one."""
    written = {"type": "TemplateProcessing", "special_tokens": {"<s>": {"id": "<s>", "ids": [1] * 1000}}}
    with pytest.raises(ValueError, match=r"a special token in the post_processor of tokenizer\.json is more than 100"):
        check_growth({"post_processor": written})


@pytest.mark.parametrize("description", [None, [], {"model": 1}, {"added_tokens": 2, "post_processor": []}])
def test_what_describes_no_tokenizer_is_left_to_its_reader(description: Any) -> None:
    check_growth(description)


LLAMA = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
USUAL = {
    "Llama": described(
        normalizer=chain(normalizers, LLAMA),
        decoder=chain(decoders, [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    ),
    "Qwen": described(
        normalizer=normalizers.NFC(),
        pre_tokenizer=chain(
            pre_tokenizers, [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(False)]
        ),
        decoder=decoders.ByteLevel(),
    ),
    "ALBERT": described(
        normalizer=chain(
            normalizers,
            [
                normalizers.Replace("``", '"'),
                normalizers.Replace("''", '"'),
                normalizers.NFKD(),
                normalizers.StripAccents(),
                normalizers.Lowercase(),
                normalizers.Replace(Regex(" {2,}"), " "),
            ],
        ),
        pre_tokenizer=pre_tokenizers.Metaspace(),
        decoder=decoders.Metaspace(),
    ),
    "BERT": described(normalizer=normalizers.BertNormalizer(), decoder=decoders.WordPiece()),
    "T5": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\0" * 4 + b"y" * 33).decode()},
                {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
            ],
        }
    },
    "none": {},
}


@pytest.mark.parametrize("kind", USUAL)
def test_usual_tokenizers_are_within_the_bound(kind: str) -> None:
    check_growth(USUAL[kind])


@pytest.mark.parametrize("text", ["a", " ", "ab", "ß", "ﷺ", "İ", "½", "a a", "\u0390", "🤖"])
@pytest.mark.parametrize("steps", [LLAMA, [normalizers.NFKC(), TWICE], [TWICE, TWICE], [normalizers.Lowercase()]])
def test_the_bound_holds(text: str, steps: list[Any]) -> None:
    normalizer = chain(normalizers, steps)
    grown = len(normalizer.normalize_str(text).encode()) / len(text.encode())
    assert grown <= _growth(described(normalizer=normalizer)["normalizer"]) <= MAX_GROWTH


def test_a_model_with_such_a_tokenizer_is_not_loaded(tmp_path: Path) -> None:
    demo_model(0).save_pretrained(tmp_path)
    demo_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["normalizer"] = HOSTILE["normalizer"]["normalizer"]
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"cannot be loaded: the normalizer of tokenizer\.json may make a text"):
        load_policy(str(tmp_path), device="cpu")


def test_a_token_that_another_file_adds_is_measured_too(tmp_path: Path) -> None:
    demo_model(0).save_pretrained(tmp_path)
    demo_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    added = {"content": "<" + "x" * 100_000 + ">", "special": True, "lstrip": False, "rstrip": False}
    content = json.loads(file.read_text())
    content["added_tokens_decoder"] = {"9": added | {"normalized": False, "single_word": False}}
    content["extra_special_tokens"] = [added["content"]]
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"a token of the tokenizer has 100,002 characters"):
        load_policy(str(tmp_path), device="cpu")
