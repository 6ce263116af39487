"""Parse an answer by its outermost structure: a value, a list, a set, a tuple or interval, an equation, words, ...

Members are parsed by the same rules. What fits no structure is `opaque`: it can be equal as text, or math-verify may
parse it in the worker.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from trimtab.grading.mathematics.nodes import (
    INFINITY,
    MINUS_INFINITY,
    Node,
    ParsedAnswer,
    ParseError,
    expand_plus_minus,
    intersect,
    negated,
    number,
    scaled,
    symbols,
)
from trimtab.grading.mathematics.parser import parse_expression
from trimtab.grading.mathematics.tokenizer import (
    CLOSE,
    Token,
    close_open_intervals,
    depths,
    enclosing_braces,
    is_enclosed,
    normalize_latex,
    outside,
    split,
    tokenize,
)
from trimtab.grading.mathematics.units import strip_unit

MAX_DEPTH = 6
MAX_MEMBERS = 200  # unordered members are compared with each other, which is quadratic

_COMPARISONS = {"<": "<", ">": ">", "le": "<=", "ge": ">="}
_OTHER_RELATIONS = frozenset(
    "ne approx equiv sim simeq cong rightarrow Rightarrow implies mapsto not notin iff".split()
)
_CONJUNCTIONS = frozenset(("and", ", and", "land", "wedge"))
_SEPARATORS = _CONJUNCTIONS | {"or", ", or", "lor", "vee"}
_EMPTY = frozenset(
    "emptyset|no solution|no solutions|no real solution|no real solutions|none|the empty set|empty set".split("|")
)
_ALL_NUMBERS = frozenset("all real numbers|all reals|the set of all real numbers|the real numbers".split("|"))
_INTRODUCTION = re.compile(
    r"\s*(?:(?:so|thus|therefore|hence),?\s*)?(?:the )?(?:final )?(?:answer|total|result)(?: is|:| is:)\s*",
    re.IGNORECASE,
)
_LABELS = frozenset(
    "answer total result area perimeter volume sum product probability length distance value number".split()
)
_TIME = re.compile(r"(\d{1,2})(?::(\d{2})(?::(\d{2}))?)?(?:\s*\(?([ap])\.?\s?m\.?\)?)?", re.IGNORECASE | re.ASCII)
_BASE = re.compile(
    r"(\()?([0-9A-Fa-f]*\d[0-9A-Fa-f]*)(?(1)\))(?:_(?:base)?|\(?base)"
    r"\(?(\d+|two|three|four|five|six|seven|eight|nine|ten|twelve|sixteen)\)?\)?",
    re.ASCII,
)
_MATRICES = [["{", name, "}"] for name in ("pmatrix", "bmatrix", "matrix", "Bmatrix", "smallmatrix", "array")]
_TRANSPOSED = [["^", "T"], ["^", "{", "T", "}"], ["^", "top"], ["^", "{", "top", "}"]]
_BASE_NAMES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
          "twelve": 12, "sixteen": 16}  # fmt: skip


def parse_answer(source: str) -> ParsedAnswer:
    """Parse an answer."""
    return _parse(close_open_intervals(tokenize(source)), normalize_latex(source), 0)


def normalize_words(text: str) -> str:
    """Return an answer in words as it is compared: casefolded, without braces and surrounding punctuation."""
    bare = re.sub(r"\\text|[{}$\\]", " ", text).casefold()
    return re.sub(r"\s*,\s*", ",", " ".join(bare.split())).strip("().,;: ")


def _parse(tokens: Sequence[Token], text: str, depth: int) -> ParsedAnswer:
    answer = _parse_structure(tokens, text, depth)
    if answer.kind != "opaque":
        return answer
    worded = any(t.kind == "text" or (t.kind == "word" and len(t.text) > 3) for t in tokens)
    return replace(answer, text=" ".join(_join(_trim(tokens, depth)).split()), worded=worded)  # without outer braces


def _parse_structure(tokens: Sequence[Token], text: str, depth: int) -> ParsedAnswer:
    if all(token.text in (".", ",", ";", "\\") for token in tokens):
        return ParsedAnswer("none", text)
    tokens = _trim(tokens, depth)
    if not tokens or depth > MAX_DEPTH:
        return ParsedAnswer("opaque" if tokens else "none", text)
    if (special := _parse_special(tokens, text) or _parse_cases(tokens, text, depth)) is not None:
        return special
    members = split(tokens, lambda token: token.text in (",", ";") or _is_separator(token), _is_separator)
    if len(members) > 1:
        if len(members) > MAX_MEMBERS or not all(members):
            return ParsedAnswer("opaque", text)
        words = [tokens[i] for i in outside(tokens, _is_separator)]
        joint = "" if not words else "and" if _is_separator(words[-1], _CONJUNCTIONS) else "or"
        parsed = [_parse_member(member, depth) for member in members]
        if any(word.kind == "command" for word in words) and not all(map(_is_solution, parsed)):
            return ParsedAnswer("opaque", text, joint=joint)  # a statement of logic
        return _make_list(parsed, text, joint)
    relations = outside(tokens, _is_relation)
    if relations:
        return _parse_relation(tokens, relations, text, depth)
    unions = split(tokens, lambda token: token.text == "cup")
    if len(unions) > 1:
        return ParsedAnswer("union", text, tuple(_parse_member(part, depth) for part in unions))
    return _parse_bracketed(tokens, text, depth) or _parse_value(tokens, text)


def _trim(tokens: Sequence[Token], depth: int) -> Sequence[Token]:
    """Return the tokens without braces around them, a sign that ends a sentence, and words that introduce an answer."""
    ends = 0
    while tokens:
        last = tokens[-1].text
        if last == "\\" or (last in (".", ",", ";") and not ends and not depth):
            ends += last != "\\"  # one sign may end a sentence inside the box; `7..` is not 7
            tokens = tokens[:-1]
        elif pairs := enclosing_braces(tokens):
            tokens = tokens[pairs:-pairs]
        else:
            break
    if len(tokens) > 1 and not depth and tokens[0].kind == "text" and _INTRODUCTION.fullmatch(tokens[0].text):
        tokens = tokens[1:]
    return tokens


def _parse_cases(tokens: Sequence[Token], text: str, depth: int) -> ParsedAnswer | None:
    """Parse the lines of `\\begin{cases}` as a list; None for anything else."""
    texts = [token.text for token in tokens]
    if texts[:4] != ["begin", "{", "cases", "}"] or texts[-4:] != ["end", "{", "cases", "}"]:
        return None
    rows = split(tokens[4:-4], lambda token: token.text == "\\")
    lines = [[token for token in row if token.text != "&"] for row in rows if row]
    return _make_list([_parse_member(line, depth) for line in lines[:MAX_MEMBERS] if line], text, "and")


def _parse_member(tokens: Sequence[Token], depth: int) -> ParsedAnswer:
    return _parse(tokens, _join(tokens), depth + 1)


def _join(tokens: Sequence[Token]) -> str:
    return " ".join("\\" + token.text if token.kind == "command" else token.text for token in tokens)


def _is_separator(token: Token, words: frozenset[str] = _SEPARATORS) -> bool:
    return token.kind in ("text", "word", "command") and token.text.strip().lower() in words


def _is_relation(token: Token) -> bool:
    if token.kind == "command":
        return token.text in _COMPARISONS or token.text in _OTHER_RELATIONS or token.text == "in"
    return token.kind == "mark" and token.text in ("=", "<", ">", "≈", "≡", "~", "→", "⇒", "≅")


def _parse_special(tokens: Sequence[Token], text: str) -> ParsedAnswer | None:
    """Parse words, times of day, numbers in other bases, and the empty set; None for anything else."""
    spaced = " ".join(token.text.strip() for token in tokens)
    if spaced.lower().removesuffix(".") in _EMPTY or spaced == "\\{ \\}":
        return ParsedAnswer("set", text)
    if spaced in ("mathbb { R }", "mathbb R") or spaced.lower() in _ALL_NUMBERS or tokens == [Token("command", "R")]:
        return ParsedAnswer("tuple", text, (MINUS_INFINITY, INFINITY), brackets="()")
    written = "".join(token.text for token in tokens)
    if _is_prose(tokens) and not re.search(r"[\d=<>^_|]", written):
        # A single short word may be a product of variables: `ab`.
        alone = len(tokens) == 1 and tokens[0].kind == "word" and len(tokens[0].text) < 4
        return None if alone else ParsedAnswer("text", text, name=normalize_words(written))
    written = re.sub(r"[{}]", "", written)
    time = _TIME.fullmatch(written.strip())
    if time and (time[2] or time[4]):
        name = f"{int(time[1])}:{time[2] or '00'}:{time[3] or '00'}{(time[4] or '').lower()}"
        return ParsedAnswer("text", text, name=name)
    if base := _BASE.fullmatch(written.replace(" ", "")):
        value = _BASE_NAMES.get(base[3]) or int(base[3][:4])
        return ParsedAnswer("base", text, name=f"{base[2].upper().lstrip('0') or '0'}_{value}")
    return None


def _is_prose(tokens: Sequence[Token]) -> bool:
    """Return whether the tokens are words and punctuation only."""
    marks = ("-", "'", "(", ")", "{", "}", ",", ".")
    return (
        tokens[0].kind in ("text", "word")
        and tokens[-1].text != "."
        and all(token.kind in ("text", "word") or (token.kind == "mark" and token.text in marks) for token in tokens)
    )


def _is_solution(answer: ParsedAnswer) -> bool:
    """Return whether an answer is an equation, an inequality or a number."""
    number_only = answer.kind == "value" and answer.node is not None and not symbols(answer.node) - {"pi", "e", "i"}
    return number_only or answer.kind in ("equation", "inequality")


def _make_list(members: list[ParsedAnswer], text: str, joint: str) -> ParsedAnswer:
    """Make a list; of equations of one variable (`x = 1 or x = 2`, `x = 1, 2`) it keeps the right sides.

    Inequalities of one variable are a union (`x < 1 or x > 3`), or if `and` joins two, an interval.
    """
    names = {member.name for member in members if member.kind in ("equation", "inequality")}
    one_variable = len(names) == 1 and names != {""}
    members = _name_points(members)
    kinds = {member.kind for member in members}
    if one_variable and kinds == {"inequality"}:
        return intersect(members, text) if joint == "and" else ParsedAnswer("union", text, tuple(members))
    if one_variable and kinds <= {"equation", "value"} and members[0].kind == "equation" and "(" not in members[0].name:
        members = [member.members[1] if member.kind == "equation" else member for member in members]
    else:
        names = {""}
    flat = [part for member in members for part in (member.members if member.kind == "list" else (member,))]
    return ParsedAnswer("list", text, tuple(_group_points(flat)), name=names.pop(), joint=joint)


def _name_points(members: list[ParsedAnswer]) -> list[ParsedAnswer]:
    """Take the names from `(x, y) = (5, 8)` if further points without them follow."""
    first, *others = members
    names = [member.name for member in first.members]
    points = {(member.kind, member.brackets, len(member.members)) for member in others}
    if first.kind != "list" or points != {("tuple", "()", len(names))} or names != sorted(set(names)) or "" in names:
        return members
    return [ParsedAnswer("tuple", first.text, tuple(each.members[1] for each in first.members), brackets="()"), *others]


def _group_points(members: list[ParsedAnswer]) -> list[ParsedAnswer]:
    """Make `p = 5, q = 2, p = 7, q = 2` two lists, one for each time that all of the variables are given."""
    names = [member.name if member.kind == "equation" else "" for member in members]
    size = len(set(names))
    chunks = [members[start : start + size] for start in range(0, len(members), size)]
    if not 1 < size < len(members) or "" in names or any({m.name for m in chunk} != set(names) for chunk in chunks):
        return members
    return [ParsedAnswer("list", ", ".join(member.text for member in chunk), tuple(chunk)) for chunk in chunks]


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
        if assigned := _parse_assignments(sides, text):
            return assigned
        name = _variable_name(parts[0]) or (_quantity_name(parts[0]) if _is_plain(right) else "")
        if not name and sides[0].node and not symbols(sides[0].node) and (name := _variable_name(parts[1])):
            sides = sides[::-1]  # 3 = x
        return ParsedAnswer("equation", text, sides, name=name)
    if set(signs) == {"="}:
        return ParsedAnswer("chain", text, tuple(_parse_member(part, depth) for part in parts))
    if all(sign in _COMPARISONS for sign in signs):
        return _parse_inequality([_COMPARISONS[sign] for sign in signs], parts, text, depth)
    return ParsedAnswer("opaque", text)


def _parse_assignments(sides: tuple[ParsedAnswer, ...], text: str) -> ParsedAnswer | None:
    """Parse `(x, y) = (1, 2)` as the list `x = 1, y = 2`; None for any other equation."""
    left, right = sides
    if left.kind != "tuple" or right.kind != "tuple" or len(left.members) != len(right.members):
        return None
    names = [member.node.name for member in left.members if member.node and member.node.kind == "symbol"]
    if len(set(names)) < len(left.members) or {left.brackets, right.brackets} != {"()"}:
        return None
    pairs = zip(names, left.members, right.members, strict=True)
    return ParsedAnswer(
        "list", text, tuple(ParsedAnswer("equation", text, (member, value), name=name) for name, member, value in pairs)
    )


def _parse_inequality(signs: list[str], parts: list[Sequence[Token]], text: str, depth: int) -> ParsedAnswer:
    """Parse `a < x <= b` as the interval `(a, b]` of x, and `-x < a` as `x > -a`."""
    variable = parts[1] if len(parts) == 3 or not _signed_variable(parts[0]) else parts[0]
    name = _signed_variable(variable)
    if len(parts) > 3 or not name or len({sign[0] for sign in signs}) != 1:
        return ParsedAnswer("opaque", text)
    low, high, left, right = MINUS_INFINITY, INFINITY, "(", ")"
    for place, sign in enumerate(signs):
        other = parts[place] if parts[place] is not variable else parts[place + 1]
        below = (sign[0] == "<") == (parts[place] is not variable)  # the other side is the lower bound
        if below:
            low, left = _parse_member(other, depth), "[" if "=" in sign else "("
        else:
            high, right = _parse_member(other, depth), "]" if "=" in sign else ")"
    if {low.kind, high.kind} != {"value"}:
        return ParsedAnswer("opaque", text)
    if name.startswith("-"):
        low, high, name = negated(high), negated(low), name[1:]
        left, right = "[" if right == "]" else "(", "]" if left == "[" else ")"
    return ParsedAnswer("inequality", text, (low, high), brackets=left + right, name=name)


def _signed_variable(tokens: Sequence[Token]) -> str:
    """Return `x` or `-x` where the tokens are a variable's name or minus it, else an empty text."""
    if len(tokens) > 1 and tokens[0].text == "-":
        name = _variable_name(tokens[1:])
        return "-" + name if name else ""
    return _variable_name(tokens)


def _variable_name(tokens: Sequence[Token]) -> str:
    """Return an equation's left side if it is a name (`x`, `f(x)`, `AB`, `\\angle ABC`), else an empty text."""
    if tokens and tokens[0].kind == "command" and tokens[0].text in ("angle", "triangle", "overline", "measuredangle"):
        name = "".join(token.text for token in tokens if token.text not in ("{", "}"))
        letters = all(token.kind in ("letter", "word") or token.text in ("{", "}") for token in tokens[1:])
        return name if letters and 1 < len(tokens) <= 6 and name.removeprefix(tokens[0].text).isupper() else ""
    if len(tokens) == 1 and tokens[0].kind == "text" and tokens[0].text.strip().lower() in _LABELS:
        return tokens[0].text.strip().lower()
    try:
        node = parse_expression(tokens)
    except ParseError:
        return ""
    if node.kind == "symbol":
        return "" if node.name in ("pi", "oo") else node.name
    letters = all(part.kind == "symbol" for part in node.children)
    joined = len(tokens) == 1 and tokens[0].kind == "word" and tokens[0].text.isupper()
    applied = tokens[-1].text == ")" and (
        node.name.endswith("()") or (len(node.children) == 2 and tokens[1].text == "(")
    )
    sized = node.kind == "function" and node.name == "abs" and tokens[1].text.isupper()  # |S|
    return "".join(token.text for token in tokens) if letters and (joined or applied or sized) else ""


def _quantity_name(tokens: Sequence[Token]) -> str:
    """Return a length (`|AB|`) or a ratio of names (`AB:CD`, `\\frac{AB}{CD}`) as a name, else an empty text."""
    texts = [token.text for token in tokens]
    if len(tokens) == 3 and texts[0] == texts[2] == "|" and tokens[1].kind == "word":
        return "".join(texts) if texts[1].isupper() else ""
    closed = outside(tokens, lambda token: token.text == "}")
    if texts[:2] == ["frac", "{"] and len(closed) == 2 and closed[1] == len(tokens) - 1:
        parts = [tokens[2 : closed[0]], tokens[closed[0] + 2 : -1]]
    else:
        parts = list(split(tokens, lambda token: token.text in (":", "/")))
    names = [_variable_name(part) or _quantity_name(part) for part in parts] if len(parts) > 1 and all(parts) else []
    return ":".join(names) if all(names) else ""


def _is_plain(answer: ParsedAnswer) -> bool:
    """Return whether an answer is a number or a ratio of numbers (`1:2:3`)."""
    if answer.node is not None:
        return not symbols(answer.node) - {"pi", "e"}
    return re.fullmatch(r"[\d: ]+", answer.text, re.ASCII) is not None


def _parse_bracketed(tokens: Sequence[Token], text: str, depth: int) -> ParsedAnswer | None:
    first, last = tokens[0].text, tokens[-1].text
    begin = next((place for place, token in enumerate(tokens) if token.text == "begin"), None)
    if begin and tokens[begin - 1].text + last in ("()", "[]") and is_enclosed(tokens[begin - 1 :]):
        tokens, begin = [*tokens[: begin - 1], *tokens[begin:-1]], begin - 1  # the brackets of an array
    if begin is not None and depths(tokens)[begin] == 0:
        return _parse_matrix(tokens, text, depth)
    if first not in ("(", "[", "\\{", "langle") or last not in CLOSE or not is_enclosed(tokens):
        return None
    inside = split(tokens[1:-1], lambda token: token.text in (",", ";"))
    if not all(inside) or len(inside) > MAX_MEMBERS:
        return ParsedAnswer("opaque", text)
    if first == "\\{":
        if last != "\\}":
            return ParsedAnswer("opaque", text)
        if described := _parse_set_builder(tokens[1:-1], text, depth):
            return described
        members = [_parse_member(part, depth) for part in inside]
        return ParsedAnswer("set", text, tuple(p for m in members for p in (m.members if m.kind == "list" else (m,))))
    if len(inside) == 1:
        opened = {"()": ("value", "text", "list", "matrix"), "[]": ("matrix",)}.get(first + last, ())
        inner = _parse_member(inside[0], depth) if opened else ParsedAnswer("opaque", text)
        return replace(inner, text=text) if inner.kind in opened else None
    brackets = "()" if first == "langle" else first + last
    if "\\}" in brackets or (len(inside) != 2 and brackets not in ("()", "[]")):
        return ParsedAnswer("opaque", text)
    turned = "command" in (tokens[0].kind, tokens[-1].kind) and first != "langle"  # was `]1, 2[`, which is no list
    members = [_parse_member(part, depth) for part in inside]
    return ParsedAnswer("tuple", text, tuple(members), brackets=brackets, joint="interval" if turned else "")


def _parse_set_builder(tokens: Sequence[Token], text: str, depth: int) -> ParsedAnswer | None:
    """Parse what is between the braces of `{x | 1 < x < 2}` as that range; None for any other set."""
    bar = next(iter(outside(tokens, lambda token: token.text in ("|", ":"))), None)
    if bar is None:
        return None
    left = split(tokens[:bar], lambda token: token.text == "in")
    right = _parse_member(tokens[bar + 1 :], depth)
    name = right.name or (right.members[0].name if right.kind == "union" else "")
    real = len(left) == 1 or (len(left) == 2 and _parse_member(left[1], depth).members == (MINUS_INFINITY, INFINITY))
    known = right.kind in ("inequality", "union") and name and real and _variable_name(left[0]) == name
    return replace(right, text=text) if known else None


def _parse_matrix(tokens: Sequence[Token], text: str, depth: int) -> ParsedAnswer:
    """Parse a matrix: a number or expression may stand before it, a transposition behind it."""
    start = next(place for place, token in enumerate(tokens) if token.text == "begin")
    scale, factor = _join(tokens[:start]), _parse_factor(tokens[:start])
    tokens = tokens[start:]
    names = [token.text for token in tokens]
    raised = next((tail for tail in _TRANSPOSED if names[-len(tail) :] == tail), [])
    tokens, names = tokens[: len(tokens) - len(raised)], names[: len(names) - len(raised)]
    # A determinant (vmatrix) is a number, which nothing here computes.
    bare = names[1:4] in _MATRICES and names[-4:-2] == ["end", "{"] and "begin" not in names[1:]
    if not bare or factor is None:
        return ParsedAnswer("opaque", text)
    first = 4 if names[2] != "array" else 1 + names.index("}", 4) if "}" in names[4:-4] else len(names)
    rows = [row for row in split(tokens[first:-4], lambda token: token.text == "\\") if row]
    cells = [split(row, lambda token: token.text == "&") for row in rows]
    if not cells or not all(all(row) for row in cells) or sum(map(len, cells)) > MAX_MEMBERS:
        return ParsedAnswer("opaque", text)
    table = [tuple(scaled(_parse_member(cell, depth), factor, scale) for cell in line) for line in cells]
    if raised:
        if len(set(map(len, table))) > 1:
            return ParsedAnswer("opaque", text)
        table = list(zip(*table, strict=True))
    return ParsedAnswer("matrix", text, tuple(ParsedAnswer("tuple", text, line, brackets="()") for line in table))


def _parse_factor(tokens: Sequence[Token]) -> Node | None:
    """Return what a matrix is multiplied by, 1 if nothing stands before it; None where that is no expression."""
    if tokens and tokens[-1].text in ("cdot", "times"):
        tokens = tokens[:-1]
    if not tokens or (len(tokens) == 1 and tokens[0].text in ("+", "-")):
        return number(-1 if tokens and tokens[0].text == "-" else 1)
    try:
        return parse_expression(tokens)
    except ParseError:
        return None


def _parse_value(tokens: Sequence[Token], text: str) -> ParsedAnswer:
    rest, name, percent = strip_unit(list(tokens))
    try:
        choices = expand_plus_minus(parse_expression(rest))
    except ParseError:
        return ParsedAnswer("opaque", text)
    shapes = [ParsedAnswer("value", text, node=choice, unit=name, percent=percent) for choice in choices]
    return shapes[0] if len(shapes) == 1 else ParsedAnswer("list", text, tuple(shapes))
