"""Families of equivalents about what is not one number: each draws an answer, a truth, and what the two mean."""

from __future__ import annotations

import random
from typing import Any

import sympy
from sympy import Interval, Rational, Union, oo, symbols

from helpers.grading.equivalent_numbers import Pair, either, two

x, y, n, a, b = symbols("x y n a b")


def _integers(rng: random.Random, count: int, most: int = 30) -> list[int]:
    return rng.sample([k for k in range(-most, most + 1) if k], count)


def _term(coefficient: int, power: int) -> str:
    """A term with its sign in front."""
    size = "" if abs(coefficient) == 1 and power else str(abs(coefficient))
    body = size + ("" if power == 0 else "x" if power == 1 else f"x^{power}")
    return ("-" if coefficient < 0 else "+") + body


def _polynomial(terms: list[tuple[int, int]]) -> str:
    return "".join(_term(coefficient, power) for coefficient, power in terms if coefficient).removeprefix("+") or "0"


def _value(terms: list[tuple[int, int]]) -> sympy.Expr:
    return sympy.Add(*(coefficient * x**power for coefficient, power in terms))


def _item(rng: random.Random) -> tuple[str, Any]:
    k = rng.randint(-20, 20)
    p, q = rng.choice(((1, 2), (2, 3), (3, 4), (5, 7), (7, 9)))
    return rng.choice(
        (
            (str(k), sympy.Integer(k)),
            (str(k), sympy.Integer(k)),
            (rf"\frac{{{p}}}{{{q}}}", Rational(p, q)),
            (rf"{abs(k) + 2}\sqrt{{2}}", (abs(k) + 2) * sympy.sqrt(2)),
        )
    )


def _items(rng: random.Random, count: int) -> list[tuple[str, Any]]:
    found: dict[str, Any] = {}
    while len(found) < count:
        text, meaning = _item(rng)
        found[text] = meaning
    return list(found.items())


def assignments(rng: random.Random) -> Pair:
    name = rng.choice(("x", "y", "n", "k", "t", "m", "a", r"\theta", "x_1", "N", "S"))
    text, meaning = _item(rng)
    answer = rng.choice((f"{name}={text}", f"{name} = {text}", rf"{name} \,=\, {text}"))
    return (answer, text, meaning, meaning) if rng.random() < 0.8 else (text, answer, meaning, meaning)


def functions(rng: random.Random) -> Pair:
    terms = [(c, p) for p, c in enumerate(_integers(rng, 3, 9))]
    first, second = _polynomial(terms[::-1]), _polynomial(terms)
    name = rng.choice(("f(x)", "g(x)", "p(x)", "P(x)"))
    forms = [(f"{name} = {first}", f"{name}={second}"), (f"{name}={first}", second), (first, f"{name} = {first}")]
    answer, truth = rng.choice(forms)
    return answer, truth, _value(terms), _value(terms[::-1])


def sets(rng: random.Random) -> Pair:
    items = _items(rng, rng.randint(2, 5))
    other = rng.sample(items, len(items))
    shapes = (r"\{%s\}", r"\left\{%s\right\}", r"\{ %s \}", r"\lbrace %s \rbrace")
    answer = rng.choice(shapes).replace("%s", rng.choice((", ", ",", r",\ ", " , ")).join(text for text, _ in other))
    truth = rng.choice(shapes[:3]).replace("%s", ",".join(text for text, _ in items))
    return answer, truth, frozenset(m for _, m in other), frozenset(m for _, m in items)


def tuples(rng: random.Random) -> Pair:
    items = _items(rng, rng.randint(2, 4))
    shapes = ("(%s)", r"\left(%s\right)", "( %s )", r"\left( %s \right)", r"\big(%s\big)", r"\bigl(%s\bigr)")
    answer = rng.choice(shapes).replace("%s", rng.choice((", ", ",", r",\, ", r",\ ")).join(text for text, _ in items))
    truth = (
        rng.choice(shapes[:4])
        .replace("%s", ", ".join(text for text, _ in items))
        .replace(r"\frac", rng.choice((r"\frac", r"\dfrac")))
    )
    meaning = tuple(m for _, m in items)
    return answer, truth, meaning, meaning


def lists(rng: random.Random) -> Pair:
    items = _items(rng, rng.randint(2, 4))
    other = rng.sample(items, len(items))
    joint = rng.choice((", ", ",", r",\ ", r" \text{ and } ", r" \text{ or } ", " , "))
    if joint == r" \text{ or } " and len(items) > 2:
        joint = ", "
    answer = joint.join(text for text, _ in other)
    if rng.random() < 0.3:
        answer = ", ".join(f"x = {text}" for text, _ in other)
    return answer, ",".join(text for text, _ in items), frozenset(m for _, m in other), frozenset(m for _, m in items)


def _interval(rng: random.Random, low: int | None, high: int | None) -> tuple[str, str, Interval]:
    """Two ways of writing an interval, and it; None is infinite."""
    left = "(" if low is None else rng.choice("([")
    right = ")" if high is None else rng.choice(")]")
    ends = r"-\infty" if low is None else str(low), r"\infty" if high is None else str(high)
    value = Interval(-oo if low is None else low, oo if high is None else high, left == "(", right == ")")
    plain = f"{left}{ends[0]}, {ends[1]}{right}"
    wide = rf"\left{left}{ends[0]},{ends[1]}\right{right}"
    tight = f"{left}{ends[0]},{ends[1].replace(chr(92) + 'infty', '+' + chr(92) + 'infty')}{right}"
    return plain, rng.choice((wide, tight, f"{left} {ends[0]} , {ends[1]} {right}")), value


def intervals(rng: random.Random) -> Pair:
    low, high = sorted(_integers(rng, 2))
    kind = rng.randrange(4)
    plain, other, value = _interval(rng, None if kind == 0 else low, None if kind == 1 else high)
    if rng.random() < 0.2:
        return f"x \\in {other}", plain, value, value
    return other, plain, value, value


def unions(rng: random.Random) -> Pair:
    first, second, third, fourth = sorted(_integers(rng, 4, 60))
    left = _interval(rng, None if rng.random() < 0.4 else first, second)
    right = _interval(rng, third, None if rng.random() < 0.4 else fourth)
    value = Union(left[2], right[2])
    truth = rf"{left[0]} \cup {right[0]}"
    forms = (
        rf"{left[1]} \cup {right[1]}",
        rf"{right[0]} \cup {left[0]}",
        rf"{left[0]}\cup{right[1]}",
        rf"{right[1]} \cup {left[1]}",
    )
    return rng.choice(forms), truth, Union(right[2], left[2]), value


def inequalities(rng: random.Random) -> Pair:
    k = rng.randint(-30, 30)
    sign, flipped, meaning = rng.choice(
        (
            ((r"\geq", r"\ge", r"\geqslant", "≥"), (r"\leq", r"\le"), sympy.Ge(x, k)),
            ((r"\leq", r"\le", r"\leqslant", "≤"), (r"\geq", r"\ge"), sympy.Le(x, k)),
            ((">",), ("<",), sympy.Gt(x, k)),
            (("<",), (">",), sympy.Lt(x, k)),
        )
    )
    answer = rng.choice((f"x {rng.choice(sign)} {k}", f"x{rng.choice(sign)} {k}", f"{k} {rng.choice(flipped)} x"))
    return answer, f"x {sign[0]} {k}", meaning, meaning


def matrices(rng: random.Random) -> Pair:
    rows, columns = rng.choice(((2, 2), (2, 1), (3, 1), (1, 3), (3, 3), (2, 3)))
    items = [[_item(rng) for _ in range(columns)] for _ in range(rows)]
    kinds = rng.choice((("pmatrix", "pmatrix"), ("bmatrix", "bmatrix"), ("bmatrix", "pmatrix"), ("pmatrix", "bmatrix")))
    loose = r" \\ ".join(" & ".join(text for text, _ in row) for row in items)
    tight = r"\\".join("&".join(text for text, _ in row) for row in items)
    frac = rng.choice((r"\dfrac", r"\frac"))
    answer = rf"\begin{{{kinds[0]}}} {loose} \end{{{kinds[0]}}}".replace(r"\frac", frac)
    truth = rf"\begin{{{kinds[1]}}}{rng.choice((tight, loose))}\end{{{kinds[1]}}}"
    meaning = sympy.ImmutableMatrix([[m for _, m in row] for row in items])
    return answer, truth, meaning, meaning


def reordered(rng: random.Random) -> Pair:
    terms = [(c, p) for p, c in enumerate(_integers(rng, rng.randint(3, 5), 12))]
    other = rng.sample(terms, len(terms))
    answer = _polynomial(other)
    if rng.random() < 0.3:
        answer = answer.replace("x^2", "x^{2}").replace("+", " + ").replace("-", " - ").strip()
    return answer, _polynomial(terms[::-1]), _value(other), _value(terms)


def factored(rng: random.Random) -> Pair:
    roots = _integers(rng, rng.randint(2, 3), 9)
    product = sympy.Mul(*(x - root for root in roots))
    poly = sympy.Poly(product, x)
    terms = [(int(c), m[0]) for m, c in poly.terms()]
    text = "".join(f"(x{'-' if root > 0 else '+'}{abs(root)})" for root in roots)
    if rng.random() < 0.3:
        text = text.replace("(", r"\left(").replace(")", r"\right)")
    return either(rng, (text, product), (_polynomial(terms), _value(terms)))


def rational(rng: random.Random) -> Pair:
    k, m = rng.randint(2, 20), rng.randint(2, 9)
    forms: tuple[tuple[str, Any, str, Any], ...] = (
        (rf"\frac{{x+{k}}}{{x}}", (x + k) / x, rf"1 + \frac{{{k}}}{{x}}", 1 + k / x),
        (rf"\frac{{{k}}}{{x^{m}}}", k / x**m, rf"{k}x^{{-{m}}}", k * x**-m),
        (rf"\frac{{n(n+{k})}}{{{m}}}", n * (n + k) / m, rf"\frac{{n^2 + {k}n}}{{{m}}}", (n**2 + k * n) / m),
        (rf"\frac{{1}}{{{k}}} n", n / k, rf"\frac{{n}}{{{k}}}", n / k),
        (rf"\frac{{x}}{{{k}}} + \frac{{y}}{{{k}}}", x / k + y / k, rf"\frac{{x+y}}{{{k}}}", (x + y) / k),
        (rf"\frac{{{k}a}}{{{k * m}b}}", k * a / (k * m * b), rf"\frac{{a}}{{{m}b}}", a / (m * b)),
        (rf"(x+{k})/(x+{m})", (x + k) / (x + m), rf"\frac{{x+{k}}}{{x+{m}}}", (x + k) / (x + m)),
    )
    left, left_means, right, right_means = rng.choice(forms)
    return either(rng, (left, left_means), (right, right_means))


def identities(rng: random.Random) -> Pair:
    k = rng.randint(2, 9)
    forms: tuple[tuple[str, Any, str, Any], ...] = (
        (r"\sin^2 x", sympy.sin(x) ** 2, r"1 - \cos^2 x", 1 - sympy.cos(x) ** 2),
        (r"2\sin x\cos x", 2 * sympy.sin(x) * sympy.cos(x), r"\sin 2x", sympy.sin(2 * x)),
        (rf"\sin(({k}x)^2)", sympy.sin((k * x) ** 2), rf"\sin({k * k}x^2)", sympy.sin(k * k * x**2)),
        (rf"\cos(x - {k})", sympy.cos(x - k), rf"\cos({k} - x)", sympy.cos(k - x)),
        (rf"{k}^{{n+1}}", k ** (n + 1), rf"{k} \cdot {k}^n", k * sympy.Integer(k) ** n),
        (rf"2^{{n}} - {k}", 2**n - k, rf"-{k} + 2^n", -k + 2**n),
        (rf"\sqrt{{x}} + {k}", sympy.sqrt(x) + k, rf"{k} + x^{{\frac{{1}}{{2}}}}", k + x ** Rational(1, 2)),
        (rf"(x+{k})^2", (x + k) ** 2, rf"x^2 + {2 * k}x + {k * k}", x**2 + 2 * k * x + k * k),
        (rf"e^{{{k}x}} + x", sympy.exp(k * x) + x, rf"x + e^{{{k} x}}", x + sympy.exp(k * x)),
        (rf"\frac{{n!}}{{{k}}}", sympy.factorial(n) / k, rf"\frac{{1}}{{{k}}} n!", sympy.factorial(n) / k),
    )
    left, left_means, right, right_means = rng.choice(forms)
    return either(rng, (left, left_means), (right, right_means))


def products(rng: random.Random) -> Pair:
    k = rng.randint(2, 30)
    first, second = rng.choice((("x", "y"), ("a", "b"), ("n", "x")))
    power = rng.choice(("", "", "^2", "^{3}", "^{10}"))
    exponent = int(power.strip("^{}") or 1)
    meaning = k * sympy.Symbol(first) ** exponent * sympy.Symbol(second)
    one = first + power
    forms = [f"{k}{one}{second}", rf"{k} \cdot {one} \cdot {second}", rf"{k} \times {one} \times {second}"]
    forms += [f"{k} {one} {second}", f"{k}{second}{one}", f"{k}*{one}*{second}", rf"{one} \cdot {k}{second}"]
    return two(rng, forms, meaning)


def lines(rng: random.Random) -> Pair:
    slope, rise = rng.randint(2, 9), rng.choice([k for k in range(-9, 10) if k])
    sign = "+" if rise > 0 else "-"
    truth = f"y = {slope}x {sign} {abs(rise)}"
    shown = f"{abs(rise)} + {slope}x" if rise > 0 else f"-{abs(rise)} + {slope}x"
    forms = (
        f"y={slope}x{sign}{abs(rise)}",
        f"y = {shown}",
        rf"y = {slope} \cdot x {sign} {abs(rise)}",
        f"y={slope} x{sign}{abs(rise)}",
    )
    meaning = (y, slope * x + rise)
    return rng.choice(forms), truth, meaning, meaning


def spacing(rng: random.Random) -> Pair:
    """The same answer with LaTeX's spaces, sizes and styles around its signs."""
    p, q, k = rng.randint(1, 9), rng.randint(10, 19), rng.randint(2, 99)
    truth = rng.choice(
        (
            rf"\frac{{{p}}}{{{q}}} + \sqrt{{{k}}}",
            rf"x^2 + \frac{{{p}}}{{{q}}}x + {k}",
            rf"\sqrt{{{k}x}} - {p}",
            rf"{p}:{q}",
        )
    )
    space = rng.choice((r"\,", r"\;", r"\ ", "~", r"\!", r"\:", "  ", r"\quad "))
    changes = (
        lambda text: text.replace(" + ", f" {space}+{space} ").replace(" - ", f" {space}-{space} "),
        lambda text: rf"\displaystyle {text}",
        lambda text: text.replace(r"\frac", r"\dfrac"),
        lambda text: text.replace(" + ", "+").replace(" - ", "-"),
        lambda text: f"${text}$",
        lambda text: f"{text}.",
        lambda text: f"{{{text}}}",
        lambda text: f"{space}{text}{space}",
    )
    answer = rng.choice(changes)(truth)
    return answer, truth, truth, truth


def words(rng: random.Random) -> Pair:
    word = rng.choice(("Evelyn", "yes", "no", "even", "odd", "east", "ellipse", "Monday", "blue", "parallelogram"))
    forms = [
        word,
        rf"\text{{{word}}}",
        rf"\textbf{{{word}}}",
        rf"\mathrm{{{word}}}",
        rf"\text{{ {word} }}",
        rf"\mbox{{{word}}}",
    ]
    answer = rng.choice((*forms, word.capitalize(), rf"\text{{{word.capitalize()}}}", f"{word}."))
    return answer, rng.choice(forms[:2]), word, word


def choices(rng: random.Random) -> Pair:
    letter = rng.choice("ABCDE")
    forms = (
        letter,
        f"({letter})",
        f"{letter}.",
        rf"\text{{{letter}}}",
        rf"\text{{({letter})}}",
        rf"\mathrm{{({letter})}}",
    )
    forms += (
        rf"\textbf{{({letter})}}",
        rf"\textbf{{{letter}}}",
        f"{letter})",
        rf"\mathbf{{{letter}}}",
        rf"(\text{{{letter}}})",
        f"${letter}$",
    )
    return rng.choice(forms), letter, letter, letter
