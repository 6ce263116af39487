"""Tokenize LaTeX as models write it, in linear time.

Variants of spelling (`\\dfrac`, `\\left(`, `$`, thin spaces, Unicode signs) become one; the rest is left to the parser.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

MAX_ANSWER_CHARS = 2_000  # a longer answer is compared as text only

_UNICODE = {
    "−": "-", "–": "-", "﹣": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/",
    "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "∪": r"\cup ", "∩": r"\cap ", "≤": r"\le ", "≥": r"\ge ",
    "≠": r"\ne ", "°": r"^\circ ", "±": r"\pm ", "∓": r"\mp ", "∈": r"\in ", "∅": r"\emptyset ", "θ": r"\theta ",
    "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "ω": r"\omega ", "φ": r"\phi ", "μ": r"\mu ",
    "⁰": "^0", "¹": "^1", "²": "^2", "³": "^3", "⁴": "^4", "⁵": "^5", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "…": r"\ldots ", "\u00a0": " ", "\u2009": " ",
    "’": "'", "′": "'", "€": r"\euro ", "£": r"\pounds ",
}  # fmt: skip
_TRANSLATION = str.maketrans(_UNICODE)
_ALIASES = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom", "leq": "le", "geq": "ge",
    "leqslant": "le", "geqslant": "ge", "lt": "<", "gt": ">", "neq": "ne", "mbox": "text", "hbox": "text",
    "textbf": "text", "textit": "text", "textrm": "text", "textsf": "text", "texttt": "text", "textnormal": "text",
    "mathrm": "text", "mathbf": "text", "mathit": "text", "mathsf": "text", "operatorname": "text", "bm": "text",
    "boldsymbol": "text",
    "varnothing": "emptyset", "lbrace": "{", "rbrace": "}", "lbrack": "[", "rbrack": "]", "lvert": "|",
    "rvert": "|", "vert": "|", "mid": "|", "ast": "cdot", "degree": "circ", "degrees": "circ", "dots": "ldots",
    "cdots": "ldots", "varepsilon": "epsilon", "vartheta": "theta", "varphi": "phi", "to": "rightarrow",
    "colon": ":", "slash": "/", "div": "/", "bmatrix": "pmatrix",
    "dollar": "$", "percent": "%",
}  # fmt: skip
_IGNORED = frozenset(
    "left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr bigm displaystyle textstyle scriptstyle "
    "limits nolimits quad qquad thinspace medspace enspace rm bf it cal mathstrut strut nobreak allowbreak".split()
)
_SPACED_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\\[,!;: ]|\{,\}|,\\!)\s?\d{3})+(?!\d)")
_TOKEN = re.compile(
    r"(?P<space>(?:\s|~|\\[,!;:> ]|\\(?=\s))+)"
    r"|\\(?P<command>[a-zA-Z]+)"
    r"|\\(?P<escaped>[^a-zA-Z])"
    r"|(?P<number>\d+\.(?=/)|(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3}(?![\d.]))?)"
    r"|(?P<word>[a-zA-Z]{2,})"
    r"|(?P<mark>.)",
    re.ASCII | re.DOTALL,
)

_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?", re.ASCII)

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
    source = _SPACED_THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), source.translate(_TRANSLATION))
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
            depth += (token.text in _OPENING) - (token.text in _CLOSING)
            result.append(token)
            spaced = False
        else:
            spaced = True  # an ignored command still separates its neighbours
    return result


def _command(name: str, source: str, position: int, spaced: bool) -> tuple[Token | None, int]:
    """Return the token of a command (None for one that is ignored) and the position after it."""
    if name in _IGNORED:
        # `\left.` and `\right.` are invisible brackets
        return None, position + 1 if name in ("left", "right") and source.startswith(".", position) else position
    written, name = name, _ALIASES.get(name, name)
    if name == "text":
        start = position
        while start < len(source) and source[start].isspace():
            start += 1
        close = source.find("}", start)
        inner = source[start + 1 : close] if source.startswith("{", start) and close > 0 else None
        if inner is not None and len(inner) == 1 and inner.isalpha() and written.startswith(("math", "bm", "bold")):
            return Token("letter", inner, spaced), close + 1
        if inner is not None and "{" not in inner and "\\" not in inner:
            return Token("text", inner.replace("$", "") or " ", spaced), close + 1
        return None, position  # `\mathbf{x_{1}}` is a style only
    if name in ("hspace", "vspace", "phantom", "color"):
        close = source.find("}", position)
        return None, close + 1 if source.startswith("{", position) and close > 0 else position
    if name == "circ" and written != "circ":  # `30\\degree` needs no ^
        return Token("command", "degree", spaced), position
    braces = {"{": "\\{", "}": "\\}"}
    if len(name) == 1 and not name.isalpha():
        return Token("mark", braces.get(name, "\\$" if name == "$" else name), spaced), position
    return Token("command", name, spaced), position


def normalize_latex(source: str) -> str:
    """Return an answer in one spelling, without styles and meaningless spaces; equal texts are the same answer."""
    parts: list[str] = []
    for token in tokenize(source):
        text = "\\" + token.text if token.kind == "command" else token.text
        if token.kind == "text":
            text = " ".join(text.split())
        joins = parts and parts[-1][-1:].isalnum() and text[:1].isalnum() and (token.spaced or token.kind == "text")
        parts.append(" " + text if joins else text)
    return "".join(parts).rstrip(".,;\\ ").strip()
