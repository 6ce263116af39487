"""Subsentences for SSPO: from token ids and a tokenizer to segment ids.

A boundary falls after a token that ends a clause; closing quotes, brackets and white space stay with the clause they
close. The work is done on bytes, not on decoded text, because byte-level BPE may cut one character into several
tokens: a boundary then falls before the token that holds the next clause's first byte. One regular expression without
nested repetition runs over the bytes once, so time is linear whatever the text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

DELIMITERS = ".!?;:,\n。．！？；：，、"
_CLOSERS = ")]}>\u201d\u2019\u00bb）】』」》〉］｝"
_TWO_WAY = "\"'`*_$"  # open after white space, close elsewhere


def segment_ids(
    tokens: Sequence[int] | Tensor,
    tokenizer: Any,
    *,
    sequence: Sequence[int] | Tensor | None = None,
    delimiters: str = DELIMITERS,
    min_tokens: int = 1,
    keep_numbers: bool = True,
) -> Tensor:
    """Segment ids, from 0 and non-decreasing, for the tokens of one response or, with `sequence`, of a packed batch.

    `tokenizer` is a transformers or tokenizers one. `min_tokens` joins shorter segments to their neighbours;
    `keep_numbers` leaves `3.14`, `1,000` and `1{,}000` whole. A batch numbers its segments anew in every response.
    """
    if min_tokens < 1:
        raise ValueError(f"min_tokens={min_tokens} must be at least 1")
    if not delimiters:
        raise ValueError("delimiters is empty: without any, give no segments and use a response ratio (gspo)")
    ids = torch.as_tensor(tokens)
    if ids.ndim != 1:
        raise ValueError(f"segment_ids takes a flat list of token ids, got shape {tuple(ids.shape)}")
    spell = _speller(tokenizer)
    clause = _clause_end(delimiters, keep_numbers)
    out: list[int] = []
    for response in _responses(ids, sequence):
        out += _number_segments([spell(token) for token in response], clause, min_tokens)
    return torch.tensor(out, dtype=torch.int64, device=ids.device)


def _responses(ids: Tensor, sequence: Sequence[int] | Tensor | None) -> list[list[int]]:
    if sequence is None:
        return [ids.tolist()]
    owner = torch.as_tensor(sequence)
    if owner.shape != ids.shape:
        raise ValueError(f"sequence has shape {tuple(owner.shape)}, the tokens {tuple(ids.shape)}: one value per token")
    sizes = torch.unique_consecutive(owner, return_counts=True)[1].tolist()
    return [part.tolist() for part in torch.split(ids, sizes)] if sizes else []


def _number_segments(pieces: list[bytes], clause: re.Pattern[bytes], min_tokens: int) -> list[int]:
    """Segment ids of one response's tokens, given their bytes."""
    ends = list(accumulate(map(len, pieces)))
    text = b"".join(pieces)
    starts = [0]
    for match in clause.finditer(text):
        if match.end() == len(text):
            break
        closing = bisect_right(ends, match.end("last") - 1)
        opening = bisect_right(ends, match.end())
        if opening > closing and opening - starts[-1] >= min_tokens:
            starts.append(opening)
    if len(starts) > 1 and len(pieces) - starts[-1] < min_tokens:
        starts.pop()
    sizes = [after - before for before, after in zip(starts, [*starts[1:], len(pieces)], strict=True)]
    return [number for number, size in enumerate(sizes) for _ in range(size)]


@lru_cache(maxsize=64)
def _clause_end(delimiters: str, keep_numbers: bool) -> re.Pattern[bytes]:
    """A run of delimiters with what closes behind them; group `last` ends at the last delimiter.

    A delimiter behind a backslash is LaTeX's spacing (`\\,` `\\;` `\\!`), not the end of a clause.
    """
    marks = [re.escape(mark.encode()) for mark in delimiters]
    inside = rb"(?!(?<=[0-9])[.,][0-9])(?!(?<=[0-9]\{),\}[0-9])" if keep_numbers else b""
    mark = rb"(?<!\\)" + inside + b"(?:" + b"|".join(marks) + b")"
    closer = (
        b"(?:"
        + b"|".join(re.escape(c.encode()) for c in _CLOSERS)
        + rb"|\\[)\]}]|(?<!\s)["
        + re.escape(_TWO_WAY.encode())
        + rb"]|\s)"
    )
    filler = b"(?:(?!" + mark + b")" + closer + b")*"
    return re.compile(b"(?P<last>" + mark + b"(?:" + filler + mark + b")*)" + filler)


def _speller(tokenizer: Any) -> _Speller:
    try:
        known = _SPELLERS.get(tokenizer)
    except TypeError:  # not hashable or not weakly referable
        return _Speller(tokenizer)
    if known is None:
        known = _Speller(tokenizer)
        with suppress(TypeError):
            _SPELLERS[tokenizer] = known
    return known


class _Speller:
    """The bytes of every token id of a tokenizer, learnt as they are asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self.known: dict[int, bytes] = {}
        name = "convert_ids_to_tokens" if hasattr(tokenizer, "convert_ids_to_tokens") else "id_to_token"
        if not hasattr(tokenizer, name):
            raise ValueError(
                f"{type(tokenizer).__name__} is no tokenizer of transformers or tokenizers: it has no {name}"
            )
        self.piece = getattr(tokenizer, name)
        self.special = frozenset(getattr(tokenizer, "all_special_ids", None) or _added_specials(tokenizer))
        self.byte_level = self._is_byte_level(tokenizer)

    def __call__(self, token: int) -> bytes:
        """The bytes of one token; none for a special one, which belongs to the clause before it."""
        spelt = self.known.get(token)
        if spelt is None:
            spelt = self.known[token] = b"" if token in self.special else self._spell(token)
        return spelt

    def _spell(self, token: int) -> bytes:
        piece = self.piece(token)
        if piece is None:
            raise ValueError(
                f"token id {token} is not in the tokenizer's vocabulary: is it the tokenizer of this model?"
            )
        if self.byte_level:
            table = _byte_table()
            if all(character in table for character in piece):
                return bytes(table[character] for character in piece)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return str(piece).replace("\u2581", " ").encode("utf-8", "surrogatepass")

    @staticmethod
    def _is_byte_level(tokenizer: Any) -> bool:
        """Byte-level BPE writes a newline and a space as other letters; its added tokens are plain text."""
        encoded = tokenizer.encode("a b\n", add_special_tokens=False)
        ids = getattr(encoded, "ids", encoded)
        get = getattr(tokenizer, "convert_ids_to_tokens", None) or tokenizer.id_to_token
        return any("\u0120" in get(i) or "\u010a" in get(i) for i in ids)


def _added_specials(tokenizer: Any) -> set[int]:
    added: dict[int, Any] = getattr(tokenizer, "get_added_tokens_decoder", dict)()
    return {number for number, token in added.items() if token.special}


@lru_cache(maxsize=1)
def _byte_table() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, the other bytes for letters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_SPELLERS: WeakKeyDictionary[Any, _Speller] = WeakKeyDictionary()
