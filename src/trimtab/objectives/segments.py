"""Subsentences for SSPO: from token ids and a tokenizer to segment ids.

A clause ends with a delimiter and what closes behind it: more delimiters, closing quotes and brackets, white space. The
boundary is the last edge of a token from the end of that delimiter to the start of the next clause; a token that holds
both leaves none. The work is done on bytes, because byte-level BPE cuts characters into several tokens, and an edge
inside a character is no boundary. Every byte is read a bounded number of times, so time is linear whatever the text.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.objectives.clauses import DELIMITERS, SPECIAL, Positions, Rule, Words, find_boundaries, rule_of

_IDS = 1 << 22  # more than any vocabulary has: ids from here on get no place in a table


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
    if ids.is_floating_point() and len(ids):
        raise ValueError(f"token ids are whole numbers, got {ids.dtype}")
    flat, starts = ids.cpu().numpy().astype(np.int64), _starts(ids, sequence)
    rule = rule_of(delimiters, keep_numbers)
    # Mostly the ids themselves are places in the table; where they cannot be, their ranks are.
    if len(flat) and not 0 <= flat.min() <= flat.max() < _IDS:
        known, flat = np.unique(flat, return_inverse=True)
        tokenizer = _spelling(known.tolist(), tokenizer)
        tokenizer = {rank: tokenizer[token] for rank, token in enumerate(known.tolist())}
    with rule.lock:
        numbers = _number(flat, starts, _words(tokenizer, rule), min_tokens)
    return torch.from_numpy(numbers).to(ids.device)


def _starts(ids: Tensor, sequence: Sequence[int] | Tensor | None) -> Positions:
    """Where the responses start."""
    if sequence is None:
        return np.zeros(1, np.int64)
    owner = torch.as_tensor(sequence)
    if owner.shape != ids.shape:
        raise ValueError(f"sequence has shape {tuple(owner.shape)}, the tokens {tuple(ids.shape)}: one value per token")
    values = owner.cpu().numpy()
    return np.concatenate([[0], np.flatnonzero(values[1:] != values[:-1]) + 1])


def _number(flat: Positions, starts: Positions, words: Words, min_tokens: int) -> Positions:
    """The segment ids of all responses."""
    gaps = np.append(starts, len(flat)) + np.arange(len(starts) + 1)
    inside = np.ones(len(flat) + len(gaps), bool)
    inside[gaps] = False
    text = np.zeros(len(inside), np.int64)
    text[inside] = flat + 1
    begins = find_boundaries(text, words)
    if min_tokens > 1:
        begins = _joined(begins, gaps, min_tokens)
    number = begins.astype(np.int64)
    number[gaps[1:]] = -np.add.reduceat(number, gaps[:-1])  # every response counts from 0
    return number.cumsum()[inside]


def _joined(begins: NDArray[np.bool_], gaps: Positions, min_tokens: int) -> NDArray[np.bool_]:
    """The segments that are left when shorter ones are joined to the next, the last of a response to the one before."""
    kept: list[int] = []
    for gap, end in pairwise(gaps.tolist()):
        own = [gap + 1]
        for start in (np.flatnonzero(begins[gap:end]) + gap).tolist():
            if start - own[-1] >= min_tokens:
                own.append(start)
        kept += own[1:-1] if end - own[-1] < min_tokens else own[1:]
    joined = np.zeros_like(begins)
    joined[kept] = True
    return joined


def _words(tokenizer: Any, rule: Rule) -> Words:
    """What the rule says of the tokens; it is kept for the next call where a change of the tokenizer would be seen."""
    if isinstance(tokenizer, Mapping):
        return Words(rule, partial(_spelling, tokenizer=tokenizer))
    inner, special = _backend(tokenizer)
    added = frozenset((number, token.content) for number, token in inner.get_added_tokens_decoder().items())
    state = (inner, frozenset(special), added, inner.get_vocab_size(False), _byte_level(inner))
    return _kept_words(tokenizer, state, rule)


@lru_cache(maxsize=4)
def _kept_words(tokenizer: Any, state: Hashable, rule: Rule) -> Words:
    return Words(rule, partial(_spelling, tokenizer=tokenizer))


def token_bytes(ids: Iterable[int], tokenizer: Any) -> dict[int, bytes]:
    """The bytes of those of the ids that are not special: what `segment_ids` takes in place of a tokenizer."""
    return {token: text for token, text in _spelling(ids, tokenizer).items() if text != SPECIAL}


def _spelling(ids: Iterable[int], tokenizer: Any) -> dict[int, bytes]:
    """The bytes of token ids, as the tokenizer's decoder makes them.

    Ids that it does not know are taken for special ones: a model with more logits than its tokenizer has tokens may
    sample them.
    """
    if isinstance(tokenizer, Mapping):
        return {token: tokenizer.get(token, SPECIAL) for token in ids}
    inner, special = _backend(tokenizer)
    byte_level = _byte_level(inner)
    spelling = {}
    for token in ids:
        if token < 0:
            raise ValueError(f"{token} is no token id: leave masked and padded positions out")
        piece = None if token in special else inner.id_to_token(token)
        spelling[token] = SPECIAL if piece is None else _spell(piece, byte_level)
    return spelling


def _backend(tokenizer: Any) -> tuple[Any, set[int]]:
    """The `tokenizers.Tokenizer`, and the ids of special tokens."""
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(inner, "id_to_token"):
        raise ValueError(
            f"{type(tokenizer).__name__} is neither a tokenizers.Tokenizer nor a fast transformers tokenizer"
        )
    added = {number for number, token in inner.get_added_tokens_decoder().items() if token.special}
    return inner, added | set(getattr(tokenizer, "all_special_ids", ()))


def _byte_level(inner: Any) -> bool:
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
