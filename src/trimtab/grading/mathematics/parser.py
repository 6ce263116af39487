"""A recursive-descent parser from tokens to expression trees, for the mathematics that answers are written in.

Unknown syntax raises `ParseError`, too deep nesting `TooCostlyError`; nothing is evaluated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from trimtab.grading.mathematics.nodes import (
    Node,
    ParseError,
    TooCostlyError,
    derivative_name,
    is_number_or_reciprocal,
    literal_value,
    make_product,
    make_sum,
    negate,
    number,
    reciprocal,
)
from trimtab.grading.mathematics.tokenizer import (
    CONSTANTS,
    FUNCTION_ALIASES,
    FUNCTIONS,
    SYMBOLS,
    Token,
    bracketed,
    outside,
)

MAX_DEPTH = 30
MAX_DIGITS = 400  # of a number
_CLOSING = {"(": ")", "[": "]", "{": "}", "lfloor": "rfloor", "lceil": "rceil", "\\{": "\\}"}


def parse_expression(tokens: Sequence[Token]) -> Node:
    """Parse all the tokens as one expression."""
    parser = _Parser(list(tokens))
    node = parser.parse_group(0)
    if parser.position < len(parser.tokens):
        raise ParseError(parser.tokens[parser.position].text)
    return node


class _Parser:
    """The state of a parse: `position` is the index of the next token."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.position = 0
        self.open_bars = 0

    def peek(self) -> str:
        """Return the next token's text; empty at the end."""
        return self.tokens[self.position].text if self.position < len(self.tokens) else ""

    def advance(self) -> Token:
        if self.position >= len(self.tokens):
            raise ParseError("unexpected end")
        self.position += 1
        return self.tokens[self.position - 1]

    def accept(self, *texts: str) -> bool:
        """Skip tokens with these texts; return whether they were next."""
        found = [token.text for token in self.tokens[self.position : self.position + len(texts)]] == [*texts]
        self.position += len(texts) if found else 0
        return found

    def expect(self, text: str) -> None:
        if self.advance().text != text:
            raise ParseError(f"expected {text}")

    def parse_group(self, depth: int) -> Node:
        """Parse all that stands between braces: a sum, or two with `\\over` or `\\choose` between them."""
        node = self.parse_sum(depth)
        if self.peek() not in ("over", "choose"):
            return node
        divided = self.advance().text == "over"
        below = self.parse_sum(depth)
        return make_product([node, reciprocal(below)]) if divided else Node("function", (node, below), "binom")

    def parse_sum(self, depth: int) -> Node:
        """Parse terms joined by plus, minus and plus-or-minus."""
        terms = [self.parse_product(depth)]
        while (sign := self.peek()) in ("+", "-", "pm", "mp", "bmod"):
            self.position += 1
            term = self.parse_product(depth)
            if sign == "bmod":
                if len(terms) > 1:
                    raise ParseError("a + b mod c: of b or of a + b?")
                terms = [_remainder(terms[0], term)]
            elif sign in ("pm", "mp"):
                terms = [Node("pm", (make_sum(terms), term))]
            else:
                terms.append(negate(term) if sign == "-" else term)
        return make_sum(terms)

    def parse_product(self, depth: int) -> Node:
        """Parse an optional sign and factors joined by multiplication, division or nothing."""
        _check_depth(depth)
        sign = self.peek()
        if sign in ("+", "-", "pm", "mp"):
            self.position += 1
            inner = self.parse_product(depth + 1)
            if sign in ("pm", "mp"):
                return Node("pm", (number(0), inner))
            return negate(inner) if sign == "-" else inner
        factors, divided = [self.parse_power(depth)], ""
        while self.position < len(self.tokens):
            token = self.tokens[self.position]
            if token.text in ("cdot", "times", "*"):
                self.position += 1
                factors.append(self.parse_signed(depth))
            elif token.text in ("/", ":"):
                if divided == ":" or (divided and token.text == ":"):
                    raise ParseError("1:2:3 is no quotient")
                self.position, divided = self.position + 1, token.text
                factors.append(reciprocal(self.parse_signed(depth)))
            elif self.starts_factor():
                if divided:  # 1/2x is ambiguous: some mean 1/(2x), others (1/2)x
                    raise ParseError("a factor after a division")
                factors.append(self.parse_power(depth))
            else:
                break
        return make_product(factors)

    def parse_signed(self, depth: int) -> Node:
        """Parse a factor that may have its own sign: `2 \\cdot -3`."""
        if not self.accept("-"):
            return self.parse_power(depth)
        return negate(self.parse_power(depth))

    def starts_factor(self) -> bool:
        """Return whether the next token starts a factor of an implicit product."""
        if self.position >= len(self.tokens):
            return False
        token = self.tokens[self.position]
        if token.kind == "number":  # `x 2` and `3 4` are not products
            before = self.tokens[self.position - 1]
            return before.text in (")", "}") and not token.spaced
        if token.kind in ("letter", "word"):
            return True
        if token.kind == "command":
            return token.text in ("frac", "sqrt", "binom", "lfloor", "lceil", "pi", "infty", "dot", "exp") or (
                token.text in FUNCTIONS | SYMBOLS
            )
        return token.text in ("(", "[", "{") or (token.text == "|" and self.open_bars == 0)

    def parse_power(self, depth: int) -> Node:
        """Parse a primary with its exponents, factorials, primes and degree signs."""
        base = self.parse_primary(depth)
        while (mark := self.peek()) in ("^", "!", "'", "degree"):
            self.position += 1
            if mark == "!":
                double = self.accept("!")  # `5!!` is the double factorial 15, not (5!)!
                if self.peek() == "!" or (double and self.tokens[self.position - 1].spaced):
                    raise ParseError("!!")
                base = Node("function", (base,), "double_factorial" if double else "factorial")
            elif mark == "'":
                if base.kind != "symbol":
                    raise ParseError("'")
                base = Node("symbol", name=base.name + "'")
            elif mark == "degree" or self.accept("circ") or self.accept("{", "circ", "}"):
                base = Node("product", (base, Node("symbol", name="pi"), reciprocal(number(180))), "degrees")
            else:
                base = Node("power", (base, self.parse_argument(depth)))
                if self.peek() == "^":
                    raise ParseError("a^b^c")  # an error in LaTeX too
        return base

    def parse_argument(self, depth: int) -> Node:
        """Parse what a command or `^` applies to: a group in braces, or one digit, letter or command."""
        _check_depth(depth)
        token = self.advance()
        if token.text == "{":
            node = self.parse_group(depth + 1)
            self.expect("}")
            return node
        if token.kind == "number" and len(token.text) > 1 and token.text.isdigit():  # `\frac12` is one half
            self.position -= 1
            self.tokens[self.position] = Token("number", token.text[1:])
            return number(int(token.text[0]))
        if token.kind == "word" and token.text not in FUNCTIONS and token.text not in CONSTANTS:
            self.position -= 1
            self.tokens[self.position] = Token("word" if len(token.text) > 2 else "letter", token.text[1:])
            return Node("symbol", name=token.text[0])
        if token.text in ("-", "+") or (token.kind == "mark" and token.text != "("):
            if token.text == "-":
                return negate(self.parse_argument(depth + 1))
            raise ParseError(token.text)
        self.position -= 1
        return self.parse_primary(depth + 1)

    def parse_primary(self, depth: int) -> Node:
        """Parse a number, letter, word, command, bracketed group or absolute value."""
        _check_depth(depth)
        token = self.advance()
        text = token.text
        if token.kind == "number":
            return self.parse_repeating(text) or self.parse_mixed(_numeral(text), depth)
        if token.kind == "letter":
            return self.parse_application(self.parse_symbol(text), depth)
        if text == "." and self.position < len(self.tokens):  # .\overline{3}
            self.position -= 1
            if repeating := self.parse_repeating("0"):
                return repeating
            raise ParseError(text)
        if token.kind == "word":
            return self.parse_word(text, depth)
        if text in _CLOSING and text != "\\{":
            node = self.parse_group(depth + 1) if text == "{" else self.parse_sum(depth + 1)
            self.expect(_CLOSING[text])
            return Node("function", (node,), text[1:]) if text in ("lfloor", "lceil") else node
        if text == "|":
            self.open_bars += 1
            node = self.parse_sum(depth + 1)
            self.open_bars -= 1
            self.expect("|")
            return Node("function", (node,), "abs")
        if token.kind == "command":
            return self.parse_command(text, depth)
        raise ParseError(text)

    def parse_repeating(self, start: str) -> Node | None:
        """Parse a repeating decimal (`0.1\\overline{6}`, `0.1\\dot{6}`, `0.(3)`); None if nothing repeats."""
        dotted = self.peek() == "." and "." not in start
        if not (dotted or "." in start) or "e" in start.lower():
            return None
        place = self.position + dotted
        mark = self.tokens[place].text if place < len(self.tokens) else ""
        if mark not in ("overline", "bar", "dot") and not (mark == "(" and dotted):
            return None
        digits, place = self.repeated_digits(place if mark == "(" else place + 1)
        if mark == "dot":  # `0.\\dot{1}4285\\dot{7}`: the first and the last digit of the period have dots
            while place < len(self.tokens) and (
                self.tokens[place].kind == "number" or self.tokens[place].text == "dot"
            ):
                more, place = self.repeated_digits(place + (self.tokens[place].text == "dot"))
                digits += more
        if len(start + digits) >= MAX_DIGITS:
            raise ParseError(mark)
        self.position = place
        places, period = len(start.partition(".")[2]), len(digits)
        return number(Fraction(start) + Fraction(int(digits), (10**period - 1) * 10**places))

    def repeated_digits(self, place: int) -> tuple[str, int]:
        """Return the digits at an index, in braces, in parentheses or bare, and the index behind them."""
        texts = [token.text for token in self.tokens[place : place + 3]]
        enclosed = texts[:1] in (["{"], ["("]) and len(texts) == 3 and texts[2] == _CLOSING[texts[0]]
        digits = texts[1] if enclosed else "".join(texts[:1])
        if not (digits.isascii() and digits.isdigit()):
            raise ParseError("digits that repeat")
        return digits, place + (3 if enclosed else 1)

    def parse_mixed(self, whole: Node, depth: int) -> Node:
        """Parse a mixed number: `1\\frac{4}{5}` and `1 4/5` are 9/5."""
        if whole.decimals is not None or self.peek() != "frac":
            rest = self.tokens[self.position : self.position + 3]
            plain = [t.kind == "number" and t.text.isdigit() for t in rest] == [True, False, True]
            if whole.decimals is None and plain and rest[0].spaced and rest[1].text == "/":
                part = Fraction(int(rest[0].text), int(rest[2].text) or 1)
                if part < 1 and int(rest[2].text):
                    self.position += 3
                    return number(whole.value + part)
            return whole
        start = self.position
        fraction = self.parse_primary(depth)
        value = literal_value(fraction)
        if value is not None and fraction.kind == "product" and all(map(is_number_or_reciprocal, fraction.children)):
            if not 0 < value < 1:
                raise ParseError("a mixed number with a fraction above one")
            return number(whole.value + value)
        self.position = start
        return whole

    def parse_symbol(self, name: str) -> Node:
        if self.accept("_"):
            name += "_" + self.parse_subscript()
        ahead = self.tokens[self.position : self.position + 3]
        if [token.text for token in ahead[::2]] == ["(", ")"] and ahead[1].kind == "number":
            self.position += 3  # I(0) is the value of I at 0, not a product with 0
            name += f"({ahead[1].text})"
        return Node("symbol", name=name)

    def parse_application(self, symbol: Node, depth: int) -> Node:
        """Parse `E[X^2]` as a function of its argument. A sum in brackets is a factor, except behind f."""
        inside = bracketed(self.tokens, self.position)
        if not inside or self.tokens[self.position].spaced or symbol.name in ("e", "i"):
            return symbol
        signed = outside(inside, lambda token: token.text in ("+", "-", "pm", "mp"))
        if (signed and symbol.name != "f") or all(token.kind == "number" for token in inside):
            return symbol
        bracket = self.advance().text
        argument = self.parse_sum(depth + 1)
        self.expect(_CLOSING[bracket])
        return Node("function", (argument,), f"{symbol.name}()")

    def parse_subscript(self) -> str:
        token = self.advance()
        if token.text != "{":
            return token.text.strip()
        inner = ""
        while not self.accept("}"):
            part = self.advance().text
            if part in ("{", "^"):
                raise ParseError("a subscript of a subscript")
            inner += part.strip()
        return inner

    def parse_word(self, text: str, depth: int) -> Node:
        if text == "np" and self.accept("."):
            return self.parse_primary(depth)
        if text in FUNCTIONS or text == "sqrt" or text in CONSTANTS:
            return self.parse_command(text, depth)
        if len(text) > 4 or (len(text) > 3 and text.islower()):
            raise ParseError(text)  # a word of prose, not a product of letters
        self.position -= 1  # `xy^2` is x times y^2
        self.tokens[self.position] = Token("word" if len(text) > 2 else "letter", text[1:])
        return Node("symbol", name=text[0])

    def parse_command(self, name: str, depth: int) -> Node:
        if name in CONSTANTS:
            return Node("symbol", name=CONSTANTS[name])
        if name == "frac":
            above, below = self.parse_argument(depth), self.parse_argument(depth)
            if derivative := derivative_name(above, below):
                return Node("symbol", name=derivative)
            return make_product([above, reciprocal(below)])
        if name == "sqrt":
            degree = number(2)
            if self.accept("["):
                degree = self.parse_sum(depth + 1)
                self.expect("]")
            return Node("power", (self.parse_argument(depth), reciprocal(degree)), "root")
        if name == "binom":
            return Node("function", (self.parse_argument(depth), self.parse_argument(depth)), "binom")
        if name == "dot":
            inner = self.parse_argument(depth)
            if inner.kind != "symbol":
                raise ParseError("a dot over something that is not a letter")
            return self.parse_symbol("dot " + inner.name)
        if name in SYMBOLS:
            return self.parse_symbol(name)
        if name in FUNCTIONS:
            return self.parse_function(FUNCTION_ALIASES.get(name, name), depth)
        raise ParseError(name)

    def parse_function(self, name: str, depth: int) -> Node:
        base = power = None
        if name == "log" and self.accept("_"):
            base = self.parse_argument(depth)
        if self.accept("^"):
            power = self.parse_argument(depth)
            if literal_value(power) == -1:  # sin^{-1} is the inverse function
                if name not in ("sin", "cos", "tan"):
                    raise ParseError(f"{name}^-1")
                name, power = f"arc{name}", None
        inner = self.parse_function_argument(depth)
        node = Node("function", (inner,) if base is None else (inner, base), name)
        return node if power is None else Node("power", (node, power))

    def parse_function_argument(self, depth: int) -> Node:
        """Parse `\\sin(x)`, `\\sin{x}`, `\\sin 2x`, `\\sin \\frac{x}{2}`: up to the next sign or function."""
        if self.peek() in ("(", "{", "["):
            return self.parse_power(depth + 1)
        factors = [self.parse_power(depth + 1)]
        while self.starts_factor() and self.tokens[self.position].text not in FUNCTIONS | {"(", "["}:
            factors.append(self.parse_power(depth + 1))
        return make_product(factors)


def _numeral(text: str) -> Node:
    if len(text) > MAX_DIGITS:
        raise TooCostlyError(f"a number of more than {MAX_DIGITS} digits")
    mantissa, _, exponent = text.lower().partition("e")
    decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
    value = Fraction(mantissa) * Fraction(10) ** int(exponent or 0)
    return number(value, decimals if "." in mantissa or exponent else None)


def _remainder(node: Node, divisor: Node) -> Node:
    """Return what is left of a division with a whole quotient."""
    quotient = Node("function", (make_product([node, reciprocal(divisor)]),), "floor")
    return Node("sum", (node, negate(make_product([divisor, quotient]))))


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise TooCostlyError("nested too deep")
