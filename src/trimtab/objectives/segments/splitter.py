"""Segment ids of a packed batch, in numpy, with a cache of the short stretches of tokens in which clauses end.

No match of the clause end pattern reaches past a letter or the like (a *stopper*). So the tokens from one that holds a
stopper (an *anchor*) to the next anchor decide alone which of them start a clause. These *windows* are short, and most
of them come again in every batch: each is matched once.
"""

# Measured on 512 responses of 256 tokens with Qwen3's tokenizer, when a step on a GPU takes 900 ms: 9 ms. One regular
# expression over the text of the whole batch takes 23 ms, one for each response 40 ms.

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import lru_cache, partial
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimtab.objectives.segments.clause_pattern import boundary_tokens, clause_end_pattern, stopper_pattern
from trimtab.objectives.segments.token_bytes import backend, bytes_by_id, is_byte_level

_LATEX = (rb"\left", rb"\right")  # the only letters that the clause end pattern looks at
_LATEX_STARTS = tuple({word[:size] for word in _LATEX for size in range(1, len(word) + 1)})

_KNOWN, _ANCHOR, _MARKED = 1, 2, 4  # flags of a token id, see `TokenFacts`
_MAX_WINDOWS = 1 << 16  # cached windows, at some 200 bytes each
_MAX_WINDOW = 16  # tokens of a cached window; nearly all are shorter
_MAX_ID = (1 << 22) - 1  # more than any vocabulary has; larger ids are as unknown as this one

Array = NDArray[Any]

# All callers share the tables, which grow as they are read.
_lock = Lock()


class TokenFacts(NamedTuple):
    """Flags of a token, and the codes of its bytes as the last and as the first token of a window.

    ANCHOR: it holds a stopper. MARKED: a delimiter may begin after its last stopper. The coded bytes leave out what
    cannot matter to a window, such as the letters of its first and last word, so that few windows are different.
    """

    flags: int
    as_last: int
    as_first: int


class Splitter:
    """Find clause boundaries under one set of options; keeps the boundaries of windows and the facts of tokens."""

    def __init__(self, delimiters: str, keep_numbers: bool) -> None:
        self._clause_ends = clause_end_pattern(delimiters, keep_numbers)
        self._stopper = stopper_pattern(delimiters)
        self._delimiter_starts = frozenset(character.encode()[0] for character in delimiters)
        self._windows: dict[bytes, tuple[int, ...]] = {}
        self._facts: dict[bytes, TokenFacts] = {}
        self._codes: dict[bytes, int] = {}
        self._bytes: list[bytes] = []

    def facts(self, piece: bytes) -> TokenFacts:
        """Return the facts of a token with these bytes."""
        if piece not in self._facts:
            self._facts[piece] = self._make_facts(piece)
        return self._facts[piece]

    def boundaries(self, flags: Array, codes: Array) -> Array:
        """Return a mask of the tokens that start a clause; `codes` holds both codes of each token."""
        anchors = np.flatnonzero(flags & _ANCHOR)
        # Most windows have no delimiter ahead of their last token, and so no boundary.
        marked = np.flatnonzero(np.bitwise_or.reduceat(flags, anchors)[:-1] & _MARKED)
        first, last = anchors[marked], anchors[marked + 1]
        # A window's key: the codes of four bytes from its first token's `as_first` to its last one's `as_last`.
        content, windows = codes.tobytes(), self._windows
        spans = zip((8 * first + 4).tolist(), (8 * last + 4).tolist(), strict=True)
        keys = [content[start:end] for start, end in spans]
        found = [windows[key] if key in windows else self._match(key) for key in keys]
        mask = np.zeros(len(flags), bool)
        mask[[start + token for start, tokens in zip(first.tolist(), found, strict=True) for token in tokens]] = True
        return mask

    def _match(self, key: bytes) -> tuple[int, ...]:
        codes = np.frombuffer(key, np.int32).tolist()
        pieces = [self._bytes[code] for code in codes[:1] + codes[1::2]]
        found = boundary_tokens(pieces, self._clause_ends)
        if len(pieces) <= _MAX_WINDOW:
            if len(self._windows) >= _MAX_WINDOWS:
                self._windows.clear()
            self._windows[key] = found
        return found

    def _make_facts(self, piece: bytes) -> TokenFacts:
        stoppers = list(self._stopper.finditer(piece))
        head = piece[: stoppers[-1].end()] if stoppers else b""
        if any(head in word for word in _LATEX):
            # No stopper, or letters that may continue a LaTeX \left from the tokens before: never an anchor.
            code = self.code(piece)
            return TokenFacts(_KNOWN | self._marked(piece), code, code)
        tail = piece[len(head) :]
        # Of a stopper only its class matters: digit, opening mark or letter (digit or not, where it ends a window).
        as_last = piece[: stoppers[0].start()] + (b"0" if stoppers[0][1] else b"a")
        as_first = (b"0" if stoppers[-1][1] else b"(" if stoppers[-1][2] else b"a") + tail
        if head.endswith(_LATEX_STARTS):
            as_first = piece
        return TokenFacts(_KNOWN | _ANCHOR | self._marked(tail), self.code(as_last), self.code(as_first))

    def _marked(self, part: bytes) -> int:
        return 0 if self._delimiter_starts.isdisjoint(part) else _MARKED

    def code(self, content: bytes) -> int:
        """Return the number that stands for these bytes."""
        if content not in self._codes:
            self._bytes.append(content)
            self._codes[content] = len(self._bytes) - 1
        return self._codes[content]


class TokenTable:
    """The facts of a tokenizer's tokens, indexed by token id + 1 and filled on first use; 0 separates responses."""

    def __init__(self, splitter: Splitter, bytes_of: Callable[[Iterable[int]], dict[int, bytes]]) -> None:
        self._splitter = splitter
        self._bytes_by_id = bytes_of
        self._flags = np.array([_KNOWN | _ANCHOR], np.uint8)
        self._codes = np.full((1, 2), splitter.code(b""), np.int32)

    def boundaries(self, ids: Array) -> Array:
        """Return a mask of the tokens that start a clause, given their ids + 1."""
        missing = int(ids.max()) + 1 - len(self._flags)
        if missing > 0:
            more = max(missing, len(self._flags))
            self._codes = np.pad(self._codes, ((0, more), (0, 0)))
            self._flags = np.pad(self._flags, (0, more))
        flags = self._flags[ids]
        if not flags.all():
            fresh = np.zeros(len(self._flags), bool)
            fresh[ids[flags == 0]] = True
            self._fill(np.flatnonzero(fresh))
            flags = self._flags[ids]
        # Both codes of a token as one number: gathering pairs takes five times as long.
        return self._splitter.boundaries(flags, self._codes.view(np.int64).ravel()[ids])

    def _fill(self, fresh: Array) -> None:
        pieces = self._bytes_by_id((fresh - 1).tolist())
        facts = np.array([self._splitter.facts(piece) for piece in pieces.values()])
        self._codes[fresh] = facts[:, 1:]
        self._flags[fresh] = facts[:, 0]  # last, so that Ctrl-C leaves no token that only seems known


def segment_numbers(
    ids: Array, owner: Array | None, tokenizer: Any, min_tokens: int, options: tuple[str, bool]
) -> Array:
    """Return the segment of every token, numbered from 0 in each response; `owner` is the response of each token."""
    ids, starts = ids.astype(np.int64), np.zeros(1, np.int64)
    if owner is not None:
        starts = np.concatenate([[0], np.flatnonzero(owner[1:] != owner[:-1]) + 1])
    gaps = np.append(starts, len(ids)) + np.arange(len(starts) + 1)
    inside = np.ones(len(ids) + len(gaps), bool)
    inside[gaps] = False
    with _lock:
        ids, table = _table(ids, tokenizer, _splitter(*options))
        text = np.zeros(len(inside), np.int64)
        text[inside] = ids + 1
        begins = table.boundaries(text)
    if min_tokens > 1:
        begins = _joined(begins, gaps, min_tokens)
    number = begins.astype(np.int64)
    number[gaps[1:]] = -np.add.reduceat(number, gaps[:-1])  # every response counts from 0
    return number.cumsum()[inside]


def _joined(begins: Array, gaps: Array, min_tokens: int) -> Array:
    """Join segments of fewer tokens to the next one, the last of a response to the one before."""
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


def _table(ids: Array, tokenizer: Any, splitter: Splitter) -> tuple[Array, TokenTable]:
    """Return the tokenizer's table, and the ids as it knows them."""
    if isinstance(tokenizer, Mapping):
        if len(ids) and not 0 <= ids.min() <= ids.max() < _MAX_ID:  # no rows of a table: use their ranks
            known, ids = np.unique(ids, return_inverse=True)
            tokenizer = dict(enumerate(bytes_by_id(known.tolist(), tokenizer).values()))
        # Not cached: a mapping may change from call to call.
        return ids, TokenTable(splitter, partial(bytes_by_id, tokenizer=tokenizer))
    inner, special = backend(tokenizer)
    if len(ids) and ids.min() < 0:
        raise ValueError(f"{ids[ids < 0][0]} is no token id: leave masked and padded positions out")
    added = frozenset((number, token.content) for number, token in inner.get_added_tokens_decoder().items())
    state = (inner, frozenset(special), added, inner.get_vocab_size(False), is_byte_level(inner))
    return np.minimum(ids, _MAX_ID), _cached_table(tokenizer, state, splitter)


_splitter = lru_cache(maxsize=16)(Splitter)


@lru_cache(maxsize=4)
def _cached_table(tokenizer: Any, state: Hashable, splitter: Splitter) -> TokenTable:
    """Return the one table of a tokenizer and a splitter; `state` is what differs once the tokenizer is changed."""
    return TokenTable(splitter, partial(bytes_by_id, tokenizer=tokenizer))
