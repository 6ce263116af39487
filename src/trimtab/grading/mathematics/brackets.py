"""Brackets of an answer: how deep each token stands, where to split outside them, and intervals such as `]0, 1[`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from trimtab.grading.mathematics.tokenizer import Token

_OPEN, CLOSE = frozenset(("(", "[", "\\{", "{", "langle")), frozenset((")", "]", "\\}", "}", "rangle"))
MAX_ARGUMENT_TOKENS = 100  # of a function
_AFTER_INTERVAL = frozenset((",", ";", "cup", "cap", "setminus", ".", "\\", "or", "and", *CLOSE))


def levels(tokens: Sequence[Token]) -> list[tuple[int, int]]:
    """Return every token's index and bracket depth."""
    level, found = 0, []
    for i, token in enumerate(tokens):
        if token.kind in ("mark", "command") and token.text in CLOSE:
            level -= 1
        found.append((i, level))
        if token.kind in ("mark", "command") and token.text in _OPEN:
            level += 1
    return found


def is_enclosed(tokens: Sequence[Token]) -> bool:
    """Return whether the first bracket is closed by the last."""
    return all(level > 0 for _, level in levels(tokens)[1:-1])


def enclosing_braces(tokens: Sequence[Token]) -> int:
    """Return how many pairs of braces stand around all of the tokens."""
    opened = next((place for place, token in enumerate(tokens) if token.text != "{"), len(tokens))
    closed = next((place for place, token in enumerate(reversed(tokens)) if token.text != "}"), len(tokens))
    if not opened or not closed:
        return 0
    return min([opened, closed, *(level for _, level in levels(tokens)[opened : len(tokens) - closed])])


def bracketed(tokens: Sequence[Token], start: int) -> Sequence[Token]:
    """Return what stands between the round or square bracket at an index and the one that closes it."""
    if start >= len(tokens) or tokens[start].text not in ("(", "["):
        return ()
    ahead = tokens[start + 1 : start + 1 + MAX_ARGUMENT_TOKENS]
    end = next((place for place, level in levels(ahead) if level < 0), 0)
    return ahead[:end]


def split(
    tokens: Sequence[Token], at: Callable[[Token], bool], is_word: Callable[[Token], bool] = lambda token: False
) -> list[Sequence[Token]]:
    """Split the tokens at the separators that stand outside brackets, of which `is_word` tells the words."""
    places = [i for i, level in levels(tokens) if level == 0 and at(tokens[i])]
    parts = [tokens[a + 1 : b] for a, b in zip([-1, *places], [*places, len(tokens)], strict=True)]
    last = len(parts) - 1
    # `1, 2, and 3` has an empty part between its comma and its `and`.
    return [part for i, part in enumerate(parts) if part or not 0 < i < last or not is_word(tokens[places[i]])]


def close_open_intervals(tokens: list[Token]) -> list[Token]:
    """Write the intervals `]a, b[`, `[a, b[` and `]a, b]` as `(a, b)`, `[a, b)` and `(a, b]`.

    A `]` that closes nothing opens an interval. A `[` closes one where a comma came before it and nothing that it could
    open comes after it.
    """
    if not any(token.text == "]" for token in tokens) and not any(token.text == "[" for token in tokens):
        return tokens
    result = list(tokens)
    opened: list[tuple[str, bool]] = []  # each open bracket, and whether a comma has followed it
    for i, token in enumerate(tokens):
        following = tokens[i + 1].text.strip() if i + 1 < len(tokens) else ","
        if token.kind not in ("mark", "command"):
            continue
        if token.text in (",", ";") and opened:
            opened[-1] = opened[-1][0], True
        elif token.text == "]" and not opened:
            result[i] = replace(token, text="(", kind="command")
            opened.append(("]", False))
        elif token.text == "[" and opened and opened[-1][0] in "[]" and opened[-1][1] and following in _AFTER_INTERVAL:
            result[i] = replace(token, text=")", kind="command")
            opened.pop()
        elif token.text in _OPEN:
            opened.append((token.text, False))
        elif token.text in CLOSE and opened:
            opened.pop()
    return tokens if opened else result
