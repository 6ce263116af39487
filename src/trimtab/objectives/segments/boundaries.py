"""Where clauses end, for many responses at once: the rule for one text, and a memory of what it said.

The rule is an expression over bytes that never reads past a stopper, a letter or the like: no clause closes over one.
So the tokens from one with a stopper to the next such token decide alone which of the edges between them are
boundaries. These windows are short and the same ones come again and again; the rule is asked once for each of them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, repeat
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from trimtab.objectives.segments.token_bytes import SPECIAL

_CLOSERS = ")]}\u201d\u2019\u00bb）】〕』」》〉］｝\u00a0\u3000"  # the last two are white space beyond ASCII
_LATEX = (rb"\left", rb"\right")  # the only letters that the rule reads
_LATEX_STARTS = tuple({word[:size] for word in _LATEX for size in range(1, len(word) + 1)})

# What a token is, as bits: KNOWN if it was met before, ANCHOR if it holds a stopper, MARKED if a delimiter may begin
# behind the last one, OPENS if it ends like `\le`, INNER if it is part of `\left` up to its last stopper.
_KNOWN, _ANCHOR, _MARKED, _OPENS, _INNER = (1 << bit for bit in range(5))
_WIDTHS = (4, 8, 16)  # windows of up to so many tokens are remembered: nearly all are short
_WINDOWS = 1 << 16  # how many are remembered, at some 150 bytes each
_PIECES = 1 << 18  # how many tokens a rule learns before it is made anew

Positions = NDArray[np.int64]
Facts = tuple[int, int, int]
Spell = Callable[[Iterable[int]], dict[int, bytes]]


def boundaries(pieces: Sequence[bytes], ends: re.Pattern[bytes]) -> list[int]:
    """The tokens of a text that start a clause behind another; the number of tokens stands for the end of the text."""
    text = b"".join(pieces)
    edges = list(accumulate(map(len, pieces), initial=0))
    found = []
    for clause in ends.finditer(text):
        delimited, end = clause.end(1), clause.end()
        token = bisect_right(edges, end) - 1
        while delimited < edges[token] < end and text[edges[token]] & 0xC0 == 0x80:
            token -= 1  # this edge is inside a character
        if delimited <= edges[token]:
            found.append(token)
    return found


def clause_ends(delimiters: str, keep_numbers: bool) -> re.Pattern[bytes]:
    """The pattern of a clause's first delimiter (group 1) and of what closes behind it."""
    mark = _any(delimiters)
    mark += rb"(?<!\\[!-~])"  # LaTeX's `\,` is a space
    mark += rb"(?<!\\left\.)(?<!\\right\.)"  # and its `\left.` a bracket that is not there
    if keep_numbers:
        mark += rb"(?!(?<=[0-9][.,:])(?:\\!)?[0-9])"  # 3.14  1,000  12:30  1,\!000
        mark += rb"(?!(?<=[0-9]\{,)\}[0-9])"  # 1{,}000
        mark += rb"(?!(?<=\.)(?<![^\s(\[{=+\-*/<>$]\.)[0-9])"  # .5
    closer = rb"\s|\\[)\]}]|\\\\(?=\s)|" + SPECIAL + b"|" + _any(_CLOSERS)
    # Marks that open as well as close: quotes close right after a full stop, all of them between a character and a gap.
    stopped = b"(?:(?<=[.!?])|(?<=" + "。|！|？".encode() + b"))[\"']+"
    between = rb"(?<!\s)(?<!\xc2\xa0)(?<!\xe3\x80\x80)[\"'`*_$]+(?=\Z|" + closer + b"|" + mark + b")"
    # Possessive: a repetition that may step back holds some 300 bytes of memory for every byte of the run.
    return re.compile(b"(" + mark + b")(?:" + b"|".join([closer, mark, stopped, between]) + b")*+")


def _any(characters: str) -> bytes:
    return b"(?:" + b"|".join(re.escape(character.encode()) for character in characters) + b")"


def _stopper(delimiters: str) -> bytes:
    """What the rule never reads past: group 1 is a digit, group 2 what may stand ahead of `.5`.

    Of the letters this holds but for `\\left` and `\\right`; of digits and group 2 because the rule reads them last.
    A character beyond ASCII must be whole: delimiters and closing marks are, so none of them overlaps with it.
    """
    letter = rb"[A-Za-z#@%&^~|]|[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}"
    return b"(?!" + _any(delimiters + _CLOSERS) + rb")(?:([0-9])|([(\[=+\-/<>])|" + letter + b")"


def _delimiter(delimiters: str) -> bytes:
    """A delimiter, or the part of one that a text ends with: its other bytes may be the next token's."""
    cut = {mark[:size] for mark in map(str.encode, delimiters) for size in range(1, len(mark))}
    return b"|".join([_any(delimiters), *(re.escape(part) + rb"\Z" for part in sorted(cut))])


class Rule:
    """The rule of one set of options, what it says of tokens and windows it has met, and a lock to be held meanwhile.

    A token has a code as the first one of a window, which stands for what follows its last stopper, and one for any
    other place: for what is ahead of its first stopper or, without one, for its bytes.
    """

    def __init__(self, delimiters: str, keep_numbers: bool) -> None:
        self.lock = Lock()
        self.ends = clause_ends(delimiters, keep_numbers)
        self.windows: dict[bytes, int] = {}
        self._first = re.compile(_stopper(delimiters))
        self._last = re.compile(b"(?s:.*)" + _stopper(delimiters))
        self._delimiter = re.compile(_delimiter(delimiters))
        self._pieces: dict[bytes, Facts] = {}
        self._codes: dict[object, int] = {}

    def facts(self, piece: bytes) -> Facts:
        """What a token is, its code as the first one of a window, and its code elsewhere."""
        if piece not in self._pieces:
            self._pieces[piece] = self._facts(piece)
        return self._pieces[piece]

    @property
    def full(self) -> bool:
        """Whether it has met so many tokens that it should be forgotten: codes are in use and cannot be."""
        return len(self._pieces) >= _PIECES

    def _facts(self, piece: bytes) -> Facts:
        first, last = self._first.search(piece), self._last.match(piece)
        known = _KNOWN | _OPENS * (piece.endswith(_LATEX_STARTS) or not piece)
        if first is None or last is None:
            code = self.code(piece)
            return known | _MARKED * self._delimits(piece), code, code
        head, behind, ahead = piece[: last.end()], piece[last.end() :], piece[: first.start()]
        if any(head in word for word in _LATEX):
            code = self.code(piece)
            return known | _ANCHOR | _INNER | _MARKED * self._delimits(piece), code, code
        known |= _ANCHOR | _MARKED * self._delimits(behind)
        left = piece if head.endswith(_LATEX_STARTS) else (last.lastindex, behind)
        return known, self.code(left), self.code((ahead, first.lastindex == 1))

    def _delimits(self, part: bytes) -> bool:
        return self._delimiter.search(part) is not None

    def code(self, what: object) -> int:
        """The number of what a code stands for."""
        return self._codes.setdefault(what, len(self._codes))


_kept_rule = lru_cache(maxsize=16)(Rule)


def rule_of(delimiters: str, keep_numbers: bool) -> Rule:
    """The one rule of these options, so that what it remembers is of use to all."""
    if _kept_rule(delimiters, keep_numbers).full:
        _kept_rule.cache_clear()
    return _kept_rule(delimiters, keep_numbers)


class Words:
    """What a rule says of a tokenizer's tokens, by token id + 1: 0 stands between two responses. Learnt as they come.

    `spell` gives the bytes of token ids.
    """

    def __init__(self, rule: Rule, spell: Spell) -> None:
        self.rule = rule
        self.pieces: dict[int, bytes] = {0: b""}
        self._spell = spell
        self._flags = np.zeros(0, np.uint8)
        self.left = self.right = np.zeros(0, np.int32)
        self._grow(1)
        ends = rule.code(None)
        self._flags[0], self.left[0], self.right[0] = _KNOWN | _ANCHOR, ends, ends

    def flags(self, text: Positions) -> NDArray[np.uint8]:
        """What each of these tokens is; new ones are learnt."""
        self._grow(int(text.max()) + 1)
        flags = self._flags[text]
        if not flags.all():
            fresh = np.zeros(len(self._flags), bool)
            fresh[text[flags == 0]] = True
            self._learn(np.flatnonzero(fresh).tolist())
            flags = self._flags[text]
        return flags

    def _learn(self, fresh: list[int]) -> None:
        spelling = self._spell(word - 1 for word in fresh)
        self.pieces |= {word: spelling[word - 1] for word in fresh}
        facts = np.array([self.rule.facts(self.pieces[word]) for word in fresh])
        flags, self.left[fresh], self.right[fresh] = facts.T
        self._flags[fresh] = flags  # last: from now on they are known, even if we are interrupted

    def _grow(self, size: int) -> None:
        more = size - len(self._flags)
        if more > 0:
            self.left, self.right, self._flags = (
                np.concatenate([old, np.zeros(max(more, len(old)), old.dtype)])
                for old in (self.left, self.right, self._flags)
            )


def find_boundaries(text: Positions, words: Words) -> NDArray[np.bool_]:
    """Which tokens of a text start a clause behind another; ids are + 1, with a 0 before, between and after responses.

    What it says is what `boundaries` says of every response, but for its end.
    """
    flags = words.flags(text)
    _close_latex(flags)
    anchors = np.flatnonzero((flags & _ANCHOR) > 0)
    # Most windows have no delimiter ahead of their last token, and so no boundary.
    windows = np.flatnonzero((np.bitwise_or.reduceat(flags, anchors)[:-1] & _MARKED) > 0)
    first, last = anchors[windows], anchors[windows + 1]
    begins = np.zeros(len(text), bool)
    for width in _WIDTHS:
        short = last - first < width
        _mark_known(begins, text, first[short], last[short], width, words)
        first, last = first[~short], last[~short]
    for start, end in zip(first.tolist(), last.tolist(), strict=True):
        begins[[start + token for token in _window(text, start, end, words)]] = True
    return begins


def _close_latex(flags: NDArray[np.uint8]) -> None:
    """A token that may go on with a `\\left` begun up to five tokens before is no anchor: the rule may read past it."""
    near = np.flatnonzero((flags & _OPENS) > 0)[:, None] + np.arange(1, max(map(len, _LATEX)))
    near = near[near < len(flags)]
    near = near[(flags[near] & _INNER) > 0]
    flags[near] &= 0xFF - _ANCHOR


def _window(text: Positions, start: int, end: int, words: Words) -> list[int]:
    pieces = [words.pieces[word] for word in text[start : end + 1].tolist()]
    return [token for token in boundaries(pieces, words.rule.ends) if token < len(pieces)]


def _mark_known(
    begins: NDArray[np.bool_], text: Positions, first: Positions, last: Positions, width: int, words: Words
) -> None:
    """Mark the boundaries in windows of up to `width` tokens; the rule remembers those of each as bits."""
    spans = first[:, None] + np.arange(width)
    codes = words.right[text[np.minimum(spans, last[:, None])]]
    codes[spans > last[:, None]] = -1
    codes[:, 0] = words.left[text[first]]
    windows, keys = words.rule.windows, codes.view(f"V{codes.itemsize * width}").ravel().tolist()
    bits = np.fromiter(map(windows.get, keys, repeat(-1)), np.int64, len(keys))
    if len(windows) > _WINDOWS:
        windows.clear()
    for n in np.flatnonzero(bits < 0).tolist():
        if keys[n] not in windows:
            windows[keys[n]] = sum(1 << token for token in _window(text, int(first[n]), int(last[n]), words))
        bits[n] = windows[keys[n]]
    for token in range(1, width):
        begins[first[(bits >> token & 1) > 0] + token] = True
