"""Tokenize LaTeX as models write it, in linear time.

Variants of spelling (`\\dfrac`, `\\left(`, `$`, thin spaces, Unicode signs) become one; the rest is left to the parser.
Here are also the words that parsers know, and where brackets open and close.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

MAX_ANSWER_CHARS = 2_000  # a longer answer is compared as text only

_ALIASES = {
    alias: name
    for name, aliases in {
        "frac": "dfrac tfrac cfrac nicefrac sfrac xfrac", "binom": "dbinom tbinom", "bmod": "mod",
        "le": "leq leqslant", "ge": "geq geqslant", "ne": "neq", "<": "lt", ">": "gt", ":": "colon", "/": "slash div",
        "pmatrix": "bmatrix", "text": "mbox hbox textbf textit textrm textsf texttt textnormal textup textsl emph "
        "mathrm mathbf mathit mathsf mathtt operatorname bm boldsymbol pmb",
        "{": "lbrace", "}": "rbrace", "[": "lbrack", "]": "rbrack", "|": "lvert rvert vert mid", "cdot": "ast",
        "circ": "degree degrees", "ldots": "dots cdots", "emptyset": "varnothing", "epsilon": "varepsilon",
        "theta": "vartheta", "phi": "varphi", "rightarrow": "to", "$": "dollar", "%": "percent", "tan": "tg",
        "cot": "ctg", "csc": "cosec", "arctan": "arctg", "mathbb": "Bbb", "cup": "bigcup",
    }.items()
    for alias in aliases.split()
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
_OPEN, CLOSE = _OPENING | {"{", "langle"}, _CLOSING | {"}", "rangle"}
MAX_ARGUMENT_TOKENS = 100  # of a function
_AFTER_INTERVAL = frozenset((",", ";", "cup", "cap", "setminus", ".", "\\", "or", "and", *CLOSE))

# What the parser knows, and what only math-verify's grammar does.
CONSTANTS = {"pi": "pi", "infty": "oo", "inf": "oo", "infinity": "oo", "oo": "oo"}
FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp lg asin acos atan max min gcd lcm".split()
)
FUNCTION_ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log"}
SYMBOLS = frozenset(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell hbar odot".split()
)
_FOREIGN = frozenset(
    "hat vec bar tilde widehat widetilde overrightarrow sum prod int iint oint lim partial nabla det mathbf mathcal "
    "Re Im mod bmod pmod star dagger choose operatorname".split()
)
_STRUCTURE = frozenset(
    "frac sqrt binom cdot times pm mp left right circ degree text cup in le ge lfloor rfloor lceil rceil begin end "
    "langle rangle emptyset ldots overline angle dot".split()
)
_KNOWN = _FOREIGN | _STRUCTURE | FUNCTIONS | SYMBOLS | CONSTANTS.keys()

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
    """Return the token of a text or of letters in a style; None if only a style is set, and its content follows."""
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


_SIGNS = {
    "−": "-", "‐": "-", "‑": "-", "‒": "-", "–": "-", "﹣": "-", "×": r"\times ", "✕": r"\times ", "·": r"\cdot ",
    "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/",
    "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "∛": r"\sqrt[3] ", "∪": r"\cup ", "∩": r"\cap ",
    "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "°": r"^\circ ", "º": r"^\circ ",
    "˚": r"^\circ ", "±": r"\pm ", "∓": r"\mp ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}",
    "θ": r"\theta ", "α": r"\alpha ",
    "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "ε": r"\epsilon ", "λ": r"\lambda ", "ρ": r"\rho ",
    "σ": r"\sigma ", "τ": r"\tau ", "ω": r"\omega ", "φ": r"\phi ", "ϕ": r"\phi ", "ψ": r"\psi ", "μ": r"\mu ",
    "Δ": r"\Delta ", "Γ": r"\Gamma ", "Σ": r"\Sigma ", "Ω": r"\Omega ", "⟨": r"\langle ", "⟩": r"\rangle ",
    "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "…": r"\ldots ", "。": ".",
    "\u2009": r"\,", "\u202f": r"\,",  # thin spaces, as between thousands
    "’": "'", "′": "'", "€": r"\euro ", "£": r"\pounds ", "℃": r"^\circ C", "℉": r"^\circ F",
}  # fmt: skip
_INVISIBLE = frozenset("\u00ad\u200b\u200c\u200d\u2060\ufeff")  # not those that turn the order of what is shown
_OVERLINE = "\u0305"  # combines with the digit before it
_OVERLINED, _ROOT = re.compile(f"(?:[0-9]{_OVERLINE})+"), re.compile(r"([√∛])\s?([0-9]+(?:\.[0-9]+)?)")
_TEMPERATURE = re.compile(r"\\(?:text|mathrm)\{\s?°\s?([CF]?)\s?\}")
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "₀₁₂₃₄₅₆₇₈₉"
_PLAIN = str.maketrans(_RAISED + _LOWERED, "0123456789+-n0123456789")
_RAISED_RUN, _LOWERED_RUN = re.compile(f"[{_RAISED}]+"), re.compile(f"[{_LOWERED}]+")


class _Translation(dict[int, str]):
    """The LaTeX of a character by its code point. What is not listed is not kept either: answers are untrusted."""

    def __missing__(self, code: int) -> str:
        return _to_latex(chr(code))


def unicode_to_latex(source: str) -> str:
    """Return a text with its mathematical characters written as LaTeX; what is not known is left as it is."""
    if source.isascii():
        return source
    source = _TEMPERATURE.sub(r"°\1", source)
    source = _OVERLINED.sub(lambda match: rf"\overline{{{match[0].replace(_OVERLINE, '')}}}", source)
    source = _ROOT.sub(r"\1{\2}", source)
    source = _RAISED_RUN.sub(lambda match: _script("^", match[0]), source)
    source = _LOWERED_RUN.sub(lambda match: _script("_", match[0]), source)
    return source.translate(_TRANSLATION)


def _script(mark: str, characters: str) -> str:
    plain = characters.translate(_PLAIN)
    return mark + (plain if len(plain) == 1 else f"{{{plain}}}")


def _to_latex(character: str) -> str:
    category, code = unicodedata.category(character), ord(character)
    if category == "Nd":  # a digit of any script, also a bold or wide one
        return str(unicodedata.decimal(character))
    if category == "Zs" or character in _INVISIBLE:  # it separates its neighbours
        return " "
    plain = unicodedata.normalize("NFKC", character)
    if fraction := re.fullmatch(r"(\d+)⁄(\d+)", plain):
        return rf"\frac{{{fraction[1]}}}{{{fraction[2]}}}"
    styled = 0xFF01 <= code < 0xFF5E or 0x1D400 <= code <= 0x1D7FF  # wide forms, letters in a style
    return _SIGNS.get(plain, plain) if styled else character


_TRANSLATION = _Translation({code: chr(code) for code in range(128)} | {ord(sign): _SIGNS[sign] for sign in _SIGNS})


def has_foreign_commands(text: str) -> bool:
    """Return whether a text has LaTeX that only math-verify's grammar knows (sums, integrals, vectors)."""
    commands = set(re.findall(r"\\([a-zA-Z]+)", text))
    # A command that neither grammar knows, a relation, minutes, a ratio or a product of vectors would be guessed at.
    if {"times", "vec"} <= commands or re.search(r"[=<>;:']", text):
        return False
    return bool(commands & _FOREIGN) and commands <= _KNOWN


def depths(tokens: Sequence[Token]) -> list[int]:
    """Return how deep in brackets every token stands."""
    depth, found = 0, []
    for token in tokens:
        bracket = token.kind in ("mark", "command")
        depth -= bracket and token.text in CLOSE
        found.append(depth)
        depth += bracket and token.text in _OPEN
    return found


def outside(tokens: Sequence[Token], wanted: Callable[[Token], bool]) -> list[int]:
    """Return the places of the tokens outside of all brackets that are `wanted`."""
    return [place for place, depth in enumerate(depths(tokens)) if depth == 0 and wanted(tokens[place])]


def is_enclosed(tokens: Sequence[Token]) -> bool:
    """Return whether the first bracket is closed by the last."""
    return all(depth > 0 for depth in depths(tokens)[1:-1])


def enclosing_braces(tokens: Sequence[Token]) -> int:
    """Return how many pairs of braces stand around all of the tokens."""
    opened = next((place for place, token in enumerate(tokens) if token.text != "{"), len(tokens))
    closed = next((place for place, token in enumerate(reversed(tokens)) if token.text != "}"), len(tokens))
    if not opened or not closed:
        return 0
    return min([opened, closed, *depths(tokens)[opened : len(tokens) - closed]])


def bracketed(tokens: Sequence[Token], start: int) -> Sequence[Token]:
    """Return what stands between the round or square bracket at an index and the one that closes it."""
    if start >= len(tokens) or tokens[start].text not in ("(", "["):
        return ()
    ahead = tokens[start + 1 : start + 1 + MAX_ARGUMENT_TOKENS]
    end = next((place for place, depth in enumerate(depths(ahead)) if depth < 0), 0)
    return ahead[:end]


def split(
    tokens: Sequence[Token], at: Callable[[Token], bool], is_word: Callable[[Token], bool] = lambda token: False
) -> list[Sequence[Token]]:
    """Split the tokens at the separators that stand outside brackets, of which `is_word` tells the words."""
    places = outside(tokens, at)
    parts = [tokens[a + 1 : b] for a, b in zip([-1, *places], [*places, len(tokens)], strict=True)]
    last = len(parts) - 1
    # `1, 2, and 3` has an empty part between its comma and its `and`.
    return [part for i, part in enumerate(parts) if part or not 0 < i < last or not is_word(tokens[places[i]])]


def close_open_intervals(tokens: list[Token]) -> list[Token]:
    """Write the intervals `]a, b[`, `[a, b[` and `]a, b]` as `(a, b)`, `[a, b)` and `(a, b]`.

    A `]` that closes nothing opens an interval. A `[` closes one if a comma came before it and nothing that it could
    open comes after it.
    """
    if not any(token.text in ("[", "]") for token in tokens):
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
