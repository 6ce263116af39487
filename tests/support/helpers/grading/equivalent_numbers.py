"""Families of equivalents about numbers: each draws an answer, a truth, and what the two mean."""

from __future__ import annotations

import random
from typing import Any

import sympy
from sympy import I, Rational, pi, sqrt

Pair = tuple[str, str, Any, Any]


def either(rng: random.Random, first: tuple[str, Any], second: tuple[str, Any]) -> Pair:
    """Two ways of writing, in either order."""
    if rng.random() < 0.5:
        first, second = second, first
    return first[0], second[0], first[1], second[1]


def two(rng: random.Random, forms: list[str], meaning: Any) -> Pair:
    """Two different ways of writing one meaning."""
    answer, truth = rng.sample(forms, 2)
    return answer, truth, meaning, meaning


def _ratio(rng: random.Random, most: int = 60) -> Rational:
    while True:
        ratio = Rational(rng.randint(1, most), rng.randint(2, most))
        if ratio.q > 1:
            return ratio


def integers(rng: random.Random) -> Pair:
    n = rng.randint(-999, 999)
    forms = (f"{n}", f"{n}.", f"{n}.0", f"${n}$", f" {n} ", rf"\,{n}\,", rf"\displaystyle {n}", f"{n}.00", f"{{{n}}}")
    return rng.choice(forms), str(n), sympy.Integer(n), sympy.Integer(n)


def plain(rng: random.Random) -> Pair:
    n = rng.randint(1000, 9_999_999)
    forms = (f"{n}", f"{n:,}", f"{n}.0", f"${n:,}", f"{n:,}.00")
    return rng.choice(forms), str(n), sympy.Integer(n), sympy.Integer(n)


def thousands(rng: random.Random) -> Pair:
    n = rng.randint(1000, 10**9)
    plain_form = str(n)
    commas = f"{n:,}"
    forms = [commas, commas.replace(",", "{,}"), commas.replace(",", r",\!"), commas.replace(",", r"\,")]
    return (
        either(rng, (rng.choice(forms[:3]), n), (plain_form, n)) if rng.random() < 0.8 else (forms[3], plain_form, n, n)
    )


def _fraction_forms(p: int, q: int) -> list[str]:
    forms = [rf"\frac{{{p}}}{{{q}}}", rf"\dfrac{{{p}}}{{{q}}}", rf"\tfrac{{{p}}}{{{q}}}", f"{p}/{q}"]
    forms += [
        rf"\frac {{{p}}} {{{q}}}",
        rf"\displaystyle\frac{{{p}}}{{{q}}}",
        rf"\frac{{ {p} }}{{ {q} }}",
        f"{p} / {q}",
    ]
    return forms + ([rf"\frac{p}{q}", rf"\frac {p}{q}"] if 0 < p < 10 and q < 10 else [])


def fractions(rng: random.Random) -> Pair:
    ratio = _ratio(rng)
    return two(rng, _fraction_forms(ratio.p, ratio.q), ratio)


def negatives(rng: random.Random) -> Pair:
    ratio = _ratio(rng)
    p, q = ratio.p, ratio.q
    forms = [rf"-\frac{{{p}}}{{{q}}}", rf"\frac{{-{p}}}{{{q}}}", rf"\frac{{{p}}}{{-{q}}}", f"-{p}/{q}", f"−{p}/{q}"]
    forms += [
        rf"-\dfrac{{{p}}}{{{q}}}",
        rf"- \frac{{{p}}}{{{q}}}",
        rf"\left(-\frac{{{p}}}{{{q}}}\right)",
        f"-({p}/{q})",
    ]
    return two(rng, forms, -ratio)


def decimals(rng: random.Random) -> Pair:
    tenths = rng.randint(1, 999)
    text = f"0.{tenths:03d}"
    forms = [text, text[1:], f"{text}0", f"{text}00", f"${text}$", rf"\,{text}"]
    return rng.choice(forms), text, Rational(tenths, 1000), Rational(tenths, 1000)


def decimals_of_fractions(rng: random.Random) -> Pair:
    q = rng.choice((2, 4, 5, 8, 10, 16, 20, 25, 40, 50))
    ratio = Rational(rng.randint(1, 4 * q), q)
    if ratio.q == 1:
        ratio += Rational(1, 4)
    text = str(sympy.Float(ratio, 15)).rstrip("0")
    sign = rng.choice((1, 1, -1))
    minus = "-" if sign < 0 else ""
    fraction = rng.choice((rf"{minus}\frac{{{ratio.p}}}{{{ratio.q}}}", f"{minus}{ratio.p}/{ratio.q}"))
    return either(rng, (fraction, sign * ratio), (minus + text, sign * Rational(text)))


def mixed(rng: random.Random) -> Pair:
    whole, ratio = rng.randint(1, 20), _ratio(rng, 9)
    ratio = ratio - ratio.p // ratio.q
    value = whole + ratio
    forms = [rf"{whole}\frac{{{ratio.p}}}{{{ratio.q}}}", rf"{whole} \frac{{{ratio.p}}}{{{ratio.q}}}"]
    forms += [rf"{whole}\dfrac{{{ratio.p}}}{{{ratio.q}}}", rf"{whole}\,\frac{{{ratio.p}}}{{{ratio.q}}}"]
    improper = rng.choice(_fraction_forms(value.p, value.q)[:4])
    return either(rng, (rng.choice(forms), whole + ratio), (improper, value))


def scientific(rng: random.Random) -> Pair:
    mantissa, power = rng.choice(("1.5", "2", "3.25", "6.02", "9.1", "4")), rng.randint(2, 12) * rng.choice((1, 1, -1))
    value = Rational(mantissa) * sympy.Integer(10) ** power
    forms = [rf"{mantissa} \times 10^{{{power}}}", rf"{mantissa}\times10^{{{power}}}", f"{mantissa}e{power}"]
    forms += [rf"{mantissa} \cdot 10^{{{power}}}", rf"{mantissa} \times 10 ^ {{{power}}}", f"{mantissa}E{power}"]
    if value.q == 1:
        forms.append(str(value))
    return two(rng, forms, value)


def percent(rng: random.Random) -> Pair:
    n = rng.choice((rng.randint(1, 99), rng.randint(1, 999) / 10))
    forms = [rf"{n}\%", f"{n}%", rf"{n} \%", rf"{n}\text{{ percent}}", rf"{n}\,\%", rf"${n}\%$", f"{n} percent"]
    return two(rng, forms, Rational(str(n)) / 100)


def money(rng: random.Random) -> Pair:
    n = rng.randint(1, 99_999)
    forms = [rf"\${n}", f"{n}", rf"\$ {n}", rf"\${n:,}", rf"{n}\text{{ dollars}}", rf"\${n}.00", rf"\text{{\${n}}}"]
    return two(rng, forms, sympy.Integer(n))


def degrees(rng: random.Random) -> Pair:
    n = rng.randint(1, 359)
    forms = [rf"{n}^\circ", rf"{n}^{{\circ}}", f"{n}°", rf"{n}\text{{ degrees}}", rf"{n}^{{\circ }}", rf"{n} ^\circ"]
    return two(rng, [*forms, rf"{n}\degree", f"{n} degrees"], sympy.Integer(n))


def units(rng: random.Random) -> Pair:
    n = rng.choice((rng.randint(1, 500), rng.randint(1, 500) / 4))
    unit = rng.choice(("cm", "m", "km", "apples", "ways", "hours", "km/h", "square units", "inches", "kg", "students"))
    with_unit = [rf"{n}\text{{ {unit}}}", rf"{n} \text{{ {unit}}}", rf"{n}\ \text{{{unit}}}", rf"{n}\mbox{{ {unit}}}"]
    with_unit += [rf"{n}\mathrm{{~{unit}}}", rf"{n}\,\text{{{unit}}}", f"{n} {unit}", rf"{n}~\mathrm{{{unit}}}"]
    if unit in ("cm", "m", "km"):
        square = rng.choice(("^2", "^{2}", "^3"))
        with_unit = [
            rf"{n}\text{{ {unit}}}{square}",
            rf"{n} \mathrm{{~{unit}}}{square}",
            rf"{n}\ \text{{{unit}}}{square}",
        ]
    if rng.random() < 0.3:
        return two(rng, with_unit, Rational(str(n)))
    return either(rng, (rng.choice(with_unit), Rational(str(n))), (str(n), Rational(str(n))))


def radicals(rng: random.Random) -> Pair:
    square_free = rng.choice((2, 3, 5, 6, 7, 10, 11, 13, 14, 15))
    a = rng.randint(2, 15)
    under = a * a * square_free
    left = rng.choice((rf"\sqrt{{{under}}}", rf"{under}^{{1/2}}", rf"{under}^{{\frac{{1}}{{2}}}}"))
    right = rf"{a}\sqrt{{{square_free}}}"
    forms = [
        right,
        rf"{a} \sqrt{{{square_free}}}",
        rf"{a} \cdot \sqrt{{{square_free}}}",
        rf"\sqrt{{{square_free}}} \cdot {a}",
    ]
    if square_free < 10:
        forms.append(rf"{a}\sqrt{square_free}")
    other = rng.choice((left, rng.choice(forms[1:])))
    return either(rng, (other, sqrt(under)), (right, a * sqrt(square_free)))


def radical_fractions(rng: random.Random) -> Pair:
    a, b, c = rng.randint(1, 9), rng.choice((2, 3, 5, 6, 7, 11)), rng.randint(2, 9)
    kind = rng.randrange(4)
    if kind == 0:  # a rational denominator
        return either(
            rng, (rf"\frac{{{a}}}{{\sqrt{{{b}}}}}", a / sqrt(b)), (rf"\frac{{{a}\sqrt{{{b}}}}}{{{b}}}", a * sqrt(b) / b)
        )
    if kind == 1:
        text = rf"\frac{{{a} + \sqrt{{{b}}}}}{{{c}}}", rf"\frac{{\sqrt{{{b}}} + {a}}}{{{c}}}"
        return text[0], text[1], (a + sqrt(b)) / c, (sqrt(b) + a) / c
    if kind == 2:
        parts = rf"\frac{{{a}}}{{{c}}} + \frac{{\sqrt{{{b}}}}}{{{c}}}", rf"\frac{{{a}+\sqrt{{{b}}}}}{{{c}}}"
        return either(rng, (parts[0], Rational(a, c) + sqrt(b) / c), (parts[1], (a + sqrt(b)) / c))
    n = rng.randint(2, 5)
    cube = n**3 * b
    return either(rng, (rf"\sqrt[3]{{{cube}}}", sympy.cbrt(cube)), (rf"{n}\sqrt[3]{{{b}}}", n * sympy.cbrt(b)))


def pi_multiples(rng: random.Random) -> Pair:
    ratio = _ratio(rng, 12)
    p, q = ratio.p, ratio.q
    numerator = r"\pi" if p == 1 else rf"{p}\pi"
    forms = [
        rf"\frac{{{numerator}}}{{{q}}}",
        rf"\frac{{{p}}}{{{q}}}\pi",
        rf"{numerator}/{q}",
        rf"\frac{{{p}}}{{{q}}} \pi",
    ]
    forms += [rf"\dfrac{{{numerator}}}{{{q}}}", rf"\frac{{{p} \pi}}{{{q}}}", rf"\pi \cdot \frac{{{p}}}{{{q}}}"]
    return two(rng, forms, ratio * pi)


def powers(rng: random.Random) -> Pair:
    base, power = rng.randint(2, 12), rng.randint(2, 9)
    kind = rng.randrange(4)
    if kind == 0:
        return either(rng, (f"{base}^{{{power}}}", sympy.Integer(base) ** power), (str(base**power), base**power))
    if kind == 1:
        return either(
            rng,
            (f"{base}^{{-{power}}}", Rational(base) ** -power),
            (rf"\frac{{1}}{{{base**power}}}", Rational(1, base**power)),
        )
    big = rng.randint(20, 400)  # not written out
    if kind == 2:
        return f"{base} ^ {{{big}}}", f"{base}^{{{big}}}", sympy.Integer(base) ** big, sympy.Integer(base) ** big
    forms = rf"{base} \cdot {base}^{{{big}}}", f"{base}^{{{big + 1}}}"
    return either(rng, (forms[0], sympy.Integer(base) * base**big), (forms[1], sympy.Integer(base) ** (big + 1)))


def complex_numbers(rng: random.Random) -> Pair:
    a, b = rng.randint(1, 20), rng.randint(2, 20)
    forms = [
        f"{a}+{b}i",
        f"{a} + {b}i",
        f"{b}i+{a}",
        rf"{a} + {b} \cdot i",
        rf"\left({a} + {b}i\right)",
        f"{a} + {b} i",
    ]
    if rng.random() < 0.7:
        return two(rng, forms, a + b * I)
    forms = [f"{a}-{b}i", f"-{b}i + {a}", rf"{a} - {b}\mathrm{{i}}", rf"{a} - {b} i"]
    return two(rng, forms, a - b * I)


def logarithms(rng: random.Random) -> Pair:
    a, b = rng.choice(((2, 3), (3, 5), (2, 7), (5, 6), (10, 3), (7, 2)))
    kind = rng.randrange(4)
    if kind == 0:
        forms = [rf"\log_{{{a}}} {b}", rf"\log_{{{a}}}({b})", rf"\log_{{{a}}}{{{b}}}"]
        forms += [rf"\log _{{{a}}} {b}", rf"\frac{{\ln {b}}}{{\ln {a}}}"]
        return two(rng, forms, sympy.log(b) / sympy.log(a))
    if kind == 1:
        forms = [rf"\ln {b}", rf"\ln({b})", rf"\ln\left({b}\right)", rf"\ln{{{b}}}"]
        return two(rng, forms, sympy.log(b))
    if kind == 2:
        n = rng.randint(2, 5)
        return either(rng, (rf"{n}\ln {b}", n * sympy.log(b)), (rf"\ln {b**n}", sympy.log(b**n)))
    n = rng.randint(2, 9)
    return rf"e^{{{n}}} + 1", rf"1 + e^{n}", sympy.exp(n) + 1, 1 + sympy.exp(n)


def trigonometry(rng: random.Random) -> Pair:
    n = rng.randint(1, 89)
    kind = rng.randrange(3)
    if kind == 0:
        forms = [rf"\sin {n}^\circ", rf"\sin({n}^\circ)", rf"\sin\left({n}^{{\circ}}\right)", rf"\sin{{{n}^\circ}}"]
        return two(rng, forms, sympy.sin(n * pi / 180))
    if kind == 1:
        q = rng.choice((5, 7, 8, 9, 11))
        forms = [
            rf"\cos\frac{{\pi}}{{{q}}}",
            rf"\cos\left(\frac{{\pi}}{{{q}}}\right)",
            rf"\cos(\pi/{q})",
            rf"\cos \frac{{\pi}}{{{q}}}",
        ]
        return two(rng, forms, sympy.cos(pi / q))
    known: list[tuple[str, Any, str, Any]] = [
        (r"\arctan 2", sympy.atan(2), r"\tan^{-1}(2)", sympy.atan(2)),
        (
            r"\arcsin\frac{1}{3}",
            sympy.asin(Rational(1, 3)),
            r"\sin^{-1}\left(\frac{1}{3}\right)",
            sympy.asin(Rational(1, 3)),
        ),
        (r"\tan 15^\circ", sympy.tan(pi / 12), r"2 - \sqrt{3}", 2 - sqrt(3)),
        (r"\cos 36^\circ", sympy.cos(pi / 5), r"\frac{1+\sqrt{5}}{4}", (1 + sqrt(5)) / 4),
        (r"\frac{\sqrt{6}-\sqrt{2}}{4}", (sqrt(6) - sqrt(2)) / 4, r"\sin 15^\circ", sympy.sin(pi / 12)),
    ]
    left, left_means, right, right_means = rng.choice(known)
    return either(rng, (left, left_means), (right, right_means))


def bases(rng: random.Random) -> Pair:
    base = rng.randint(2, 9)
    digits = "".join(str(rng.randrange(base)) for _ in range(rng.randint(2, 6)))
    digits = str(rng.randint(1, base - 1)) + digits
    forms = [
        f"{digits}_{base}",
        f"{digits}_{{{base}}}",
        rf"{digits}_{{\text{{{base}}}}}",
        f"{digits} _{{{base}}}",
        f"({digits})_{{{base}}}",
    ]
    value = sympy.Integer(int(digits, base))
    return two(rng, forms, value)
