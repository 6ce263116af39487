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

MAX_NESTED = 8  # boxes that are opened
MAX_BOX_CHARS = 20_000  # before the last one in which others are looked for
MAX_BRACES = 10_000  # of the boxes
MAX_BOXES = 50  # that make one answer
MAX_JOINT_CHARS = 80  # between two of them

Box = tuple[int, int, int]  # where it starts, and its content starts and ends
_BOX_OR_BRACE = re.compile(r"(?:\\boxed\s*)?\{|\}")
_PLAIN_BOX = re.compile(r"\\boxed\s*\{([^{}]*)\}")
# Between boxes: a name of the next one, text, signs that only lay out, and what may then be left.
_NAME = re.compile(r"(?<![^\s$(,])((?:[A-Za-z]|\\[a-z]+)(?:_(?:[A-Za-z0-9]|\{[A-Za-z0-9]+\}))?)\s*=[\s$]*$", re.ASCII)
_TEXT = re.compile(r"\\(?:text|textrm|mathrm|mbox)\s*\{([^{}\\$]*)\}")
_DECORATION = re.compile(r"\\(?:q?quad(?![a-zA-Z])|[,;:! ()\[\]])|[$&~]")
_JOINT = re.compile(r"(?:(?:for|in) (?:part )?\(\w\) ?)?([,;]|,? ?and|,? ?or)(?: \(\w\):?)?", re.IGNORECASE)
_ANCHOR = re.compile(r"[Aa](?:nswer|(?<=A)NSWER)\*{0,2}[ \t]{0,5}:")
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
    box = max(_boxes(text), default=None)
    return None if box is None else text[box[1] : box[2]]


def answer_box(text: str) -> str | None:
    r"""Return the content of the last outermost `\boxed{...}`; a box that is all of another's content is opened.

    `\boxed{41, \boxed{42}}` is a list of two; `last_box` would find 42 in it.
    """
    boxes = _outermost(_boxes(text))
    return _open_boxes(text[boxes[-1][1] : boxes[-1][2]]) if boxes else None


def answer_boxes(text: str) -> str | None:
    r"""Return the contents of the last boxes that only a comma, `and` or `or` joins, as one list; of one, its content.

    A name before a box belongs to it: `k = \boxed{45} and n = \boxed{2}` is `k = 45, n = 2`.
    """
    found: list[str] = []
    following = 0
    for start, inner, end in reversed(_outermost(_boxes(text))[-MAX_BOXES:]):
        joint = _joint(text[end + 1 : following]) if found else ""
        if joint is None:
            break
        found.append(_named(text, start, _open_boxes(text[inner:end])) + joint)
        following = start
    return "".join(reversed(found)) if len(found) > 1 else answer_box(text)


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


def _open_boxes(content: str) -> str:
    """Return what is inside a box that is all of a box's content."""
    if "boxed" not in content or len(content) > MAX_LINE_CHARS:
        return content
    for _ in range(MAX_NESTED):
        held = content.strip()
        boxes = _boxes(held)
        if not boxes or (boxes[-1][0], boxes[-1][2]) != (0, len(held) - 1):
            break
        content = held[boxes[-1][1] : boxes[-1][2]]
    return content


def answer_line(text: str) -> str | None:
    """Return what follows the last `Answer:` on its line; None if there is none."""
    end = max((anchor.end() for anchor in _ANCHOR.finditer(text)), default=None)
    if end is None:
        return None
    line = text[end : end + MAX_LINE_CHARS].lstrip("* \t").partition("\n")[0]
    return line.strip().strip("*").strip()


def _boxes(text: str) -> list[Box]:
    """Return the last boxes whose braces balance, in the order in which they close."""
    # Escaped braces do not count, and `\\\\` breaks a line; the length stays the same.
    plain = text.replace("\\\\", "  ").replace("\\{", "  ").replace("\\}", "  ")
    last = plain.rfind("\\boxed")
    first = plain.find("\\boxed", max(0, last - MAX_BOX_CHARS))
    if first == last >= 0 and (only := _PLAIN_BOX.match(plain, last)):  # most responses: a fifth faster
        return [(last, only.start(1), only.end(1))]
    opened: list[re.Match[str]] = []
    found: list[Box] = []
    for brace in islice(_BOX_OR_BRACE.finditer(plain, first), MAX_BRACES) if last >= 0 else ():
        if brace[0] != "}":
            opened.append(brace)
        elif opened and len((opening := opened.pop())[0]) > 1:
            found.append((opening.start(), opening.end(), brace.start()))
    return found


def _outermost(boxes: list[Box]) -> list[Box]:
    """Return the boxes that are not inside another one; what is around a box may be so long that it is no answer."""
    if len(boxes) < 2:
        return boxes
    outer: list[Box] = []
    for start, inner, end in boxes:
        if outer and outer[-1][0] > start and max(outer[-1][1] - start, end - outer[-1][2]) > MAX_LINE_CHARS:
            continue
        while outer and outer[-1][0] > start:
            outer.pop()
        outer.append((start, inner, end))
    return outer


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
