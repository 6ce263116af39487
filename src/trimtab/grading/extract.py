"""Extract the final answer from a response: its last box, its last number, its last `Answer:` line.

Responses are untrusted input. Everything here takes time linear in the response with a small constant, and numbers are
parsed only if they are short, so that neither `9` a million times nor `1e999999999` costs anything.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import islice

MAX_NUMBER_CHARS = 200
MAX_EXPONENT = 400
MAX_LINE_CHARS = 4_000  # of an answer's line

MAX_ANCHORS = 1_000  # occurrences of "answer" that are tried
MAX_NESTED = 8  # boxes around the last one
MAX_BRACES = 10_000  # scanned in search of the last box
MAX_BOXES = 50  # that make one answer
MAX_JOINT_CHARS = 80  # between two of them

_BRACE = re.compile(r"[{}]")
_BOX = re.compile(r"\\boxed\s*\{")
# Between boxes: a name of the next one, text, signs that only lay out, and what may then be left.
_NAME = re.compile(r"(?<![^\s$(,])((?:[A-Za-z]|\\[a-z]+)(?:_(?:[A-Za-z0-9]|\{[A-Za-z0-9]+\}))?)\s*=[\s$]*$", re.ASCII)
_TEXT = re.compile(r"\\(?:text|textrm|mathrm|mbox)\s*\{([^{}\\$]*)\}")
_DECORATION = re.compile(r"\\(?:q?quad(?![a-zA-Z])|[,;:! ()\[\]])|[$&~]")
_JOINT = re.compile(r"(?:(?:for|in) (?:part )?\(\w\) ?)?([,;]|,? ?and|,? ?or)(?: \(\w\):?)?", re.IGNORECASE)
_ANCHOR = re.compile(r"(?:answer|Answer|ANSWER)\*{0,2}[ \t]{0,5}:")
_DIGITS = r"(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
# A minus is a sign unless something before it could be subtracted from; -$5 is minus five too.
_NUMBER = re.compile(rf"(?:(?<![\w)\]}}])[-−+]\$?)?{_DECIMAL}(?:/{_DECIMAL})?", re.ASCII)
_FRACTION = re.compile(rf"([-−+]?)\\[dt]?frac\{{([-−+]?{_DECIMAL})\}}\{{([-−+]?{_DECIMAL})\}}", re.ASCII)
_THIN_SPACE = re.compile(r"\\[,!;:]")  # LaTeX's small spaces
_GROUPING_SPACE = re.compile(r"(?<=\d),?\\[,!;:](?=\d)", re.ASCII)  # it groups thousands: `1\,2` is not 12
_LOOSE_SPACE = re.compile(r"(?<!\w) | (?!\w)")
_LISTED = re.compile(r"(?<=\d)(?: ,|, | , )(?=\d{3}(?!\d))", re.ASCII)  # `1, 234` is a list, `1,234` a number


def last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` whose braces balance; None if there is none."""
    plain = _blank_escapes(text)
    box = _find_last_box(plain)
    return None if box is None else text[box[1] : box[2]]


def answer_box(text: str) -> str | None:
    r"""Return the content of the last outermost `\boxed{...}`; a box that is all of another's content is opened.

    `\boxed{41, \boxed{42}}` is a list of two; `last_box` would find 42 in it.
    """
    plain = _blank_escapes(text)
    box = _find_last_outer_box(plain)
    if box is None:
        return None
    content = text[box[1] : box[2]]
    return _open_boxes(content) if "boxed" in content else content


def answer_boxes(text: str) -> str | None:
    r"""Return the contents of the last boxes that only a comma, `and` or `or` joins, as one list; of one, its content.

    A name before a box belongs to it: `k = \boxed{45} and n = \boxed{2}` is `k = 45, n = 2`.
    """
    plain = _blank_escapes(text)
    box = _find_last_outer_box(plain)
    if box is None:
        return None
    start, inner, end = box
    found = [_named(text, start, _open_boxes(text[inner:end]))]
    while len(found) < MAX_BOXES:
        before = plain.rfind("\\boxed", max(0, start - MAX_LINE_CHARS), start)
        opening = _BOX.match(plain, before) if before >= 0 else None
        close = _find_closing(plain, opening.end(), start) if opening else None
        joint = _joint(text[close + 1 : start]) if close is not None else None
        if opening is None or close is None or joint is None:
            break
        found.append(_named(text, before, _open_boxes(text[opening.end() : close])) + joint)
        start = before
    return "".join(reversed(found)) if len(found) > 1 else _open_boxes(text[inner:end])


def _joint(between: str) -> str | None:
    """Return what joins two boxes, as it joins the members of a list; None if anything else stands between them."""
    if len(between) > MAX_JOINT_CHARS or "\n\n" in between:
        return None
    words = " ".join(_DECORATION.sub(" ", _TEXT.sub(r" \1 ", _NAME.sub(" ", between))).split())
    match = _JOINT.fullmatch(words)
    return match and (r" \text{ or } " if match[1].endswith("or") else ", ")


def _named(text: str, start: int, content: str) -> str:
    """Return the content of the box that starts there, in braces, with the name that stands before it."""
    name = _NAME.search(text[max(0, start - MAX_JOINT_CHARS) : start])
    return f"{{{name[1]} = {content}}}" if name and "=" not in content else f"{{{content}}}"


def _find_last_outer_box(plain: str) -> tuple[int, int, int] | None:
    """Return where the last box that is not inside another one starts, and its content starts and ends."""
    box = _find_last_box(plain)
    if box is None:
        return None
    outer, inner, end = box
    start = outer
    for _ in range(MAX_NESTED):
        start = plain.rfind("\\boxed", max(0, inner - MAX_LINE_CHARS), start)
        if start < 0:
            break
        if (opening := _BOX.match(plain, start)) is None:
            continue
        close = _find_closing(plain, opening.end(), min(len(plain), end + MAX_LINE_CHARS))
        if close is not None and close > end:
            outer, inner, end = start, opening.end(), close
    return outer, inner, end


def _open_boxes(content: str) -> str:
    """Return what is inside a box that is all of a box's content."""
    for _ in range(MAX_NESTED if len(content) <= MAX_LINE_CHARS else 0):
        held = content.strip()
        opening = _BOX.match(held)
        if opening is None or _find_closing(held, opening.end(), len(held)) != len(held) - 1:
            break
        content = held[opening.end() : -1]
    return content


def answer_line(text: str) -> str | None:
    """Return what follows the last `Answer:` on its line; None if there is none."""
    places = {word: text.rfind(word) for word in ("answer", "Answer", "ANSWER")}
    for _ in range(MAX_ANCHORS):
        word, start = max(places.items(), key=lambda item: item[1])
        if start < 0:
            return None
        if anchor := _ANCHOR.match(text, start):
            break
        places[word] = text.rfind(word, 0, start)
    else:
        return None
    end = anchor.end()
    line = text[end : end + MAX_LINE_CHARS].lstrip("* \t").partition("\n")[0]
    return line.strip().strip("*").strip()


def _find_last_box(plain: str) -> tuple[int, int, int] | None:
    """Return where the last balanced box starts, where its content starts, and where that ends."""
    end = len(plain)
    braces = MAX_BRACES
    # From the last box backwards, each is followed no further than the next one's start: had the next one closed, it
    # would have been found, and a box cannot close before the boxes inside it do. So no brace is scanned twice.
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


def _find_closing(plain: str, start: int, end: int) -> int | None:
    """Return where the brace closes that opened before `start`."""
    depth = 1
    for brace in islice(_BRACE.finditer(plain, start, end), MAX_BRACES):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return None


def _blank_escapes(text: str) -> str:
    """Replace escaped braces, which do not count, by blanks; the length stays the same. `\\\\` breaks a line."""
    return text.replace("\\\\", "  ").replace("\\{", "  ").replace("\\}", "  ")


def last_number(text: str) -> str | None:
    """Return the last number of the text as it is written; None if there is none.

    A number longer than `MAX_NUMBER_CHARS` is cut, and digits that commas join other than by thousands (`1,42`) are
    returned whole; `parse_number` accepts neither.
    """
    end = 1 + max(text.rfind(digit) for digit in "0123456789")
    text = text[max(0, end - 2 * MAX_NUMBER_CHARS) : end]
    numbers = _NUMBER.findall(text)
    if not numbers:
        return None
    joined = re.search(r"(?<!\d)\d+(?:,\d+)*,$", text[: len(text) - len(numbers[-1])], re.ASCII)
    return joined[0] + numbers[-1] if joined else str(numbers[-1])


def parse_number(text: str) -> Fraction | None:
    r"""Return the value of a number (`-1,234.5`, `2e3`), of `a/b` or of `\frac{a}{b}`; None for anything else."""
    text = _THIN_SPACE.sub("", _GROUPING_SPACE.sub(",", tidy(text))) if len(text) <= MAX_NUMBER_CHARS else ""
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
    """Remove $ and meaningless spaces: `( 3, x )` becomes `(3,x)`, but `1 2` does not become `12`."""
    text = " ".join(text.replace("$", " ").split())
    if not text.startswith(("(", "[", "{", "\\{", "\\left")):  # inside brackets a comma never joins thousands
        text = _LISTED.sub(";", text)
    return _LOOSE_SPACE.sub("", text)


def _decimal(text: str) -> Fraction | None:
    mantissa, _, exponent = text.lower().replace(",", "").replace("−", "-").partition("e")
    if exponent and abs(int(exponent)) > MAX_EXPONENT:
        return None
    return Fraction(mantissa) * Fraction(10) ** int(exponent or "0")
