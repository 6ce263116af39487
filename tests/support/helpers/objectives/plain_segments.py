"""A plain reference of `segment_ids`: one regular expression over the text of each response, without any cache."""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate, pairwise

from trimtab.objectives.segments import DELIMITERS

CLOSERS = ")]}\u201d\u2019\u00bb）】〕』」》〉］｝\u00a0\u3000"


def plain_ids(
    pieces: list[bytes], delimiters: str = DELIMITERS, min_tokens: int = 1, keep_numbers: bool = True
) -> list[int]:
    """The segment ids of one response, given its tokens' bytes."""
    starts = plain_starts(pieces, plain_ends(delimiters, keep_numbers), min_tokens)
    return [number for number, (one, two) in enumerate(pairwise([*starts, len(pieces)])) for _ in range(one, two)]


def plain_starts(pieces: list[bytes], clause_ends: re.Pattern[bytes], min_tokens: int) -> list[int]:
    text = b"".join(pieces)
    edges = list(accumulate(map(len, pieces), initial=0))
    starts = [0]
    for found in clause_ends.finditer(text):
        delimited, end = found.end(1), found.end()
        token = bisect_right(edges, end) - 1
        while delimited < edges[token] < end and text[edges[token]] & 0xC0 == 0x80:
            token -= 1
        if delimited <= edges[token] and token - starts[-1] >= min_tokens:
            starts.append(token)
    if len(starts) > 1 and len(pieces) - starts[-1] < min_tokens:
        starts.pop()
    return starts


@lru_cache(maxsize=64)
def plain_ends(delimiters: str, keep_numbers: bool) -> re.Pattern[bytes]:
    mark = any_of(delimiters) + rb"(?<!\\[!-~])(?<!\\left\.)(?<!\\right\.)"
    if keep_numbers:
        mark += rb"(?!(?<=[0-9][.,:])(?:\\!)?[0-9])(?!(?<=[0-9]\{,)\}[0-9])"
        mark += rb"(?!(?<=\.)(?<![^\s(\[{=+\-*/<>$]\.)[0-9])"
    closer = rb"\s|\\[)\]}]|\\\\(?=\s)|\xff|" + any_of(CLOSERS)
    stopped = b"(?:(?<=[.!?])|(?<=" + "。|！|？".encode() + b"))[\"']+"
    between = rb"(?<!\s)(?<!\xc2\xa0)(?<!\xe3\x80\x80)[\"'`*_$]+(?=\Z|" + closer + b"|" + mark + b")"
    return re.compile(b"(" + mark + b")(?:" + b"|".join([closer, mark, stopped, between]) + b")*+")


def any_of(characters: str) -> bytes:
    return b"(?:" + b"|".join(re.escape(character.encode()) for character in characters) + b")"
