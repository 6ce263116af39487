"""The byte patterns of the subsentence splitter: where a clause ends, and what a clause end never reaches past.

They work on bytes because byte-level BPE cuts characters into several tokens.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from trimtab.objectives.segments.token_bytes import SPECIAL

CLOSERS = ")]}\u201d\u2019\u00bb）】〕』」》〉］｝\u00a0\u3000"  # the last two are white space beyond ASCII


def clause_end_pattern(delimiters: str, keep_numbers: bool) -> re.Pattern[bytes]:
    """Compile the pattern of a clause's first delimiter (group 1) and of everything that closes behind it."""
    mark = _any_of(delimiters)
    mark += rb"(?<!\\[!-~])"  # LaTeX's `\,` is a space
    mark += rb"(?<!\\left\.)(?<!\\right\.)"  # and its `\left.` an invisible bracket
    if keep_numbers:
        mark += rb"(?!(?<=[0-9][.,:])(?:\\!)?[0-9])"  # 3.14  1,000  12:30  1,\!000
        mark += rb"(?!(?<=[0-9]\{,)\}[0-9])"  # 1{,}000
        mark += rb"(?!(?<=\.)(?<![^\s(\[{=+\-*/<>$]\.)[0-9])"  # .5
    closer = rb"\s|\\[)\]}]|\\\\(?=\s)|" + SPECIAL + b"|" + _any_of(CLOSERS)
    # Marks that open as well as close: quotes close right after a full stop, all of them between a character and a gap.
    stopped = b"(?:(?<=[.!?])|(?<=" + "。|！|？".encode() + b"))[\"']+"
    between = rb"(?<!\s)(?<!\xc2\xa0)(?<!\xe3\x80\x80)[\"'`*_$]+(?=\Z|" + closer + b"|" + mark + b")"
    # Possessive: a repetition that can backtrack holds some 300 bytes of memory for every byte it has matched.
    return re.compile(b"(" + mark + b")(?:" + b"|".join([closer, mark, stopped, between]) + b")*+")


def stopper_pattern(delimiters: str) -> re.Pattern[bytes]:
    r"""Compile the pattern of characters that no match of the clause end pattern reaches past.

    Group 1 is a digit, group 2 a character that may precede `.5`; the clause end pattern looks at them, and no further.
    The letters of `\left` and `\right` are the only ones that it looks behind. A character beyond ASCII must be whole:
    delimiters and closers are, so none of them overlaps with it.
    """
    letter = rb"[A-Za-z#@%&^~|]|[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}"
    return re.compile(b"(?!" + _any_of(delimiters + CLOSERS) + rb")(?:([0-9])|([(\[=+\-/<>])|" + letter + b")")


def boundary_tokens(pieces: Sequence[bytes], clause_ends: re.Pattern[bytes]) -> tuple[int, ...]:
    """Return the positions of the tokens that start a clause after another one."""
    text = b"".join(pieces)
    edges = list(accumulate(map(len, pieces), initial=0))
    found = []
    for clause in clause_ends.finditer(text):
        delimited, end = clause.end(1), clause.end()
        token = bisect_right(edges, end) - 1
        while delimited < edges[token] < end and text[edges[token]] & 0xC0 == 0x80:
            token -= 1  # this edge is inside a character
        if delimited <= edges[token] and token < len(pieces):
            found.append(token)
    return tuple(found)


def _any_of(characters: str) -> bytes:
    return b"(?:" + b"|".join(re.escape(character.encode()) for character in characters) + b")"
