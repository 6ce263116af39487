"""Expressions from tokens: a small grammar of the mathematics that answers are written in.

What the grammar does not know raises `NotReadError`, and what is nested too deep or asks for too much work raises
`TooCostlyError`, before anything is computed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from trimtab.rewards.mathematics.latex import Token
from trimtab.rewards.mathematics.nodes import (
    Node,
    NotReadError,
    TooCostlyError,
    literal_value,
    negative,
    number,
    reciprocal,
)

DEEPEST = 30
LONGEST_NUMBER = 400  # digits
CONSTANTS = {"pi": "pi", "infty": "oo", "inf": "oo", "infinity": "oo", "oo": "oo"}
FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp lg asin acos atan max min gcd lcm".split()
)
_RENAMED = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log"}
_CLOSES = {"(": ")", "[": "]", "{": "}", "lfloor": "rfloor", "lceil": "rceil", "\\{": "\\}"}
_SYMBOLS = frozenset(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell hbar odot".split()
)

_FOREIGN = frozenset(
    "hat vec bar tilde widehat widetilde overrightarrow sum prod int iint oint lim partial nabla det mathbf mathcal "
    "Re Im mod bmod pmod star dagger choose operatorname".split()
)
_KNOWN = (
    FUNCTIONS
    | _SYMBOLS
    | CONSTANTS.keys()
    | set(
        "frac sqrt binom cdot times pm mp left right circ degree text cup in le ge lfloor rfloor lceil rceil begin end "
        "langle rangle emptyset ldots overline angle dot".split()
    )
)


def expression(tokens: Sequence[Token]) -> Node:
    """The expression that all the tokens make."""
    parser = _Parser(list(tokens))
    node = parser.sum(0)
    if parser.at < len(parser.tokens):
        raise NotReadError(parser.tokens[parser.at].text)
    return node


class _Parser:
    """Recursive descent; `at` is the next token."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.at = 0
        self.bars = 0

    def peek(self) -> str:
        """The next token's text; empty at the end."""
        return self.tokens[self.at].text if self.at < len(self.tokens) else ""

    def take(self) -> Token:
        if self.at >= len(self.tokens):
            raise NotReadError("the end")
        self.at += 1
        return self.tokens[self.at - 1]

    def expect(self, text: str) -> None:
        if self.take().text != text:
            raise NotReadError(f"no {text}")

    def sum(self, depth: int) -> Node:
        if depth > DEEPEST:
            raise TooCostlyError("nested too deep")
        parts = [self.product(depth)]
        while (sign := self.peek()) in ("+", "-", "pm", "mp"):
            self.at += 1
            term = self.product(depth)
            if sign in ("pm", "mp"):
                parts = [Node("pm", (_plus(parts), term))]
            else:
                parts.append(negative(term) if sign == "-" else term)
        return _plus(parts)

    def product(self, depth: int) -> Node:
        sign = self.peek()
        if sign in ("+", "-", "pm", "mp"):
            self.at += 1
            inner = self.product(depth + 1) if depth < DEEPEST else _deep()
            if sign in ("pm", "mp"):
                return Node("pm", (number(0), inner))
            return negative(inner) if sign == "-" else inner
        parts, divided = [self.power(depth)], False
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token.text in ("cdot", "times", "*"):
                self.at += 1
                parts.append(self.signed(depth))
            elif token.text in ("/", ":"):
                self.at += 1
                parts.append(reciprocal(self.signed(depth)))
                divided = True
            elif self.begins():
                if divided:  # 1/2x: some mean 1/(2x), others (1/2)x; neither is guessed
                    raise NotReadError("a factor after a division")
                parts.append(self.power(depth))
            else:
                break
        return _times(parts)

    def signed(self, depth: int) -> Node:
        """A factor that may have its own sign: `2 \\cdot -3`, `10^{-5}`."""
        if self.peek() == "-":
            self.at += 1
            return negative(self.power(depth))
        return self.power(depth)

    def begins(self) -> bool:
        """Whether a factor can start here without a sign of multiplication."""
        if self.at >= len(self.tokens):
            return False
        token = self.tokens[self.at]
        if token.kind == "number":  # `x 2` and `3 4` are no products
            before = self.tokens[self.at - 1]
            return before.text in (")", "}") and not token.spaced
        if token.kind in ("letter", "word"):
            return True
        if token.kind == "command":
            return token.text in ("frac", "sqrt", "binom", "lfloor", "lceil", "pi", "infty", "dot", "exp") or (
                token.text in FUNCTIONS | _SYMBOLS
            )
        return token.text in ("(", "[", "{") or (token.text == "|" and self.bars == 0)

    def power(self, depth: int) -> Node:
        base = self.atom(depth)
        while (mark := self.peek()) in ("^", "!", "'", "degree"):
            self.at += 1
            if mark == "!":
                base = Node("function", (base,), "factorial")
            elif mark == "'":
                if base.kind != "symbol":
                    raise NotReadError("'")
                base = Node("symbol", name=base.name + "'")
            elif mark == "degree" or self.degrees():
                base = Node("product", (base, Node("symbol", name="pi"), reciprocal(number(180))), "degrees")
            else:
                base = self.raised(base, self.argument(depth))
        return base

    def degrees(self) -> bool:
        """Whether the sign of degrees stands here as an exponent; it is taken."""
        for sign in (["circ"], ["{", "circ", "}"]):
            if [token.text for token in self.tokens[self.at : self.at + len(sign)]] == sign:
                self.at += len(sign)
                return True
        return False

    def raised(self, base: Node, exponent: Node) -> Node:
        if self.peek() == "^":
            raise NotReadError("a^b^c")  # LaTeX refuses it too
        return Node("power", (base, exponent))

    def argument(self, depth: int) -> Node:
        """What a command or `^` applies to: a group in braces, or one digit, letter or command."""
        token = self.take()
        if token.text == "{":
            node = self.sum(depth + 1)
            self.expect("}")
            return node
        if token.kind == "number" and len(token.text) > 1 and token.text.isdigit():
            self.at -= 1
            self.tokens[self.at] = Token("number", token.text[1:])
            return number(int(token.text[0]))
        if token.kind == "word" and token.text not in FUNCTIONS and token.text not in CONSTANTS:
            self.at -= 1
            self.tokens[self.at] = Token("word" if len(token.text) > 2 else "letter", token.text[1:])
            return Node("symbol", name=token.text[0])
        if token.text in ("-", "+") or (token.kind == "mark" and token.text != "("):
            if token.text == "-":
                return negative(self.argument(depth + 1) if depth < DEEPEST else _deep())
            raise NotReadError(token.text)
        self.at -= 1
        return self.atom(depth + 1)

    def atom(self, depth: int) -> Node:
        if depth > DEEPEST:
            _deep()
        token = self.take()
        text = token.text
        if token.kind == "number":
            return self.repeating(text) or self.mixed(_numeral(text), depth)
        if token.kind == "letter":
            return self.symbol(text)
        if token.kind == "word":
            return self.word(text, depth)
        if text in _CLOSES and text != "\\{":
            node = self.sum(depth + 1)
            self.expect(_CLOSES[text])
            return Node("function", (node,), text[1:]) if text in ("lfloor", "lceil") else node
        if text == "|":
            self.bars += 1
            node = self.sum(depth + 1)
            self.bars -= 1
            self.expect("|")
            return Node("function", (node,), "abs")
        if token.kind == "command":
            return self.command(text, depth)
        raise NotReadError(text)

    def repeating(self, start: str) -> Node | None:
        """`0.1\\overline{6}` is a sixth; None where nothing repeats."""
        dotted = self.peek() == "." and "." not in start
        rest = [token.text for token in self.tokens[self.at + dotted : self.at + dotted + 4]]
        if [*rest[:2], *rest[3:]] != ["overline", "{", "}"] or not (dotted or "." in start):
            return None
        if not (rest[2].isdigit() and start.replace(".", "").isdigit() and len(start + rest[2]) < LONGEST_NUMBER):
            raise NotReadError("overline")
        self.at += 4 + dotted
        places, period = len(start.partition(".")[2]), len(rest[2])
        return number(Fraction(start) + Fraction(int(rest[2]), (10**period - 1) * 10**places))

    def mixed(self, whole: Node, depth: int) -> Node:
        """`1\\frac{4}{5}` is nine fifths, and so is `1 4/5`."""
        if whole.places is not None or self.peek() != "frac":
            rest = self.tokens[self.at : self.at + 3]
            plain = [t.kind == "number" and t.text.isdigit() for t in rest] == [True, False, True]
            if whole.places is None and plain and rest[0].spaced and rest[1].text == "/":
                part = Fraction(int(rest[0].text), int(rest[2].text) or 1)
                if part < 1 and int(rest[2].text):
                    self.at += 3
                    return number(whole.value + part)
            return whole
        start = self.at
        fraction = self.atom(depth)
        value = literal_value(fraction)
        if value is not None and fraction.kind == "product" and all(_integral(part) for part in fraction.parts):
            if not 0 < value < 1:
                raise NotReadError("a mixed number of more than one")
            return number(whole.value + value)
        self.at = start
        return whole

    def symbol(self, name: str) -> Node:
        if self.peek() == "_":
            self.at += 1
            name += "_" + self.subscript()
        ahead = self.tokens[self.at : self.at + 3]
        if [token.text for token in ahead[::2]] == ["(", ")"] and ahead[1].kind == "number":
            self.at += 3  # I(0) is a value of I, not I times nothing
            name += f"({ahead[1].text})"
        return Node("symbol", name=name)

    def subscript(self) -> str:
        token = self.take()
        if token.text != "{":
            return token.text.strip()
        inner = []
        while self.peek() != "}":
            part = self.take()
            if part.text in ("{", "^"):
                raise NotReadError("a subscript of a subscript")
            inner.append(part.text.strip())
        self.at += 1
        return "".join(inner)

    def word(self, text: str, depth: int) -> Node:
        if text == "np" and self.peek() == ".":
            self.at += 1
            return self.atom(depth)
        if text in FUNCTIONS or text == "sqrt" or text in CONSTANTS:
            return self.command(text, depth)
        if len(text) > 4 or (len(text) > 3 and text.islower()):
            raise NotReadError(text)  # prose
        self.at -= 1  # the next letter is a factor of its own, and has its own exponent
        self.tokens[self.at] = Token("word" if len(text) > 2 else "letter", text[1:])
        return Node("symbol", name=text[0])

    def command(self, name: str, depth: int) -> Node:
        if name in CONSTANTS:
            return Node("symbol", name=CONSTANTS[name])
        if name == "frac":
            above, below = self.argument(depth), self.argument(depth)
            if _leads_with_d(above) and _leads_with_d(below):
                return Node("symbol", name=f"{_flat(above)}/{_flat(below)}")  # a derivative
            return _times([above, reciprocal(below)])
        if name == "sqrt":
            degree = number(2)
            if self.peek() == "[":
                self.at += 1
                degree = self.sum(depth + 1)
                self.expect("]")
            return Node("power", (self.argument(depth), reciprocal(degree)), "root")
        if name == "binom":
            return Node("function", (self.argument(depth), self.argument(depth)), "binom")
        if name == "dot":
            inner = self.argument(depth)
            if inner.kind != "symbol":
                raise NotReadError("a dot over no letter")
            return self.symbol("dot " + inner.name)
        if name in _SYMBOLS:
            return self.symbol(name)
        if name in FUNCTIONS:
            return self.function(_RENAMED.get(name, name), depth)
        raise NotReadError(name)

    def function(self, name: str, depth: int) -> Node:
        base = power = None
        if self.peek() == "_" and name == "log":
            self.at += 1
            base = self.argument(depth)
        if self.peek() == "^":
            self.at += 1
            power = self.argument(depth)
            if literal_value(power) == -1:  # the inverse function, as everybody reads it
                if name not in ("sin", "cos", "tan"):
                    raise NotReadError(f"{name}^-1")
                name, power = f"arc{name}", None
        inner = self.function_argument(depth)
        node = Node("function", (inner,) if base is None else (inner, base), name)
        return node if power is None else Node("power", (node, power))

    def function_argument(self, depth: int) -> Node:
        """`\\sin(x)`, `\\sin{x}`, `\\sin 2x`, `\\sin \\frac{x}{2}`: up to the next sign or function."""
        if self.peek() in ("(", "{", "["):
            return self.power(depth + 1)
        parts = [self.power(depth + 1)]
        while self.begins() and self.tokens[self.at].text not in FUNCTIONS | {"(", "["}:
            parts.append(self.power(depth + 1))
        return _times(parts)


def foreign(text: str) -> bool:
    """Whether a text has mathematics that this grammar does not know: then another one may read what it cannot."""
    commands = set(re.findall(r"\\([a-zA-Z]+)", text))
    return bool(commands & _FOREIGN) and commands <= _FOREIGN | _KNOWN and not re.search(r"[=<>;]", text)


def _numeral(text: str) -> Node:
    if len(text) > LONGEST_NUMBER:
        raise TooCostlyError("a number of many digits")
    mantissa, _, exponent = text.lower().partition("e")
    places = len(mantissa.partition(".")[2]) - int(exponent or 0)
    value = Fraction(mantissa) * Fraction(10) ** int(exponent or 0)
    return number(value, places if "." in mantissa or exponent else None)


def _plus(parts: list[Node]) -> Node:
    return parts[0] if len(parts) == 1 else Node("sum", tuple(parts))


def _times(parts: list[Node]) -> Node:
    return parts[0] if len(parts) == 1 else Node("product", tuple(parts), literal=_one_number(parts))


def _one_number(parts: list[Node]) -> bool:
    """A fraction, or a number times a power of ten."""
    if len(parts) != 2:
        return False
    first, second = parts
    if first.kind == "number" and second.kind == "power":
        base, exponent = second.parts
        if second.literal and exponent.value == -1:
            return base.kind == "number" or (base.literal and base.kind == "product")
        whole = literal_value(exponent)
        return (
            base.value == 10
            and base.kind == "number"
            and whole is not None
            and abs(whole) <= 400
            and whole == int(whole)
        )
    return first.literal and first.kind == "product" and second.literal and second.kind == "power"


def _integral(node: Node) -> bool:
    return node.kind == "number" or (node.kind == "power" and node.parts[0].kind == "number")


def _leads_with_d(node: Node) -> bool:
    first = node.parts[0] if node.kind == "product" else node
    if first.kind == "power":
        first = first.parts[0]
    return first.kind == "symbol" and first.name in ("d", "partial")


def _flat(node: Node) -> str:
    """An expression as a name."""
    if node.kind == "number":
        return str(node.value)
    return f"{node.name or node.kind}({' '.join(map(_flat, node.parts))})" if node.parts else node.name


def _deep() -> Node:
    raise TooCostlyError("nested too deep")
