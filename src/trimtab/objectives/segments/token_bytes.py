"""The bytes of token ids, as a tokenizer's decoder makes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

SPECIAL = b"\xff"  # stands for a special token: no text holds this byte, and it closes


def token_bytes(ids: Iterable[int], tokenizer: Any) -> dict[int, bytes]:
    """The bytes of those of the ids that are not special: what `segment_ids` takes in place of a tokenizer."""
    return {token: text for token, text in spelling(ids, tokenizer).items() if text != SPECIAL}


def spelling(ids: Iterable[int], tokenizer: Any) -> dict[int, bytes]:
    """The bytes of token ids, as the tokenizer's decoder makes them.

    Ids that it does not know are taken for special ones: a model with more logits than its tokenizer has tokens may
    sample them.
    """
    if isinstance(tokenizer, Mapping):
        return {token: tokenizer.get(token, SPECIAL) for token in ids}
    inner, special = backend(tokenizer)
    byte_level = is_byte_level(inner)
    made = {}
    for token in ids:
        if token < 0:
            raise ValueError(f"{token} is no token id: leave masked and padded positions out")
        piece = None if token in special else inner.id_to_token(token)
        made[token] = SPECIAL if piece is None else _spell(piece, byte_level)
    return made


def backend(tokenizer: Any) -> tuple[Any, set[int]]:
    """The `tokenizers.Tokenizer`, and the ids of special tokens."""
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(inner, "id_to_token"):
        raise ValueError(
            f"{type(tokenizer).__name__} is neither a tokenizers.Tokenizer nor a fast transformers tokenizer"
        )
    added = {number for number, token in inner.get_added_tokens_decoder().items() if token.special}
    return inner, added | set(getattr(tokenizer, "all_special_ids", ()))


def is_byte_level(inner: Any) -> bool:
    """Whether its pieces are spelt in byte-level BPE's alphabet."""
    return inner.decoder is not None and inner.decoder.decode(["a\u0120b"]) == "a b"


def _spell(piece: str, byte_level: bool) -> bytes:
    if byte_level and _BYTES.keys() >= set(piece):
        return bytes(map(_BYTES.__getitem__, piece))
    if not byte_level and re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("\u2581", " ").encode("utf-8", "surrogatepass")


def _byte_table() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, the other bytes for letters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_table()
