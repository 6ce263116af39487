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
MOST_BRACES = 20_000  # looked at in search of the last box

_BRACE = re.compile(r"[{}]")
_BOX = re.compile(r"\\boxed\s*\{")
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
    plain = text.replace("\\{", "  ").replace("\\}", "  ")  # escaped braces do not count
    end, braces = len(plain), MOST_BRACES
    start = plain.rfind("\\boxed")
    while start >= 0 and braces > 0:
        if opening := _BOX.match(plain, start):
            depth = 0
            for brace in islice(_BRACE.finditer(plain, opening.end() - 1, end), braces):
                braces -= 1
                depth += 1 if brace[0] == "{" else -1
                if depth == 0:
                    return text[opening.end() : brace.start()]
            end = start
        braces -= 1
        start = plain.rfind("\\boxed", 0, start)
    return None


def last_number(text: str) -> str | None:
    """The last number in the text as it is written; None where there is none.

    Of one that is longer than `LONGEST_NUMBER` only the end comes back, which `value` does not read.
    """
    end = 1 + max(text.rfind(digit) for digit in "0123456789")
    found = _NUMBER.findall(text[max(0, end - 2 * LONGEST_NUMBER) : end])
    return found[-1] if found else None


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
    return _LOOSE.sub("", " ".join(text.replace("$", "").split()))


def _decimal(text: str) -> Fraction | None:
    mantissa, _, exponent = text.lower().replace(",", "").replace("−", "-").partition("e")
    if exponent and abs(int(exponent)) > LARGEST_EXPONENT:
        return None
    return Fraction(mantissa) * Fraction(10) ** int(exponent or "0")
