"""The segments of a packed batch, numbered anew in every response: arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.objectives.segments.boundaries import Positions, Rule, Words, find_boundaries, rule_of
from trimtab.objectives.segments.token_bytes import backend, is_byte_level, spelling

_IDS = 1 << 22  # more than any vocabulary has: ids from here on get no place in a table


def segment_numbers(
    ids: NDArray[Any],
    owner: NDArray[Any] | None,
    tokenizer: Any,
    delimiters: str,
    min_tokens: int,
    keep_numbers: bool,
) -> Positions:
    """Every token's segment; tokens belong to one response or, by `owner`, to several."""
    flat, starts = ids.astype(np.int64), np.zeros(1, np.int64)
    if owner is not None:
        starts = np.concatenate([[0], np.flatnonzero(owner[1:] != owner[:-1]) + 1])
    # Mostly the ids themselves are places in the table; where they cannot be, their ranks are.
    if len(flat) and not 0 <= flat.min() <= flat.max() < _IDS:
        known, flat = np.unique(flat, return_inverse=True)
        spelt = spelling(known.tolist(), tokenizer)
        tokenizer = {rank: spelt[token] for rank, token in enumerate(known.tolist())}
    rule = rule_of(delimiters, keep_numbers)
    with rule.lock:
        return _number(flat, starts, _words(tokenizer, rule), min_tokens)


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
        return Words(rule, partial(spelling, tokenizer=tokenizer))
    inner, special = backend(tokenizer)
    added = frozenset((number, token.content) for number, token in inner.get_added_tokens_decoder().items())
    state = (inner, frozenset(special), added, inner.get_vocab_size(False), is_byte_level(inner))
    return _kept_words(tokenizer, state, rule)


@lru_cache(maxsize=4)
def _kept_words(tokenizer: Any, state: Hashable, rule: Rule) -> Words:
    return Words(rule, partial(spelling, tokenizer=tokenizer))
