"""How much a tokenizer.json may lengthen a text: a chain of a few replacements can make gigabytes of one letter.

A bound is computed from the description, before the tokenizer is built: that already normalizes its added tokens.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MAX_GROWTH = 200.0  # bytes for a byte of text; Qwen's tokenizers have 11
LONGEST_TOKEN = 4096  # characters: a response has thousands of tokens
LONGEST_TEMPLATE = 100  # parts, each of which may be the whole text
SEQUENCES = ("normalizers", "pretokenizers", "processors", "decoders")
PARTS = ("normalizer", "pre_tokenizer", "decoder")
# By what a step multiplies the length, and what it adds. NFKC makes 33 bytes of the three of an Arabic word, a space of
# Metaspace has up to four bytes, and ByteLevel writes two for each byte that is not ASCII.
GROWTH = {
    "NFC": (3.0, 0.0),
    "NFD": (3.0, 0.0),
    "NFKC": (11.0, 0.0),
    "NFKD": (11.0, 0.0),
    "Lowercase": (2.0, 0.0),
    "BertNormalizer": (3.0, 0.0),
    "ByteLevel": (2.0, 1.0),
    "Metaspace": (4.0, 4.0),
}
NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
IDEMPOTENT = (*NORMAL_FORMS, "Lowercase", "Metaspace")  # a second time they lengthen nothing


def check_growth(description: Any) -> None:
    """Raise ValueError if a part of a tokenizer.json may make a text longer than any tokenizer needs."""
    if not isinstance(description, Mapping):
        return
    _check_tokens(description)
    for name in PARTS:
        growth = _growth(description.get(name))
        if not growth <= MAX_GROWTH:
            raise ValueError(
                f"the {name} of tokenizer.json may make a text {growth:.3g} times as long, and {MAX_GROWTH:.0f} times "
                "is more than any needs: it has too many or too long replacements"
            )


def check_lengths(tokens: Iterable[Any], file: str) -> None:
    """Raise ValueError for a token of very many characters."""
    longest = max((len(token) for token in tokens if isinstance(token, str)), default=0)
    if longest > LONGEST_TOKEN:
        raise ValueError(f"a token of {file} has {longest:,} characters, which no token needs")


def _check_tokens(description: Mapping[str, Any]) -> None:
    """Raise ValueError for a token of very many characters, or a template that repeats the text again and again."""
    model = description.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None  # a table, or pairs of token and score
    tokens = [pair[0] for pair in vocabulary if pair] if isinstance(vocabulary, list) else list(vocabulary or ())
    tokens += [each.get("content") for each in _list(description, "added_tokens")]
    check_lengths(tokens, "tokenizer.json")
    for step in _steps(description.get("post_processor")):
        if max(len(_list(step, "single")), len(_list(step, "pair"))) > LONGEST_TEMPLATE:
            raise ValueError(f"the post_processor of tokenizer.json has more than {LONGEST_TEMPLATE} parts")
        special = step.get("special_tokens")
        for each in special.values() if isinstance(special, Mapping) else ():
            if len(_list(each, "ids")) > LONGEST_TEMPLATE:
                raise ValueError(
                    f"a special token in the post_processor of tokenizer.json is more than {LONGEST_TEMPLATE} tokens"
                )


def _growth(part: Any) -> float:
    """Return how many bytes a part makes of one, at most."""
    factor, added = 1.0, 0.0  # a piece of n bytes becomes factor * n + added
    done: set[str] = set()
    for step in _steps(part):
        kind = str(step.get("type"))
        grows, adds = _step_growth(step, kind)
        name = "normal form" if kind in NORMAL_FORMS else kind
        if name in done:
            grows = 1.0
        factor, added = factor * grows, added * grows + adds
        if kind in ("Replace", "Precompiled", "Prepend"):
            done.clear()  # what these write may be changed again
        elif kind in IDEMPOTENT:
            done.add(name)
    return factor + added  # pieces may have a single byte


def _step_growth(step: Mapping[str, Any], kind: str) -> tuple[float, float]:
    """Return by what a step multiplies the length of a piece, and what it adds."""
    if kind == "Replace":
        return _replacement(step), 0.0
    if kind == "Prepend":
        return 1.0, _size(step.get("prepend"))
    if kind == "Precompiled":
        return _longest_replacement(step.get("precompiled_charsmap")), 0.0
    return GROWTH.get(kind, (1.0, 4.0))  # the others add a space or a prefix at most


def _replacement(step: Mapping[str, Any]) -> float:
    pattern, content = step.get("pattern"), _size(step.get("content"))
    text = pattern.get("String") if isinstance(pattern, Mapping) else None
    # A regular expression may match nothing, between any two letters.
    return max(1.0, content / len(text.encode())) if isinstance(text, str) and text else 1.0 + content


def _longest_replacement(charsmap: Any) -> float:
    """Return the longest text that SentencePiece's table of characters has for one of them."""
    blob = base64.b64decode(charsmap) if isinstance(charsmap, str) else bytes(charsmap or b"")
    texts = blob[4 + int.from_bytes(blob[:4], "little") :]  # behind a tree of that size
    return float(max(1, *map(len, texts.split(b"\0"))))


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a part in their order, with those of sequences in sequences."""
    left = [part]
    while left:
        step = left.pop()
        inner = [each for key in SEQUENCES for each in _list(step, key)]
        if inner:
            left += reversed(inner)
        elif isinstance(step, Mapping):
            yield step


def _list(step: Any, key: str) -> list[Any]:
    value = step.get(key) if isinstance(step, Mapping) else None
    return value if isinstance(value, list) else []


def _size(text: Any) -> float:
    return float(len(text.encode("utf-8", "surrogatepass"))) if isinstance(text, str) else 0.0
