"""Parse an answer by its outermost structure: a value, a list, a set, a tuple or interval, an equation, words, ...

Members are parsed by the same rules. What fits no structure is `opaque`: it can be equal as text, or math-verify may
parse it in the worker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trimtab.rewards.mathematics.commands import FUNCTIONS
from trimtab.rewards.mathematics.nodes import Node, ParseError, negate
from trimtab.rewards.mathematics.parser import parse_expression
from trimtab.rewards.mathematics.tokenizer import Token, normalize_latex, tokenize
from trimtab.rewards.mathematics.units import parse_unit

MAX_DEPTH = 6
MAX_MEMBERS = 200  # unordered members are compared with each other, which is quadratic

AnswerKind = Literal[
    "value", "list", "set", "tuple", "union", "matrix", "equation", "inequality", "chain", "text", "base", "opaque",
    "none",
]  # fmt: skip
_OPEN, _CLOSE = frozenset(("(", "[", "\\{", "{", "langle")), frozenset((")", "]", "\\}", "}", "rangle"))
_COMPARISONS = {"<": "<", ">": ">", "le": "<=", "ge": ">="}
_OTHER_RELATIONS = frozenset(
    "ne approx equiv sim simeq cong rightarrow Rightarrow implies mapsto not notin iff".split()
)
_SEPARATORS = frozenset(("or", "and", ", and", ", or", "lor", "vee", "land", "wedge"))
_EMPTY = frozenset(
    "emptyset|no solution|no solutions|no real solution|no real solutions|none|the empty set|empty set".split("|")
)
_TIME = re.compile(r"(\d{1,2}):(\d{2})(?:\s*\(?([ap])\.?\s?m\.?\)?)?", re.IGNORECASE)
_BASE = re.compile(
    r"(\()?([0-9A-Fa-f]*\d[0-9A-Fa-f]*)(?(1)\))_\{?(\d+|two|three|four|five|six|seven|eight|nine|ten|twelve|sixteen)\}?"
)
_BASE_NAMES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
          "twelve": 12, "sixteen": 16}  # fmt: skip


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer: its kind, its members, and for a value its expression, unit and percent sign."""

    kind: AnswerKind
    text: str  # of the whole
    members: tuple[ParsedAnswer, ...] = ()
    node: Node | None = None
    unit: str | None = None
    percent: bool = False
    brackets: str = ""  # of a tuple, which includes intervals such as `[0,1)`
    name: str = ""  # the variable of an inequality, or an equation's left side where that is a single variable


def parse_answer(source: str) -> ParsedAnswer:
    """Parse an answer."""
    return _parse(tokenize(source), normalize_latex(source), 0)


def normalize_words(text: str) -> str:
    """Return an answer in words as it is compared: casefolded, without braces and surrounding punctuation."""
    bare = re.sub(r"\\text|[{}$\\]", " ", text).casefold()
    return re.sub(r"\s*,\s*", ",", " ".join(bare.split())).strip("().,;: ")


def _parse(tokens: Sequence[Token], text: str, depth: int) -> ParsedAnswer:
    while tokens and tokens[-1].text in (".", ",", ";", "\\"):  # the end of a sentence inside the box
        tokens = tokens[:-1]
    while len(tokens) > 1 and tokens[0].text == "{" and tokens[-1].text == "}" and _is_enclosed(tokens):
        tokens = tokens[1:-1]
    if not tokens or depth > MAX_DEPTH:
        return ParsedAnswer("opaque" if tokens else "none", text)
    if (special := _parse_special(tokens, text)) is not None:
        return special
    members = _split(tokens, lambda token: token.text in (",", ";") or _is_separator(token))
    if len(members) > 1:
        if len(members) > MAX_MEMBERS or not all(members):
            return ParsedAnswer("opaque", text)
        return _make_list([_parse_member(member, depth) for member in members], text)
    relations = [i for i, level in _levels(tokens) if level == 0 and _is_relation(tokens[i])]
    if relations:
        return _parse_relation(tokens, relations, text, depth)
    unions = _split(tokens, lambda token: token.text == "cup")
    if len(unions) > 1:
        return ParsedAnswer("union", text, tuple(_parse_member(part, depth) for part in unions))
    return _parse_bracketed(tokens, text, depth) or _parse_value(tokens, text)


def _is_enclosed(tokens: Sequence[Token]) -> bool:
    """Return whether the first bracket is closed by the last."""
    return all(level > 0 for _, level in _levels(tokens)[1:-1])


def _parse_member(tokens: Sequence[Token], depth: int) -> ParsedAnswer:
    return _parse(tokens, _join(tokens), depth + 1)


def _join(tokens: Sequence[Token]) -> str:
    return " ".join("\\" + token.text if token.kind == "command" else token.text for token in tokens)


def _is_separator(token: Token) -> bool:
    return token.kind in ("text", "word", "command") and token.text.strip().lower() in _SEPARATORS


def _is_relation(token: Token) -> bool:
    if token.kind == "command":
        return token.text in _COMPARISONS or token.text in _OTHER_RELATIONS or token.text == "in"
    return token.kind == "mark" and token.text in ("=", "<", ">", "≈", "≡", "~", "→", "⇒", "≅")


def _levels(tokens: Sequence[Token]) -> list[tuple[int, int]]:
    """Return every token's index and bracket depth."""
    level, levels = 0, []
    for i, token in enumerate(tokens):
        if token.kind in ("mark", "command") and token.text in _CLOSE:
            level -= 1
        levels.append((i, level))
        if token.kind in ("mark", "command") and token.text in _OPEN:
            level += 1
    return levels


def _split(tokens: Sequence[Token], at: Callable[[Token], bool]) -> list[Sequence[Token]]:
    """Split the tokens at the separators that stand outside brackets."""
    places = [i for i, level in _levels(tokens) if level == 0 and at(tokens[i])]
    parts = [tokens[a + 1 : b] for a, b in zip([-1, *places], [*places, len(tokens)], strict=True)]
    last = len(parts) - 1
    # `1, 2, and 3` has an empty part between its comma and its `and`.
    return [part for i, part in enumerate(parts) if part or not 0 < i < last or not _is_separator(tokens[places[i]])]


def _parse_special(tokens: Sequence[Token], text: str) -> ParsedAnswer | None:
    """Parse words, times of day, numbers in other bases, and the empty set; None for anything else."""
    if " ".join(token.text.strip().lower() for token in tokens) in _EMPTY or [t.text for t in tokens] == ["\\{", "\\}"]:
        return ParsedAnswer("set", text)
    written = "".join(token.text for token in tokens)
    if _is_prose(tokens) and not re.search(r"[\d=<>^_|]", written):
        # A single short word may be a product of variables: `ab`.
        alone = len(tokens) == 1 and tokens[0].kind == "word" and len(tokens[0].text) < 4
        return None if alone else ParsedAnswer("text", text, name=normalize_words(written))
    if time := _TIME.fullmatch(re.sub(r"[{}]", "", written).strip()):
        return ParsedAnswer("text", text, name=f"{int(time[1])}:{time[2]}{(time[3] or '').lower()}")
    if base := _BASE.fullmatch(written.replace(" ", "")):
        value = _BASE_NAMES.get(base[3]) or int(base[3][:4])
        return ParsedAnswer("base", text, name=f"{base[2].upper().lstrip('0') or '0'}_{value}")
    return None


def _is_prose(tokens: Sequence[Token]) -> bool:
    """Return whether the tokens are words and punctuation only."""
    marks = ("-", "'", "(", ")", "{", "}", ",", ".")
    return tokens[0].kind in ("text", "word") and all(
        token.kind in ("text", "word") or (token.kind == "mark" and token.text in marks) for token in tokens
    )


def _make_list(members: list[ParsedAnswer], text: str) -> ParsedAnswer:
    """Make a list; of equations of one variable (`x = 1 or x = 2`, `x = 1, 2`) it keeps the right sides."""
    names = {member.name for member in members if member.kind == "equation"}
    one_variable = len(names) == 1 and names != {""} and {member.kind for member in members} <= {"equation", "value"}
    if one_variable and members[0].kind == "equation" and "(" not in members[0].name:
        members = [member.members[1] if member.kind == "equation" else member for member in members]
    flat = [part for member in members for part in (member.members if member.kind == "list" else (member,))]
    return ParsedAnswer("list", text, tuple(flat))


def _parse_relation(tokens: Sequence[Token], relations: list[int], text: str, depth: int) -> ParsedAnswer:
    signs = [tokens[i].text for i in relations]
    parts = [tokens[a + 1 : b] for a, b in zip([-1, *relations], [*relations, len(tokens)], strict=True)]
    if not all(parts):
        return ParsedAnswer("opaque", text)
    if signs == ["in"]:
        member = _parse_member(parts[1], depth)
        ranges = member.kind in ("tuple", "set", "union")
        return replace(member, text=text) if ranges and _variable_name(parts[0]) else ParsedAnswer("opaque", text)
    if signs == ["="]:
        sides = tuple(_parse_member(part, depth) for part in parts)
        right = sides[1]
        if right.kind == "list":  # x = 1 \pm \sqrt{2}
            return right if _variable_name(parts[0]) else ParsedAnswer("opaque", text)
        return ParsedAnswer("equation", text, sides, name=_variable_name(parts[0]))
    if set(signs) == {"="}:
        return ParsedAnswer("chain", text, tuple(_parse_member(part, depth) for part in parts))
    if all(sign in _COMPARISONS for sign in signs):
        return _parse_inequality([_COMPARISONS[sign] for sign in signs], parts, text, depth)
    return ParsedAnswer("opaque", text)


def _parse_inequality(signs: list[str], parts: list[Sequence[Token]], text: str, depth: int) -> ParsedAnswer:
    """Parse `a < x <= b` as the interval `(a, b]` of x."""
    variable = parts[1] if len(parts) == 3 else parts[0] if _variable_name(parts[0]) else parts[1]
    name = _variable_name(variable)
    if len(parts) > 3 or not name or len({sign[0] for sign in signs}) != 1:
        return ParsedAnswer("opaque", text)
    low: ParsedAnswer = ParsedAnswer("value", "-oo", node=negate(Node("symbol", name="oo")))
    high: ParsedAnswer = ParsedAnswer("value", "oo", node=Node("symbol", name="oo"))
    left, right = "(", ")"
    for place, sign in enumerate(signs):
        other = parts[place] if parts[place] is not variable else parts[place + 1]
        below = (sign[0] == "<") == (parts[place] is not variable)  # the other side is the lower bound
        if below:
            low, left = _parse_member(other, depth), "[" if "=" in sign else "("
        else:
            high, right = _parse_member(other, depth), "]" if "=" in sign else ")"
    if {low.kind, high.kind} != {"value"}:
        return ParsedAnswer("opaque", text)
    return ParsedAnswer("inequality", text, (low, high), brackets=left + right, name=name)


def _variable_name(tokens: Sequence[Token]) -> str:
    """Return an equation's left side where it is a name (`x`, `f(x)`, `AB`, `\\angle ABC`), else an empty text."""
    if tokens and tokens[0].kind == "command" and tokens[0].text in ("angle", "triangle", "overline", "measuredangle"):
        name = "".join(token.text for token in tokens if token.text not in ("{", "}"))
        letters = all(token.kind in ("letter", "word") or token.text in ("{", "}") for token in tokens[1:])
        return name if letters and 1 < len(tokens) <= 6 and name.removeprefix(tokens[0].text).isupper() else ""
    try:
        node = parse_expression(tokens)
    except ParseError:
        return ""
    if node.kind == "symbol":
        return "" if node.name in ("pi", "oo") else node.name
    letters = node.kind == "product" and all(part.kind == "symbol" for part in node.children)
    joined = len(tokens) == 1 and tokens[0].kind == "word" and tokens[0].text.isupper()
    applied = len(node.children) == 2 and [t.text for t in tokens[1:2]] == ["("] and tokens[-1].text == ")"
    return "".join(token.text for token in tokens) if letters and (joined or applied) else ""


def _parse_bracketed(tokens: Sequence[Token], text: str, depth: int) -> ParsedAnswer | None:
    first, last = tokens[0].text, tokens[-1].text
    if first == "begin":
        return _parse_matrix(tokens, text, depth)
    if first not in ("(", "[", "\\{", "langle") or last not in _CLOSE or not _is_enclosed(tokens):
        return None
    inside = _split(tokens[1:-1], lambda token: token.text in (",", ";"))
    if not all(inside) or len(inside) > MAX_MEMBERS:
        return ParsedAnswer("opaque", text)
    if first == "\\{":
        if last != "\\}":
            return ParsedAnswer("opaque", text)
        members = [_parse_member(part, depth) for part in inside]
        return ParsedAnswer("set", text, tuple(p for m in members for p in (m.members if m.kind == "list" else (m,))))
    if len(inside) == 1:
        inner = _parse_member(inside[0], depth) if first == "(" and last == ")" else ParsedAnswer("opaque", text)
        return replace(inner, text=text) if inner.kind in ("value", "text", "list") else None
    brackets = "()" if first == "langle" else first + last
    if "\\}" in brackets or (len(inside) != 2 and brackets not in ("()", "[]")):
        return ParsedAnswer("opaque", text)
    return ParsedAnswer("tuple", text, tuple(_parse_member(part, depth) for part in inside), brackets=brackets)


def _parse_matrix(tokens: Sequence[Token], text: str, depth: int) -> ParsedAnswer:
    names = [token.text for token in tokens]
    inside = tokens[4:-4]
    if names[1:4] not in (["{", "pmatrix", "}"], ["{", "bmatrix", "}"], ["{", "matrix", "}"], ["{", "vmatrix", "}"]):
        return ParsedAnswer("opaque", text)
    # A determinant (vmatrix) is a number, which nothing here computes.
    if names[-4:-2] != ["end", "{"] or "begin" in names[1:] or names[2] == "vmatrix":
        return ParsedAnswer("opaque", text)
    rows = [row for row in _split(inside, lambda token: token.text == "\\") if row]
    cells = [_split(row, lambda token: token.text == "&") for row in rows]
    if not all(all(row) for row in cells) or sum(map(len, cells)) > MAX_MEMBERS:
        return ParsedAnswer("opaque", text)
    lines = [
        ParsedAnswer("tuple", _join(row), tuple(_parse_member(cell, depth) for cell in line), brackets="()")
        for row, line in zip(rows, cells, strict=True)
    ]
    return ParsedAnswer("matrix", text, tuple(lines))


def _parse_value(tokens: Sequence[Token], text: str) -> ParsedAnswer:
    rest, name, percent = _strip_unit(list(tokens))
    try:
        choices = _expand_plus_minus(parse_expression(rest))
    except ParseError:
        return ParsedAnswer("opaque", text)
    shapes = [ParsedAnswer("value", text, node=choice, unit=name, percent=percent) for choice in choices]
    return shapes[0] if len(shapes) == 1 else ParsedAnswer("list", text, tuple(shapes))


def _strip_unit(tokens: list[Token]) -> tuple[list[Token], str | None, bool]:
    """Return the tokens without their unit, the unit, and whether a percent sign followed them."""
    sign = 1 if tokens[0].text in ("-", "+") else 0
    if len(tokens) > sign + 1 and tokens[sign].text in ("\\$", "euro", "pounds"):
        name = {"\\$": "dollar"}.get(tokens[sign].text, tokens[sign].text)
        return [*tokens[:sign], *tokens[sign + 1 :]], name, False
    texts = [token.text for token in tokens]
    for tail in (["^", "circ"], ["^", "{", "circ", "}"], ["degree"]):
        if len(texts) > len(tail) and texts[-len(tail) :] == tail:
            # In `\sin 30^\circ` the degrees belong to the function: it is not an angle.
            applied = any(token.text in FUNCTIONS for token in tokens)
            return (tokens, None, False) if applied else (tokens[: -len(tail)], "deg", False)
    if len(tokens) > 1 and (texts[-1] == "%" or texts[-1].strip().lower() in ("percent", "per cent")):
        return tokens[:-1], None, True
    power = ""
    if len(texts) > 3 and texts[-2] == "^" and texts[-1] in ("2", "3"):
        power, tokens = texts[-1], tokens[:-2]
    elif len(texts) > 5 and texts[-4:-2] == ["^", "{"] and texts[-2] in ("2", "3") and texts[-1] == "}":
        power, tokens = texts[-2], tokens[:-4]
    last = tokens[-1]
    if len(tokens) > 1 and last.kind in ("text", "word"):
        start = len(tokens) - 1
        while start > 1 and tokens[start - 1].kind == "word" and last.kind == "word":
            start -= 1
        name = " ".join(token.text for token in tokens[start:])
        longer = last.kind == "text" or len(name) > 3 or name in ("cm", "km", "mm", "kg", "ft", "mph", "min", "hrs")
        measure = parse_unit(name, power) if longer and tokens[start - 1].kind != "word" else None
        if measure is not None:
            return tokens[:start], measure, False
    if power:
        tokens = [*tokens, Token("mark", "^"), Token("number", power)]  # it was an exponent, not a unit's
    return tokens, None, False


def _expand_plus_minus(node: Node) -> list[Node]:
    """Return the two values of an expression with one plus-or-minus, else the expression itself."""
    if node.kind == "pm":
        a, b = node.children
        if _has_plus_minus(a) or _has_plus_minus(b):
            raise ParseError("more than one plus-or-minus")
        plus, minus = Node("sum", (a, b)), Node("sum", (a, negate(b)))
        return [plus, minus] if not (a.kind == "number" and a.value == 0) else [b, negate(b)]
    inner = [i for i, part in enumerate(node.children) if _has_plus_minus(part)]
    if not inner:
        return [node]
    if len(inner) > 1:
        raise ParseError("more than one plus-or-minus")
    place = inner[0]
    return [
        replace(node, children=(*node.children[:place], choice, *node.children[place + 1 :]), literal=False)
        for choice in _expand_plus_minus(node.children[place])
    ]


def _has_plus_minus(node: Node) -> bool:
    return node.kind == "pm" or any(_has_plus_minus(part) for part in node.children)
