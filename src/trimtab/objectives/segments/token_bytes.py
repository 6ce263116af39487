"""The bytes of tokens, as a tokenizer's decoder would write them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

SPECIAL = b"\xff"  # stands for a special token: no UTF-8 text holds this byte; it closes a clause


def token_bytes(ids: Iterable[int], tokenizer: Any) -> dict[int, bytes]:
    """Return the bytes of all ids that are not special; `segment_ids` takes this mapping in place of a tokenizer."""
    return {token: text for token, text in bytes_by_id(ids, tokenizer).items() if text != SPECIAL}


def bytes_by_id(ids: Iterable[int], tokenizer: Any) -> dict[int, bytes]:
    """Return the bytes of every id, `SPECIAL` for special tokens and for ids that the tokenizer does not know."""
    # A model whose logits are padded beyond its tokenizer's vocabulary may sample unknown ids.
    if isinstance(tokenizer, Mapping):
        return {token: tokenizer.get(token, SPECIAL) for token in ids}
    inner, special = backend(tokenizer)
    byte_level = is_byte_level(inner)
    made = {}
    for token in ids:
        if token < 0:
            raise ValueError(f"{token} is no token id: leave masked and padded positions out")
        piece = None if token in special else inner.id_to_token(token)
        made[token] = SPECIAL if piece is None else _piece_bytes(piece, byte_level)
    return made


def backend(tokenizer: Any) -> tuple[Any, set[int]]:
    """Return the `tokenizers.Tokenizer` inside a tokenizer, and the ids of its special tokens."""
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(inner, "id_to_token"):
        kind = type(tokenizer).__name__
        raise ValueError(f"{kind} is neither a tokenizers.Tokenizer nor a fast transformers tokenizer")
    added = {number for number, token in inner.get_added_tokens_decoder().items() if token.special}
    return inner, added | set(getattr(tokenizer, "all_special_ids", ()))


def is_byte_level(inner: Any) -> bool:
    """Return whether tokens are written in the alphabet of byte-level BPE."""
    # Run the decoder: its type does not tell, it may be a sequence of several. U+0120 is that alphabet's space.
    return inner.decoder is not None and inner.decoder.decode(["a\u0120b"]) == "a b"


def _piece_bytes(piece: str, byte_level: bool) -> bytes:
    if byte_level and _BYTES.keys() >= set(piece):
        return bytes(map(_BYTES.__getitem__, piece))
    if not byte_level and re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    # SentencePiece writes a space as U+2581; added tokens of a byte-level tokenizer are plain text.
    return piece.replace("\u2581", " ").encode("utf-8", "surrogatepass")


def _byte_table() -> dict[str, int]:
    """Return the alphabet of byte-level BPE: printable Latin-1 is itself, other bytes are letters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_table()
