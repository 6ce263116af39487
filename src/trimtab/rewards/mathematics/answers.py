"""What kind of thing an answer is: a value, a list, a set, a tuple or interval, an equation, words, ...

An answer is read once, by its outermost structure; the members are read by the same rules. What fits no structure is
`opaque`: it can be equal as text, or a worker may understand it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trimtab.rewards.mathematics.latex import Token, plain, tokens
from trimtab.rewards.mathematics.nodes import Node, NotReadError, negative
from trimtab.rewards.mathematics.parse import FUNCTIONS, expression
from trimtab.rewards.mathematics.units import unit

DEEPEST = 6
MOST_MEMBERS = 200

ShapeKind = Literal[
    "value", "list", "set", "tuple", "union", "matrix", "equation", "inequality", "chain", "text", "base", "opaque",
    "none",
]  # fmt: skip
_OPEN, _CLOSE = frozenset(("(", "[", "\\{", "{", "langle")), frozenset((")", "]", "\\}", "}", "rangle"))
_ORDER = {"<": "<", ">": ">", "le": "<=", "ge": ">="}
_OTHER_RELATIONS = frozenset(
    "ne approx equiv sim simeq cong rightarrow Rightarrow implies mapsto not notin iff".split()
)
_SEPARATORS = frozenset(("or", "and", ", and", ", or", "lor", "vee", "land", "wedge"))
_EMPTY = frozenset(
    (
        "emptyset",
        "no solution",
        "no solutions",
        "no real solution",
        "no real solutions",
        "none",
        "the empty set",
        "empty set",
    )
)
_TIME = re.compile(r"(\d{1,2}):(\d{2})(?:\s*\(?([ap])\.?\s?m\.?\)?)?", re.IGNORECASE)
_BASE = re.compile(
    r"(\()?([0-9A-Fa-f]*\d[0-9A-Fa-f]*)(?(1)\))_\{?(\d+|two|three|four|five|six|seven|eight|nine|ten|twelve|sixteen)\}?"
)
_WORDS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
          "twelve": 12, "sixteen": 16}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """An answer: its kind, its members, and for a value its expression, unit and per cent sign.

    `text` is the whole as text. `brackets` belong to tuples, which `[0,1)` is one of; `name` is an equation's left side
    where that is a lone variable, or an inequality's variable.
    """

    kind: ShapeKind
    text: str
    parts: tuple[Shape, ...] = ()
    node: Node | None = None
    unit: str | None = None
    percent: bool = False
    brackets: str = ""
    name: str = ""


def read(source: str) -> Shape:
    """The shape of an answer."""
    return _read(tokens(source), plain(source), 0)


def words(text: str) -> str:
    """An answer in words, as it is compared: without case, braces, and marks around it."""
    bare = re.sub(r"\\text|[{}$\\]", " ", text).casefold()
    return re.sub(r"\s*,\s*", ",", " ".join(bare.split())).strip("().,;: ")


def _read(found: Sequence[Token], text: str, depth: int) -> Shape:
    while found and found[-1].text in (".", ",", ";", "\\"):
        found = found[:-1]
    while len(found) > 1 and found[0].text == "{" and found[-1].text == "}" and _whole(found):
        found = found[1:-1]
    if not found or depth > DEEPEST:
        return Shape("opaque" if found else "none", text)
    if (special := _special(found, text)) is not None:
        return special
    members = _split(found, lambda token: token.text in (",", ";") or _separator(token))
    if len(members) > 1:
        if len(members) > MOST_MEMBERS or not all(members):
            return Shape("opaque", text)
        return _list([_member(member, depth) for member in members], text)
    relations = [i for i, level in _levels(found) if level == 0 and _relation(found[i])]
    if relations:
        return _related(found, relations, text, depth)
    unions = _split(found, lambda token: token.text == "cup")
    if len(unions) > 1:
        return Shape("union", text, tuple(_member(part, depth) for part in unions))
    return _bracketed(found, text, depth) or _value(found, text)


def _whole(found: Sequence[Token]) -> bool:
    """Whether the first bracket is closed by the last."""
    return all(level > 0 for _, level in _levels(found)[1:-1])


def _member(found: Sequence[Token], depth: int) -> Shape:
    return _read(found, _text(found), depth + 1)


def _text(found: Sequence[Token]) -> str:
    return " ".join("\\" + token.text if token.kind == "command" else token.text for token in found)


def _separator(token: Token) -> bool:
    return token.kind in ("text", "word", "command") and token.text.strip().lower() in _SEPARATORS


def _relation(token: Token) -> bool:
    if token.kind == "command":
        return token.text in _ORDER or token.text in _OTHER_RELATIONS or token.text == "in"
    return token.kind == "mark" and token.text in ("=", "<", ">", "≈", "≡", "~", "→", "⇒", "≅")


def _levels(found: Sequence[Token]) -> list[tuple[int, int]]:
    """Every token's place and how many brackets it stands in."""
    level, levels = 0, []
    for i, token in enumerate(found):
        if token.kind in ("mark", "command") and token.text in _CLOSE:
            level -= 1
        levels.append((i, level))
        if token.kind in ("mark", "command") and token.text in _OPEN:
            level += 1
    return levels


def _split(found: Sequence[Token], at: object) -> list[Sequence[Token]]:
    assert callable(at)
    places = [i for i, level in _levels(found) if level == 0 and at(found[i])]
    parts = [found[a + 1 : b] for a, b in zip([-1, *places], [*places, len(found)], strict=True)]
    # `1, 2, and 3` has an empty part between its comma and its word
    return [
        part for i, part in enumerate(parts) if part or not 0 < i < len(parts) - 1 or not _separator(found[places[i]])
    ]


def _special(found: Sequence[Token], text: str) -> Shape | None:
    """Words, times of day, numbers in other bases, and the empty set."""
    if " ".join(token.text.strip().lower() for token in found) in _EMPTY or [t.text for t in found] == ["\\{", "\\}"]:
        return Shape("set", text)
    written = "".join(token.text for token in found)
    if _prose(found) and not re.search(r"[\d=<>^_|]", written):
        alone = len(found) == 1 and found[0].kind == "word" and len(found[0].text) < 4
        return None if alone else Shape("text", text, name=words(written))
    if time := _TIME.fullmatch(re.sub(r"[{}]", "", written).strip()):
        return Shape("text", text, name=f"{int(time[1])}:{time[2]}{(time[3] or '').lower()}")
    if base := _BASE.fullmatch(written.replace(" ", "")):
        value = _WORDS.get(base[3]) or int(base[3][:4])
        return Shape("base", text, name=f"{base[2].upper().lstrip('0') or '0'}_{value}")
    return None


def _prose(found: Sequence[Token]) -> bool:
    """Whether the tokens are words, and the marks that stand between words."""
    marks = ("-", "'", "(", ")", "{", "}", ",", ".")
    return found[0].kind in ("text", "word") and all(
        token.kind in ("text", "word") or (token.kind == "mark" and token.text in marks) for token in found
    )


def _list(members: list[Shape], text: str) -> Shape:
    """A list; where all its equations are about one variable, their right sides: `x = 1 or x = 2`, `x = 1, 2`."""
    names = {member.name for member in members if member.kind == "equation"}
    others = {member.kind for member in members} - {"equation"}
    if (
        len(names) == 1
        and members[0].kind == "equation"
        and names != {""}
        and others <= {"value"}
        and "(" not in members[0].name
    ):
        members = [member.parts[1] if member.kind == "equation" else member for member in members]
    flat = [part for member in members for part in (member.parts if member.kind == "list" else (member,))]
    return Shape("list", text, tuple(flat))


def _related(found: Sequence[Token], relations: list[int], text: str, depth: int) -> Shape:
    signs = [found[i].text for i in relations]
    parts = [found[a + 1 : b] for a, b in zip([-1, *relations], [*relations, len(found)], strict=True)]
    if not all(parts):
        return Shape("opaque", text)
    if signs == ["in"]:
        member = _member(parts[1], depth)
        ranges = member.kind in ("tuple", "set", "union")
        return replace(member, text=text) if ranges and _lone(parts[0]) else Shape("opaque", text)
    if signs == ["="]:
        sides = tuple(_member(part, depth) for part in parts)
        right = sides[1]
        if right.kind == "list":  # x = 1 \pm \sqrt{2}
            return right if _lone(parts[0]) else Shape("opaque", text)
        return Shape("equation", text, sides, name=_lone(parts[0]))
    if set(signs) == {"="}:
        return Shape("chain", text, tuple(_member(part, depth) for part in parts))
    if all(sign in _ORDER for sign in signs):
        return _inequality([_ORDER[sign] for sign in signs], parts, text, depth)
    return Shape("opaque", text)


def _inequality(signs: list[str], parts: list[Sequence[Token]], text: str, depth: int) -> Shape:
    """`a < x <= b` as the interval `(a, b]` of x."""
    variable = parts[1] if len(parts) == 3 else parts[0] if _lone(parts[0]) else parts[1]
    name = _lone(variable)
    if len(parts) > 3 or not name or len({sign[0] for sign in signs}) != 1:
        return Shape("opaque", text)
    low: Shape = Shape("value", "-oo", node=negative(Node("symbol", name="oo")))
    high: Shape = Shape("value", "oo", node=Node("symbol", name="oo"))
    left, right = "(", ")"
    for place, sign in enumerate(signs):
        other = parts[place] if parts[place] is not variable else parts[place + 1]
        below = (sign[0] == "<") == (parts[place] is not variable)  # whether the other side is the smaller one
        if below:
            low, left = _member(other, depth), "[" if "=" in sign else "("
        else:
            high, right = _member(other, depth), "]" if "=" in sign else ")"
    if {low.kind, high.kind} != {"value"}:
        return Shape("opaque", text)
    return Shape("inequality", text, (low, high), brackets=left + right, name=name)


def _lone(found: Sequence[Token]) -> str:
    """The name on an equation's left side where that is a variable, `f(x)`, `AB`, `\\angle ABC`; else nothing."""
    if found and found[0].kind == "command" and found[0].text in ("angle", "triangle", "overline", "measuredangle"):
        name = "".join(token.text for token in found if token.text not in ("{", "}"))
        letters = all(token.kind in ("letter", "word") or token.text in ("{", "}") for token in found[1:])
        return name if letters and 1 < len(found) <= 6 and name.removeprefix(found[0].text).isupper() else ""
    try:
        node = expression(found)
    except NotReadError:
        return ""
    if node.kind == "symbol":
        return "" if node.name in ("pi", "oo") else node.name
    letters = node.kind == "product" and all(part.kind == "symbol" for part in node.parts)
    joined = len(found) == 1 and found[0].kind == "word" and found[0].text.isupper()
    applied = len(node.parts) == 2 and [t.text for t in found[1:2]] == ["("] and found[-1].text == ")"
    return "".join(token.text for token in found) if letters and (joined or applied) else ""


def _bracketed(found: Sequence[Token], text: str, depth: int) -> Shape | None:
    first, last = found[0].text, found[-1].text
    if first == "begin":
        return _matrix(found, text, depth)
    if first not in ("(", "[", "\\{", "langle") or last not in _CLOSE or not _whole(found):
        return None
    inside = _split(found[1:-1], lambda token: token.text in (",", ";"))
    if not all(inside) or len(inside) > MOST_MEMBERS:
        return Shape("opaque", text)
    if first == "\\{":
        if last != "\\}":
            return Shape("opaque", text)
        members = [_member(part, depth) for part in inside]
        return Shape("set", text, tuple(p for m in members for p in (m.parts if m.kind == "list" else (m,))))
    if len(inside) == 1:
        inner = _member(inside[0], depth) if first == "(" and last == ")" else Shape("opaque", text)
        return replace(inner, text=text) if inner.kind in ("value", "text", "list") else None
    brackets = "()" if first == "langle" else first + last
    if "\\}" in brackets or (len(inside) != 2 and brackets not in ("()", "[]")):
        return Shape("opaque", text)
    return Shape("tuple", text, tuple(_member(part, depth) for part in inside), brackets=brackets)


def _matrix(found: Sequence[Token], text: str, depth: int) -> Shape:
    names = [token.text for token in found]
    inside = found[4:-4]
    if names[1:4] not in (["{", "pmatrix", "}"], ["{", "bmatrix", "}"], ["{", "matrix", "}"], ["{", "vmatrix", "}"]):
        return Shape("opaque", text)
    if names[-4:-2] != ["end", "{"] or "begin" in names[1:] or names[2] == "vmatrix":
        return Shape("opaque", text)
    rows = [row for row in _split(inside, lambda token: token.text == "\\") if row]
    cells = [_split(row, lambda token: token.text == "&") for row in rows]
    if not all(all(row) for row in cells) or sum(map(len, cells)) > MOST_MEMBERS:
        return Shape("opaque", text)
    lines = [
        Shape("tuple", _text(row), tuple(_member(cell, depth) for cell in line), brackets="()")
        for row, line in zip(rows, cells, strict=True)
    ]
    return Shape("matrix", text, tuple(lines))


def _value(found: Sequence[Token], text: str) -> Shape:
    rest, name, percent = _without_unit(list(found))
    try:
        choices = _plus_and_minus(expression(rest))
    except NotReadError:
        return Shape("opaque", text)
    shapes = [Shape("value", text, node=choice, unit=name, percent=percent) for choice in choices]
    return shapes[0] if len(shapes) == 1 else Shape("list", text, tuple(shapes))


def _without_unit(found: list[Token]) -> tuple[list[Token], str | None, bool]:
    """The tokens less their unit, the unit, and whether a per cent sign stood behind them."""
    sign = 1 if found[0].text in ("-", "+") else 0
    if len(found) > sign + 1 and found[sign].text in ("\\$", "euro", "pounds"):
        name = {"\\$": "dollar"}.get(found[sign].text, found[sign].text)
        return [*found[:sign], *found[sign + 1 :]], name, False
    texts = [token.text for token in found]
    for tail in (["^", "circ"], ["^", "{", "circ", "}"], ["degree"]):
        if len(texts) > len(tail) and texts[-len(tail) :] == tail:
            return (found, None, False) if _applied(found) else (found[: -len(tail)], "deg", False)
    if len(found) > 1 and (texts[-1] == "%" or texts[-1].strip().lower() in ("percent", "per cent")):
        return found[:-1], None, True
    power = ""
    if len(texts) > 3 and texts[-2] == "^" and texts[-1] in ("2", "3"):
        power, found = texts[-1], found[:-2]
    elif len(texts) > 5 and texts[-4:-2] == ["^", "{"] and texts[-2] in ("2", "3") and texts[-1] == "}":
        power, found = texts[-2], found[:-4]
    last = found[-1]
    if len(found) > 1 and last.kind in ("text", "word"):
        start = len(found) - 1
        while start > 1 and found[start - 1].kind == "word" and last.kind == "word":
            start -= 1
        said = " ".join(token.text for token in found[start:])
        longer = last.kind == "text" or len(said) > 3 or said in ("cm", "km", "mm", "kg", "ft", "mph", "min", "hrs")
        measure = unit(said, power) if longer and found[start - 1].kind != "word" else None
        if measure is not None:
            return found[:start], measure, False
    if power:
        raise_back = [Token("mark", "^"), Token("number", power)]
        found = [*found, *raise_back]
    return found, None, False


def _applied(found: list[Token]) -> bool:
    """Whether degrees at the end belong to a function: `\\sin 30^\\circ` is no angle."""
    return any(token.text in FUNCTIONS for token in found)


def _plus_and_minus(node: Node) -> list[Node]:
    """The two values of an expression with one plus-or-minus; of others the expression itself."""
    if node.kind == "pm":
        a, b = node.parts
        if _has_pm(a) or _has_pm(b):
            raise NotReadError("two plus-or-minus")
        plus, minus = Node("sum", (a, b)), Node("sum", (a, negative(b)))
        return [plus, minus] if not (a.kind == "number" and a.value == 0) else [b, negative(b)]
    inner = [i for i, part in enumerate(node.parts) if _has_pm(part)]
    if not inner:
        return [node]
    if len(inner) > 1:
        raise NotReadError("two plus-or-minus")
    place = inner[0]
    return [
        replace(node, parts=(*node.parts[:place], choice, *node.parts[place + 1 :]), literal=False)
        for choice in _plus_and_minus(node.parts[place])
    ]


def _has_pm(node: Node) -> bool:
    return node.kind == "pm" or any(_has_pm(part) for part in node.parts)
