r"""Hostile answers: what a model may write that costs a careless grader its time, its memory or its machine.

Twenty families of a hundred each, drawn by family and number from streams of their own, so that any part of them is
the same in every run. Each stands in a plausible response beside a truth that it does not equal: most are larger than
any truth here, infinite, no value at all, or about variables which the truths do not have. Nothing here is ever right.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from helpers.grading.hostile_text import boxes, characters, injections, regexes, unbalanced

PER_FAMILY = 100
STRIDE = 17  # a few of each family already show most of its forms
NUMBER = "104729"
CHOICE = "D"

# None of these is the value of a hostile answer: small numbers with a large prime in them, and things in x.
TRUTHS = (
    NUMBER,
    "-1009",
    r"\frac{355}{1009}",
    r"\sqrt{1009}",
    r"7\pi + 1009",
    r"x^2 + 3x - 1009",
    r"\frac{x+1009}{x-1}",
    r"(3, 1009)",
    r"[0, 1009)",
    r"\{2, 3, 1009\}",
    r"\begin{pmatrix} 1 & 2 \\ 3 & 1009 \end{pmatrix}",
    r"x = 1009",
    r"1009\%",
    r"e^{1009} - 1",
)
# Most are asked of the rule with the most behind it; every tenth of another.
RULES = ("math", "math", "strict-box", "math", "math", "dapo", "math", "number", "math", "boxed")
SYMPY = (
    *("beta", "gamma", "zeta", "lambda", "S", "N", "Q", "E", "I", "O", "oo", "nan", "zoo", "inf", "Infinity", "NaN"),
    *("None", "True", "pi.evalf", "Integer", "Symbol", "symbols", "lambdify", "solve", "factorial", "Pow", "Mul"),
    *("Add", "Rational", "Float", "preorder_traversal", "is_zero", "doit", "args", "func", "subs", "rewrite"),
    *("FiniteSet", "Interval", "Union", "EmptySet", "UniversalSet", "Reals", "Matrix", "eye", "zeros", "ones"),
    *("Sum", "Product", "Integral", "Derivative", "Limit", "Function", "Lambda", "Piecewise", "Eq", "Ne", "Gt"),
    *("oo**oo", "zoo*0", "I**I", "print", "input", "exit", "quit"),
)
SAID = (
    "We compute step by step.\nThe final answer is $\\boxed{%s}$.",
    "\\boxed{%s}",
    "<think>First, let us see.</think>\n\nTherefore $$\\boxed{%s}$$",
    "Let $x$ be the number of ways. By symmetry, $x = \\boxed{ %s }$",
)


@dataclass(frozen=True)
class Hostile:
    """A response that must not be graded as correct, and the truth it is graded against."""

    family: str
    number: int
    response: str
    truth: str
    rule: str

    @property
    def name(self) -> str:
        """Return family and number."""
        return f"{self.family}-{self.number}"


def hostiles(per_family: int, canary: str = "/tmp/no-such-folder/canary") -> Iterator[Hostile]:
    """Yield so many hostile answers of each family; code among them writes the file `canary` if it is run."""
    for turn in range(per_family):
        for family in FAMILIES:
            yield hostile(family, STRIDE * turn % PER_FAMILY, canary)


def hostile(family: str, number: int, canary: str = "/tmp/no-such-folder/canary") -> Hostile:
    """Return the hostile answer of a family by its number."""
    rng = random.Random(f"{family}-{number}")
    rule = RULES[number % len(RULES)]
    if family in WHOLE:
        response = WHOLE[family](rng, number)
    else:
        answer = injections(rng, number, canary) if family == "injections" else ANSWERS[family](rng, number)
        said = "I worked it out.\nAnswer: %s" if rule == "dapo" else rng.choice(SAID)
        response = said.replace("%s", answer)
    if number % 25 == 9 and CHOICE not in response:
        return Hostile(family, number, response, CHOICE, "choice")
    return Hostile(family, number, response, NUMBER if rule == "number" else rng.choice(TRUTHS), rule)


def power_towers(rng: random.Random, number: int) -> str:
    tower = str(rng.randint(2, 99))
    for _ in range(rng.randint(2, 6)):
        tower = f"{rng.randint(7, 99)}^{{{tower}}}"
    tower = f"9^{{9^{{{tower}}}}}"
    forms = (
        tower,
        f"{tower} - {tower} + 1",
        f"-{tower}",
        rf"\frac{{{tower}}}{{7}}",
        rf"{tower} \mod 1000",
        rf"\sqrt{{{tower}}} + x",
        rf"\left({tower}\right)^{{{tower}}}",
        f"x^{{{tower}}}",
        "9**9**9**9",
        "9^9^9^9",
        rf"10^{{-{tower}}} + 2",
        rf"\log {tower}",
    )
    return forms[number % len(forms)]


def factorials(rng: random.Random, number: int) -> str:
    n = rng.randint(10**6, 10**12)
    forms = (
        f"{n}!",
        f"(({rng.randint(20, 99)}!)!)!",
        "9" + "!" * rng.randint(3, 400),
        rf"\frac{{{n}!}}{{{n - 3}! + 1}}",
        f"{n}! - {n}! + 5",
        rf"\prod_{{k=1}}^{{{n}}} k!",
        f"x!^{{{n}!}}",
        rf"\Gamma({n}) + \Gamma({n}.5)",
        " + ".join(f"{k}!" for k in range(10**4, 10**4 + 200)),
        f"(-{n})!",
        f"{n}.5!",
        f"{n}!!!!",
        "*".join(f"{k}!" for k in range(900, 1200)),
    )
    return forms[number % len(forms)]


def giant_exponents(rng: random.Random, number: int) -> str:
    n = rng.randint(10**9, 10**15)
    forms = (
        f"2^{{{n}}}",
        f"({rng.randint(2, 9)}.{rng.randint(1, 9)})^{{{n}}}",
        rf"\sqrt[{n}]{{{n}}} + x + y",
        rf"\sqrt[1/{n}]{{7}}",
        f"(1 + 10^{{-{n}}})^{{10^{{{n}}}}}",
        rf"\left(\frac{{3}}{{2}}\right)^{{{n}}}",
        f"i^{{2^{{{n}}}}} + {n}",
        rf"(\sqrt{{2}} + \sqrt{{3}})^{{{n}}}",
        f"(1+x)^{{{n}}}",
        rf"e^{{e^{{e^{{{n}}}}}}}",
        rf"(-8)^{{\frac{{1}}{{{n}}}}} + i",
        f"2^{{{n}}} - 2^{{{n}}} + 3",
        rf"3^{{{n}}} \bmod {n}0000000000",
        f"0.{'0' * 50}1^{{-{n}}}",
    )
    return forms[number % len(forms)]


def sums_and_products(rng: random.Random, number: int) -> str:
    n, p = rng.randint(10**8, 10**13), rng.randint(3, 99)
    forms = (
        rf"\sum_{{k=1}}^{{{n}}} k^{{{p}}}",
        rf"\sum_{{k=1}}^{{{n}}} \frac{{{n}}}{{k^{{{p}}} + 1}}",
        rf"\prod_{{k=1}}^{{{n}}} \left(1 + k\right)",
        rf"\sum_{{i=1}}^{{{n}}} \sum_{{j=1}}^{{{n}}} \sum_{{k=1}}^{{{n}}} ijk",
        rf"\sum_{{k=1}}^{{\infty}} k^{{{p}}}",
        rf"\prod_{{p}} \frac{{{n}}}{{1 - p^{{-{p}}}}}",
        rf"\sum_{{d \mid {n}}} {n}^{{d}}",
        rf"\sum_{{k=0}}^{{{n}}} \binom{{{n}}}{{k}}",
        rf"\sum_{{k=1}}^{{{n}}} k!",
        "+".join(str(rng.randint(10**6, 10**9)) for _ in range(5000)),
        r" \times ".join(str(rng.randint(10**6, 10**9)) for _ in range(3000)),
        "1" + "+1" * rng.randint(20_000, 90_000),
        "2" + r"\cdot 2" * 10_000,
    )
    return forms[number % len(forms)]


def calculus(rng: random.Random, number: int) -> str:
    n = rng.randint(50, 5000)
    forms = (
        rf"\int_{{0}}^{{10^{{{n}}}}} x^{{x}} \, dx",
        rf"\int_{{1}}^{{{n}}} e^{{x^{{{n}}}}} \sin^2(x^{{x}}) \, dx",
        r"\int" * 40 + "x" + "dx" * 40,
        rf"\lim_{{n \to \infty}} \left(1 + \frac{{1}}{{n}}\right)^{{n^{{{n}}}}}",
        rf"\lim_{{x \to 0}} \frac{{1}}{{\sin(\sin(\sin(\tan(x))))^{{{n}}}}}",
        rf"\frac{{d^{{{n}}}}}{{dx^{{{n}}}}} \left( \tan(x) \cdot e^{{\sin x}} \right)",
        rf"\int_{{-\infty}}^{{\infty}} \frac{{x^{{{n}}}}}{{\ln(x^{{{n}}} + 2)}} \, dx",
        rf"\int \frac{{1}}{{x^{{{n}}} + x^{{7}} + 1}} \, dx",
        rf"\iiint_{{[0,1]^{{{n}}}}} \prod x_i^{{-{n}}} \, dV",
        r"\lim_{x \to 0}" * n + " x^{-2}",
        rf"\oint_{{|z|={n}}} \frac{{e^{{z^{{z}}}}}}{{z}} \, dz",
        rf"\int_0^{{10^{{100}}}} \Gamma(x)^{{{n}}} \, dx",
    )
    return forms[number % len(forms)]


def binomials(rng: random.Random, number: int) -> str:
    n = rng.randint(10**6, 10**10)
    forms = (
        rf"\binom{{{n}}}{{{n // 2}}}",
        r"\binom{\binom{\binom{99}{49}}{9}}{8}",
        rf"{{{n} \choose {n // 3}}}",
        rf"C({n}, {n // 2})",
        r"\dbinom{10^{9}}{10^{8}}",
        rf"\binom{{x}}{{{n}}}",
        rf"\frac{{\binom{{{n}}}{{{n // 2}}}}}{{\binom{{{n}}}{{7}}}}",
        rf"F_{{{n}}}",
        rf"\operatorname{{lcm}}(1, 2, \ldots, {n})",
        rf"\phi({n}^{{{n}}})",
        rf"p({n})",
        rf"B_{{{n}}}",
        rf"\zeta(-{n})",
        rf"\pi(10^{{{n}}})",
    )
    return forms[number % len(forms)]


def deep_nesting(rng: random.Random, number: int) -> str:
    depth = (60, 300, 2000, 9000, 60_000)[number % 5]
    shapes = (
        ("{", "1", "}"),
        ("(", "1 + x", ")"),
        (r"\frac{1}{1+", "x", "}"),
        (r"\sqrt{1+", "2", "}"),
        (r"\left(1+", "x", r"\right)"),
        ("2^{", "3", "}"),
        ("x_{", "3", "}"),
        (r"\{", "1, 2", r"\}"),
        ("[", "0, 1", ")"),
        (r"\text{", "5", "}"),
        (r"\left\{\left[", "1", r"\right]\right\}"),
        ("-(", "5", ")"),
        (r"\sin(", "x", ")"),
        ("|", "5", "|"),
        (r"\lfloor ", "5.5", r"\rfloor"),
    )
    before, inside, after = shapes[(number // 5 + number) % len(shapes)]
    return before * depth + inside + after * depth


def digit_strings(rng: random.Random, number: int) -> str:
    n = rng.randint(5000, 300_000)
    digits = "".join(rng.choices("123456789", k=50))
    forms = (
        digits * (n // 50),
        "0." + digits * (n // 50),
        "1e999999999",
        f"{digits}e{n}99999",
        f"1e-{'9' * 40}",
        "9" * n + "/" + "7" * n,
        "0." + "0" * n + "1",
        f"{digits[:9]}.{digits}e+{'9' * 300}",
        "٣" * n,
        "９" * n + ".５",
        "𝟗𝟗𝟗^{" + "𝟗" * 200 + "}",
        "1" + ",000" * (n // 10),
        "0x" + "f" * n,
        "1_000" * 500,
        "1" + r"\,000" * 3000,
        "½" * 5000,
        "0." + r"\overline{" + digits * 200 + "}",
        "0." + "3" * n + r"\ldots",
        "-" * n + "5",
        "1." + "2." * n,
    )
    return forms[number % len(forms)]


def collections(rng: random.Random, number: int) -> str:
    n = rng.randint(500, 20_000)
    items = [str(rng.randint(10**5, 10**7)) for _ in range(n)]
    side = rng.randint(12, 60)
    row = " & ".join(f"x_{{{i}}} + \\sqrt{{{i + 2}}}" for i in range(side))
    forms = (
        r"\{" + ", ".join(items) + r"\}",
        "(" + ", ".join(items) + ")",
        r"\begin{pmatrix} " + r" \\ ".join([row] * side) + r" \end{pmatrix}",
        r" \cup ".join(f"[{a}, {a}1]" for a in items[:2000]),
        r"\det \begin{pmatrix} " + r" \\ ".join([row] * side) + r" \end{pmatrix}",
        ", ".join(f"x = \\sqrt{{{a}}}" for a in items[:2000]),
        r"\{1, 2, \ldots, 10^{12}\}",
        "[" * 40 + ",".join(items[:50]) + "]" * 40,
        rf"\begin{{pmatrix}} 1 & 1 \\ 1 & 0 \end{{pmatrix}}^{{{n}000000}}",
        r"\mathcal{P}(\mathcal{P}(\mathcal{P}(\{1, 2, 3, 4, 5, 6, 7, 8, 9\})))",
        ",".join(items) + "," * 1000,
        r" \times ".join([r"\{" + ",".join(items[:100]) + r"\}"] * 30),
        r" \text{ or } ".join(items[:3000]),
    )
    return forms[number % len(forms)]


def polynomials(rng: random.Random, number: int) -> str:
    n = rng.randint(300, 3000)
    forms = (
        f"(x+y+z)^{{{n}}}",
        f"(1 + x + x^2 + x^3)^{{{n}}} - (1 + x)^{{{n}}}",
        "".join(f"(x - {k})" for k in range(1, 300)),
        "".join(f"(x_{{{k}}} + y_{{{k}}})" for k in range(1, 60)),
        f"x^{{{n}000}} - 1",
        rf"\frac{{x^{{{n}}} - y^{{{n}}}}}{{x - y}}",
        f"((x+1)^{{{n}}} + (y+2)^{{{n}}})^{{{n}}}",
        rf"\left(\sqrt{{x}} + \sqrt{{y}} + \sqrt{{z}}\right)^{{{n}}}",
        " + ".join(f"{k}x^{{{k}}}y^{{{n - k}}}" for k in range(1, 300)),
        " + ".join(rf"\frac{{1}}{{x + {k}}}" for k in range(1, 200)),
        "(a+b+c+d+e+f+g+h)^{40} (a-b-c-d-e-f-g-h)^{40}",
        r" + ".join(rf"\sqrt{{x + {k} + \sqrt{{{k}}}}}" for k in range(2, 80)),
        "(" + "+".join(rf"\sqrt{{x+{k}}}" for k in range(2, 20)) + f")^{{{n % 7 + 2}}}",
        "".join(rf"(\sqrt{{x+{k}}}+\sqrt{{y}})" for k in range(n % 40 + 8)),
        ", ".join(f"(x+{k})^9" for k in range(150)),
    )
    return forms[number % len(forms)]


def trigonometry(rng: random.Random, number: int) -> str:
    n = rng.randint(20, 400)
    names = ("sin", "cos", "tan", "arctan", "sinh", "ln")
    tower = "".join(rf"\{rng.choice(names)}(" for _ in range(n)) + "x + 2" + ")" * n
    forms = (
        tower,
        rf"\sin^{{{n}}} x \cos^{{{n}}} x \tan^{{{n}}} x + {n}",
        " + ".join(rf"\sin({k}x)\cos({k + 1}y)" for k in range(1, n)),
        rf"\sin(10^{{10^{{{n}}}}}) + {n}",
        "".join(rf"\cos\left(\frac{{x}}{{{k}}}\right)" for k in range(1, n)),
        rf"\tan(\tan(\tan(\tan({n}))))^{{{n}}} + {n}x",
        " + ".join(rf"\arctan\frac{{{k}}}{{{k + 1}x}}" for k in range(1, n)),
        rf"\prod_{{k=1}}^{{{n}0000}} (2 + \cos\frac{{k\pi}}{{{n}0001}})",
        rf"e^{{i\pi/{n}}} + {n}" + rf" + e^{{i\pi/{n + 1}}}" * 100,
        rf"\sin\cos\tan\sec\csc\cot\ln\log\exp {n}x",
    )
    return forms[number % len(forms)]


def equations(rng: random.Random, number: int) -> str:
    n, a = rng.randint(3, 60), rng.randint(2, 99)
    forms = (
        f"x^{{{n}}} + y^{{{n}}} = z^{{{n}}}",
        f"x^5 - {a}x + 1 = 0",
        rf"\sin(x) e^{{x}} = {a} + \ln x",
        rf"x^{{{n}}} - {a}x^{{{n - 1}}} + 7x > 0",
        ", ".join(f"x_{{{i}}} + x_{{{i + 1}}}^2 = {i}" for i in range(1, n)),
        f"x^2 - {a * a + 1}y^2 = 1, x, y \\in \\mathbb{{Z}}",
        rf"\begin{{cases}} x^{{{n}}} + y = {a} \\ x + y^{{{n}}} = {a} \\ xyz = 1 \end{{cases}}",
        f"x^x = {a}^{{{n}}}",
        f"0 < x^{{{n}}} < x^{{{n + 1}}} < \\sin x",
        f"x^3 + y^3 + z^3 = {a}",
        rf"|x - 1| + |x - 2| + |x^{{{n}}} - 3| \le {a}",
        "x = " * 5000 + "y",
        rf"\{{n \in \mathbb{{Z}} : n^{{{n}}} \equiv {a} \pmod{{10^{{{n}}}}}\}}",
        rf"f(f(f(x))) = x^{{{n}}} + f({a})",
        rf"y'' + x^{{{n}}} y' + e^{{y}} = 0",
        rf"\frac{{{a} \pm \sqrt{{{n}}}}}{{{n} \pm \sqrt{{{a}}}}} \pm {n}",
    )
    return forms[number % len(forms)]


def recursions(rng: random.Random, number: int) -> str:
    depth = (40, 150, 400, 3000)[number % 4]
    fraction = "".join(rf"{rng.randint(1, 9)} + \cfrac{{x}}{{" for _ in range(depth)) + "y" + "}" * depth
    forms = (
        fraction,
        r"\sqrt{2 + " * depth + "x" + "}" * depth,
        r"\ln(2 + " * depth + "x" + ")" * depth,
        r"\left| 1 - " * depth + "x" + r"\right|" * depth,
        r"\max(1, x, " * depth + "x" + ")" * depth,
        r"\frac{d}{dx}\left(x " * depth + "x" + r"\right)" * depth,
        "f(" * depth + "x" + ")" * depth,
        r"\frac" * depth + "{1}{2}" * 2,
        r"\sqrt" * depth + "{x}",
        "x^{x^{" * depth + "x" + "}}" * depth,
        r"\gcd(2^{99}, x" * depth + ")" * depth,
    )
    return forms[number % len(forms)]


def symbols(rng: random.Random, number: int) -> str:
    word = SYMPY[number % len(SYMPY)]
    forms = (
        word,
        rf"\operatorname{{{word}}}(x)",
        rf"\text{{{word}}}",
        f"{word}({rng.randint(10**9, 10**12)})",
        rf"\mathrm{{{word}}}^{{{word}}}",
        f"{word} = {word}",
        f"{word}.{rng.choice(SYMPY)}",
        "".join(rng.choices(SYMPY, k=200)),
        f"x_{{{word}}}^{{{word}}}",
    )
    return forms[(number * 7) % len(forms)]


def units(rng: random.Random, number: int) -> str:
    n = rng.randint(2000, 30_000)
    forms = (
        "5" + r"\%" * n,
        "5" + r"\text{ cm}" * n,
        "5" + r"^\circ" * n,
        r"\$" * n + "5",
        "5" + r"\mathrm{~m}^{2}" * n,
        "5" + " percent" * n,
        "5" + r"\," * n + "x",
        r"\text{" * n + "5",
        "5 " + "km/h per second per " * n,
        r"5^{\circ" + "'" * n + "}",
        r"\mbox{ }" * n,
        "7" + r"\times 10^{9}" * n,
        "0." + r"\overline{" * 500 + "3" + "}" * 500,
        f"0.{'142857' * n}...",
        "5" + "!" * n,
        "5" + "'" * n,
    )
    return forms[number % len(forms)]


ANSWERS: dict[str, Callable[[random.Random, int], str]] = {
    "power_towers": power_towers,
    "factorials": factorials,
    "giant_exponents": giant_exponents,
    "sums_and_products": sums_and_products,
    "calculus": calculus,
    "binomials": binomials,
    "deep_nesting": deep_nesting,
    "digit_strings": digit_strings,
    "collections": collections,
    "polynomials": polynomials,
    "trigonometry": trigonometry,
    "equations": equations,
    "recursions": recursions,
    "symbols": symbols,
    "units": units,
}
# These say how the whole response looks, not only what is in its box.
WHOLE: dict[str, Callable[[random.Random, int], str]] = {
    "unbalanced": unbalanced,
    "boxes": boxes,
    "characters": characters,
    "regexes": regexes,
}
FAMILIES = (*ANSWERS, *WHOLE, "injections")
