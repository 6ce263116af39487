"""Subsentences for SSPO: from token ids and a tokenizer to segment ids.

A clause ends with a delimiter and what closes behind it: more delimiters, closing quotes and brackets, white space. The
boundary is the last edge of a token from the end of that delimiter to the start of the next clause; a token that holds
both leaves none. The work is done on bytes, because byte-level BPE cuts characters into several tokens, and an edge
inside a character is no boundary. Every byte is read a bounded number of times, so time is linear whatever the text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

DELIMITERS = ".!?;:,\n。．！？；：，、"
_CLOSERS = ")]}\u201d\u2019\u00bb）】〕』」》〉］｝\u00a0\u3000"  # the last two are white space beyond ASCII
_SPECIAL = b"\xff"  # stands for a special token: no text holds this byte, and it closes


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

    `tokenizer` is a `tokenizers.Tokenizer`, a fast one of transformers, or a table of the bytes of every token that is
    not special (`token_bytes`). `min_tokens` joins shorter segments to their neighbours; `keep_numbers` leaves `3.14`,
    `1,000`, `.5`, `12:30`, `1{,}000` and `1,\\!000` whole. A batch numbers its segments anew in every response.
    """
    if min_tokens < 1:
        raise ValueError(f"min_tokens={min_tokens} must be at least 1")
    if not delimiters:
        raise ValueError("delimiters is empty: without any, give no segments and use a response ratio (gspo)")
    ids = torch.as_tensor(tokens)
    if ids.ndim != 1:
        raise ValueError(f"segment_ids takes a flat list of token ids, got shape {tuple(ids.shape)}")
    responses = _responses(ids, sequence)
    spelling, clause_ends = _spelling(set().union(*responses), tokenizer), _clause_ends(delimiters, keep_numbers)
    numbers: list[int] = []
    sizes: list[int] = []
    for response in responses:
        starts = _starts([spelling[token] for token in response], clause_ends, min_tokens)
        numbers += range(len(starts))
        sizes += [after - before for before, after in pairwise([*starts, len(response)])]
    repeats = torch.tensor(sizes, dtype=torch.int64)
    return torch.tensor(numbers, dtype=torch.int64).repeat_interleave(repeats).to(ids.device)


def _responses(ids: Tensor, sequence: Sequence[int] | Tensor | None) -> list[list[int]]:
    every: list[int] = ids.tolist()
    if sequence is None:
        return [every]
    owner = torch.as_tensor(sequence)
    if owner.shape != ids.shape:
        raise ValueError(f"sequence has shape {tuple(owner.shape)}, the tokens {tuple(ids.shape)}: one value per token")
    sizes = torch.unique_consecutive(owner, return_counts=True)[1].tolist()
    return [every[first:last] for first, last in pairwise(accumulate(sizes, initial=0))]


def _starts(pieces: list[bytes], clause_ends: re.Pattern[bytes], min_tokens: int) -> list[int]:
    """The first token of each segment of one response, given its tokens' bytes."""
    text = b"".join(pieces)
    edges = list(accumulate(map(len, pieces), initial=0))
    starts = [0]
    for found in clause_ends.finditer(text):
        delimited, end = found.end(1), found.end()
        token = bisect_right(edges, end) - 1
        while delimited < edges[token] < end and text[edges[token]] & 0xC0 == 0x80:
            token -= 1  # this edge is inside a character
        if delimited <= edges[token] and token - starts[-1] >= min_tokens:
            starts.append(token)
    if len(starts) > 1 and len(pieces) - starts[-1] < min_tokens:  # too short, or the end of the text
        starts.pop()
    return starts


@lru_cache(maxsize=64)
def _clause_ends(delimiters: str, keep_numbers: bool) -> re.Pattern[bytes]:
    """The pattern of a clause's first delimiter (group 1) and of what closes behind it."""
    mark = _any(delimiters)
    mark += rb"(?<!\\[!-~])"  # LaTeX's `\,` is a space
    mark += rb"(?<!\\left\.)(?<!\\right\.)"  # and its `\left.` a bracket that is not there
    if keep_numbers:
        mark += rb"(?!(?<=[0-9][.,:])(?:\\!)?[0-9])"  # 3.14  1,000  12:30  1,\!000
        mark += rb"(?!(?<=[0-9]\{,)\}[0-9])"  # 1{,}000
        mark += rb"(?!(?<=\.)(?<![^\s(\[{=+\-*/<>$]\.)[0-9])"  # .5
    closer = rb"\s|\\[)\]}]|\\\\(?=\s)|" + _SPECIAL + b"|" + _any(_CLOSERS)
    # Marks that open as well as close: quotes close right after a full stop, all of them between a character and a gap.
    stopped = b"(?:(?<=[.!?])|(?<=" + "。|！|？".encode() + b"))[\"']+"
    between = rb"(?<!\s)(?<!\xc2\xa0)(?<!\xe3\x80\x80)[\"'`*_$]+(?=\Z|" + closer + b"|" + mark + b")"
    # Possessive: a repetition that may step back holds some 300 bytes of memory for every byte of the run.
    return re.compile(b"(" + mark + b")(?:" + b"|".join([closer, mark, stopped, between]) + b")*+")


def _any(characters: str) -> bytes:
    return b"(?:" + b"|".join(re.escape(character.encode()) for character in characters) + b")"


def token_bytes(ids: Iterable[int], tokenizer: Any) -> dict[int, bytes]:
    """The bytes of those of the ids that are not special: what `segment_ids` takes in place of a tokenizer."""
    return {token: text for token, text in _spelling(ids, tokenizer).items() if text != _SPECIAL}


def _spelling(ids: Iterable[int], tokenizer: Any) -> dict[int, bytes]:
    """The bytes of token ids, as the tokenizer's decoder makes them.

    Ids that it does not know are taken for special ones: a model with more logits than its tokenizer has tokens may
    sample them.
    """
    if isinstance(tokenizer, Mapping):
        return {token: tokenizer.get(token, _SPECIAL) for token in ids}
    special = set(getattr(tokenizer, "all_special_ids", ()))
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(inner, "id_to_token"):
        raise ValueError(
            f"{type(tokenizer).__name__} is neither a tokenizers.Tokenizer nor a fast transformers tokenizer"
        )
    special |= {number for number, token in inner.get_added_tokens_decoder().items() if token.special}
    byte_level = inner.decoder is not None and inner.decoder.decode(["a\u0120b"]) == "a b"
    spelling = {}
    for token in ids:
        if token < 0:
            raise ValueError(f"{token} is no token id: leave masked and padded positions out")
        piece = None if token in special else inner.id_to_token(token)
        spelling[token] = _SPECIAL if piece is None else _spell(piece, byte_level)
    return spelling


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
