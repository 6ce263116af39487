"""What a response says: its last box, its last number, and the value of a number or simple fraction.

Responses are hostile input. Everything here takes time linear in the response with a small constant, and numbers are
read only where they are short, so that neither `9` a million times nor `1e999999999` costs anything.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import islice

LONGEST_NUMBER = 200  # characters
LARGEST_EXPONENT = 400
LONGEST_LINE = 4_000  # characters of an answer's line that are read

MOST_ANCHORS = 1_000  # times the word "answer" is looked at
MOST_NESTED = 8  # boxes around the last one
MOST_BRACES = 10_000  # looked at in search of the last box

_BRACE = re.compile(r"[{}]")
_BOX = re.compile(r"\\boxed\s*\{")
_ANCHOR = re.compile(r"(?:answer|Answer|ANSWER)\*{0,2}[ \t]{0,5}:")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
# A minus is a sign where nothing stands before it that it could be taken from; -$5 is minus five too.
_NUMBER = re.compile(rf"(?:(?<![\w)\]}}])[-−+]\$?)?{_DECIMAL}(?:/{_DECIMAL})?", re.ASCII)
_FRACTION = re.compile(rf"([-−+]?)\\[dt]?frac\{{([-−+]?{_DECIMAL})\}}\{{([-−+]?{_DECIMAL})\}}", re.ASCII)
_THIN = re.compile(r"\\[,!;:]")  # LaTeX's small spaces
_LOOSE = re.compile(r"(?<!\w) | (?!\w)")


def last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` whose braces balance; None where there is none.

    From the last box backwards, each is followed no further than the next one's start: had the next one closed, it
    would have been the answer, and a box cannot close before the boxes inside it do. So no brace is looked at twice.
    """
    plain = _without_escapes(text)
    found = _last_box(plain, len(plain), MOST_BRACES)
    return None if found is None else text[found[1] : found[2]]


def answer_box(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` that is in no other: the answer. A box in a box is what it holds.

    `\boxed{41, \boxed{42}}` is a list, however the inner box looks; `last_box` would find 42 in it.
    """
    plain = _without_escapes(text)
    found = _last_box(plain, len(plain), MOST_BRACES)
    if found is None:
        return None
    start, inner, end = found
    for _ in range(MOST_NESTED):
        start = plain.rfind("\\boxed", max(0, inner - LONGEST_LINE), start)
        opening = _BOX.match(plain, start) if start >= 0 else None
        if start < 0:
            break
        close = _closing(plain, opening.end(), min(len(plain), end + LONGEST_LINE), MOST_BRACES) if opening else None
        if opening is not None and close is not None and close > end:
            inner, end = opening.end(), close
    content = text[inner:end]
    for _ in range(MOST_NESTED if end - inner <= LONGEST_LINE else 0):
        held = content.strip()
        opening = _BOX.match(held)
        if opening is None or _closing(held, opening.end(), len(held), MOST_BRACES) != len(held) - 1:
            break
        content = held[opening.end() : -1]
    return content


def answer_line(text: str) -> str | None:
    """What stands behind the last `Answer:` on its line; None where there is none."""
    places = {word: text.rfind(word) for word in ("answer", "Answer", "ANSWER")}
    for _ in range(MOST_ANCHORS):
        word, start = max(places.items(), key=lambda item: item[1])
        if start < 0:
            return None
        if anchor := _ANCHOR.match(text, start):
            break
        places[word] = text.rfind(word, 0, start)
    else:
        return None
    end = anchor.end()
    line = text[end : end + LONGEST_LINE].lstrip("* \t").partition("\n")[0]
    return line.strip().strip("*").strip()


def _last_box(plain: str, end: int, braces: int) -> tuple[int, int, int] | None:
    """Where the last box starts, where its content starts, and where that ends."""
    start = plain.rfind("\\boxed")
    while start >= 0 and braces > 0:
        if opening := _BOX.match(plain, start):
            depth = 0
            for brace in islice(_BRACE.finditer(plain, opening.end() - 1, end), braces):
                braces -= 1
                depth += 1 if brace[0] == "{" else -1
                if depth == 0:
                    return start, opening.end(), brace.start()
            end = start
        braces -= 1
        start = plain.rfind("\\boxed", 0, start)
    return None


def _closing(plain: str, start: int, end: int, braces: int) -> int | None:
    """Where the brace closes that opened before `start`."""
    depth = 1
    for brace in islice(_BRACE.finditer(plain, start, end), braces):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return None


def _without_escapes(text: str) -> str:
    """The text, as long as before, with blanks for escaped braces, which do not count."""
    return text.replace("\\{", "  ").replace("\\}", "  ")


def last_number(text: str) -> str | None:
    """The last number in the text as it is written; None where there is none.

    Of one that is longer than `LONGEST_NUMBER` only the end comes back, which `value` does not read. Digits that commas
    join in some other way than by thousands (`1,42`) come back whole, and `value` does not read them either.
    """
    end = 1 + max(text.rfind(digit) for digit in "0123456789")
    text = text[max(0, end - 2 * LONGEST_NUMBER) : end]
    found = _NUMBER.findall(text)
    if not found:
        return None
    joined = re.search(r"\d(?:,\d+)*,$", text[: len(text) - len(found[-1])], re.ASCII)
    return joined[0] + found[-1] if joined else str(found[-1])


def value(text: str) -> Fraction | None:
    r"""The value of a number (`-1,234.5`, `2e3`), of `a/b` or of `\frac{a}{b}`; None for anything else."""
    text = _THIN.sub("", tidy(text)) if len(text) <= LONGEST_NUMBER else ""
    if fraction := _FRACTION.fullmatch(text):
        above, below = _decimal(fraction[2]), _decimal(fraction[3])
        sign = -1 if fraction[1] in ("-", "−") else 1
    elif _NUMBER.fullmatch(text):
        numerator, _, denominator = text.partition("/")
        above, below, sign = _decimal(numerator), _decimal(denominator or "1"), 1
    else:
        return None
    return sign * above / below if above is not None and below else None


def tidy(text: str) -> str:
    """Without $ and without the spaces that mean nothing: `( 3, x )` is `(3,x)`, but `1 2` is not `12`."""
    return _LOOSE.sub("", " ".join(text.replace("$", " ").split()))


def _decimal(text: str) -> Fraction | None:
    mantissa, _, exponent = text.lower().replace(",", "").replace("−", "-").partition("e")
    if exponent and abs(int(exponent)) > LARGEST_EXPONENT:
        return None
    return Fraction(mantissa) * Fraction(10) ** int(exponent or "0")
