"""Tokenize LaTeX as models write it, in linear time.

Variants of spelling (`\\dfrac`, `\\left(`, `$`, thin spaces, Unicode signs) become one; the rest is left to the parser.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from trimtab.grading.mathematics.commands import FUNCTIONS
from trimtab.grading.mathematics.unicode_latex import unicode_to_latex

MAX_ANSWER_CHARS = 2_000  # a longer answer is compared as text only

_ALIASES = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "nicefrac": "frac", "sfrac": "frac", "xfrac": "frac",
    "dbinom": "binom", "tbinom": "binom", "leq": "le", "geq": "ge",
    "leqslant": "le", "geqslant": "ge", "lt": "<", "gt": ">", "neq": "ne", "mbox": "text", "hbox": "text",
    "textbf": "text", "textit": "text", "textrm": "text", "textsf": "text", "texttt": "text", "textnormal": "text",
    "mathrm": "text", "mathbf": "text", "mathit": "text", "mathsf": "text", "operatorname": "text", "bm": "text",
    "boldsymbol": "text", "mathtt": "text", "pmb": "text", "textup": "text", "textsl": "text", "emph": "text",
    "varnothing": "emptyset", "lbrace": "{", "rbrace": "}", "lbrack": "[", "rbrack": "]", "lvert": "|",
    "rvert": "|", "vert": "|", "mid": "|", "ast": "cdot", "degree": "circ", "degrees": "circ", "dots": "ldots",
    "cdots": "ldots", "varepsilon": "epsilon", "vartheta": "theta", "varphi": "phi", "to": "rightarrow",
    "colon": ":", "slash": "/", "div": "/", "bmatrix": "pmatrix",
    "dollar": "$", "percent": "%", "tg": "tan", "ctg": "cot", "cosec": "csc", "arctg": "arctan", "Bbb": "mathbb",
    "bigcup": "cup", "mod": "bmod",
}  # fmt: skip
_IGNORED = frozenset(
    "left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr bigm displaystyle textstyle scriptstyle "
    "scriptscriptstyle limits nolimits quad qquad thinspace medspace enspace rm bf it cal mathstrut strut nobreak "
    "allowbreak tiny small normalsize large Large LARGE huge Huge bfseries boldmath underline fbox ensuremath "
    "therefore".split()
)
_SKIPPED_ARGUMENT = frozenset("hspace vspace phantom hphantom vphantom color textcolor colorbox".split())
_SPACED_THOUSANDS = re.compile(r"(?<![\d.])[1-9]\d{0,2}(?:(?:\\[,!;: ]|\{,\}|,\\!)\s?\d{3})+(?!\d)")
_TOKEN = re.compile(
    r"(?P<space>(?:\s|~|\\[,!;:> ]|\\(?=\s))+)"
    r"|\\(?P<command>[a-zA-Z]+)"
    r"|\\(?P<escaped>[^a-zA-Z])"
    r"|(?P<number>\d+\.(?=/)|(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3}(?![\d.]))?)"
    r"|(?P<word>[a-zA-Z]{2,})"
    r"|(?P<mark>.)",
    re.ASCII | re.DOTALL,
)

# A run of digits and commas is one number or a list as a whole: `1,10,100` are three numbers, `0,125` are two.
_THOUSANDS = re.compile(r"(?<!\d,)[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)(?:\.\d+)?", re.ASCII)
_NUMBER_START = re.compile(r"\s*[-+]?\s*\$?\.?\d", re.ASCII)
_FORMULA = re.compile(r"[+=<>!]|(?<![\^\d])\d|\b[A-Za-z]\s?-", re.ASCII)

_ASCII_RELATIONS = (("<=", r"\le "), (">=", r"\ge "), (" !=", r"\ne "))  # `n!=6` is a factorial
_JOINED_QUAD = re.compile(r"\\(q?quad)(?=[a-zA-Z])")
_ESCAPED = {"$": "\\$", "{": "\\{", "}": "\\}", "(": "", ")": "", "[": "", "]": ""}
_OPENING, _CLOSING = frozenset(("(", "[", "\\{")), frozenset((")", "]", "\\}"))

TokenKind = Literal["command", "number", "word", "letter", "mark", "text"]


@dataclass(frozen=True, slots=True)
class Token:
    """A token: a command (`\\frac` as `frac`), a number, a word, a letter, a mark, or the content of `\\text{}`."""

    kind: TokenKind
    text: str
    spaced: bool = False  # white space stands before it


def tokenize(source: str) -> list[Token]:
    """Return the tokens of an answer, in one spelling. `\\$`, `\\%` and `\\{` are the marks `\\$`, `%` and `\\{`.

    `1,234` is one number, except inside brackets, where a comma separates the members of a tuple or a set.
    """
    source = _SPACED_THOUSANDS.sub(
        lambda match: re.sub(r"\D", "", match[0]), unicode_to_latex(source).replace("{:}", ":")
    )
    if "=" in source or "quad" in source:
        source = _spell_out(source)
    result: list[Token] = []
    spaced, position, depth = False, 0, 0
    while match := _TOKEN.match(source, position):
        token: Token | None
        position, kind, text = match.end(), match.lastgroup, match[0]
        if kind == "space":
            spaced = True
            continue
        if kind == "command":
            token, position = _command(match["command"], source, position, spaced)
        elif kind == "escaped":
            token = Token("mark", _ESCAPED.get(match["escaped"], match["escaped"]), spaced)
        elif kind == "mark":
            letter = text.isalpha() and text.isascii()
            token = Token("letter" if letter else "mark", "" if text == "$" else text, spaced)
        elif kind == "word":
            token = Token("word", text, spaced)
        else:
            if depth <= 0 and (grouped := _THOUSANDS.match(source, match.start())):
                position, text = grouped.end(), grouped[0].replace(",", "")
            token = Token("number", text, spaced)
        if token is not None and token.text:
            # `]1,2[` is an open interval: a bracket that closes nothing opens one.
            depth += 1 if token.text in _OPENING or (token.text == "]" and depth <= 0) else -(token.text in _CLOSING)
            result.append(token)
            spaced = False
        else:
            spaced = True  # an ignored command still separates its neighbours
    return result


def _spell_out(source: str) -> str:
    """Write `>=` and the like, and a `\\quad` that is joined to a letter, as LaTeX."""
    for written, command in _ASCII_RELATIONS:
        source = source.replace(written, command)
    return _JOINED_QUAD.sub(r"\\\1 ", source) if "quad" in source else source


def _command(name: str, source: str, position: int, spaced: bool) -> tuple[Token | None, int]:
    """Return the token of a command (None for one that is ignored) and the position after it."""
    if name in _IGNORED:
        # `\left.` and `\right.` are invisible brackets
        return None, position + 1 if name in ("left", "right") and source.startswith(".", position) else position
    written, name = name, _ALIASES.get(name, name)
    if name == "text":
        return _styled(written, source, position, spaced)
    if name in _SKIPPED_ARGUMENT:
        if source.startswith("[", position):  # a colour's model
            position = source.find("]", position) + 1 or position
        start = position + len(source[position:]) - len(source[position:].lstrip())
        close = source.find("}", start)
        if source.startswith("{", start) and close > 0:
            return None, close + 1
        return Token("command", name, spaced), position  # what it hides or colours is not known
    if name == "circ" and written != "circ":  # `30\\degree` needs no ^
        return Token("command", "degree", spaced), position
    braces = {"{": "\\{", "}": "\\}"}
    if len(name) == 1 and not name.isalpha():
        return Token("mark", braces.get(name, "\\$" if name == "$" else name), spaced), position
    return Token("command", name, spaced), position


def _styled(style: str, source: str, position: int, spaced: bool) -> tuple[Token | None, int]:
    """Return the token of a text or of letters in a style; None where only a style is set, and its content follows."""
    start = position
    while start < len(source) and source[start].isspace():
        start += 1
    close = source.find("}", start)
    inner = source[start + 1 : close] if source.startswith("{", start) and close > 0 else None
    if inner == "\\$":
        return Token("mark", inner, spaced), close + 1
    if inner is None or "{" in inner or "\\" in inner or _NUMBER_START.match(inner):
        return None, position  # `\mathbf{x_{1}}`, `\text{7 cm}`
    letters = style not in ("text", "mbox", "hbox", "textrm", "textnormal")
    if letters and len(inner) == 1 and inner.isalpha():
        return Token("letter", inner, spaced), close + 1
    if (letters and _FORMULA.search(inner)) or "=" in inner:
        return None, position
    if inner.strip().lower() == "infinity":
        return Token("command", "infty", spaced), close + 1
    if letters and inner in FUNCTIONS - (frozenset() if style == "operatorname" else {"min"}):
        return Token("command", inner, spaced), close + 1
    return Token("text", inner.replace("$", "") or " ", spaced), close + 1


def normalize_latex(source: str) -> str:
    """Return an answer in one spelling, without styles and meaningless spaces; equal texts are the same answer."""
    parts: list[str] = []
    for token in tokenize(source):
        text = "\\" + token.text if token.kind == "command" else token.text
        if token.kind == "text":
            text = " ".join(text.split())
        joins = parts and parts[-1][-1:].isalnum() and text[:1].isalnum() and (token.spaced or token.kind == "text")
        parts.append(" " + text if joins else text)
    text = "".join(parts).rstrip("\\ ")
    return text[:-1].rstrip("\\ ").strip() if text.endswith((".", ",", ";")) else text.strip()  # of a sentence
