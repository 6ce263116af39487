"""What is the same is accepted: of the pairs of every family at most one in two hundred is refused."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import sympy

from helpers.grading.equivalents import FAMILIES, PER_FAMILY, Equivalent, equivalents
from helpers.thorough import THOROUGH
from trimtab.data import Problem
from trimtab.data.problems import user
from trimtab.grading import Verdict, grade, grade_many

MOST_REFUSED = 0.005
PAIRS = equivalents()
SAMPLE = PAIRS if THOROUGH else [pair for number, pair in enumerate(PAIRS) if number % PER_FAMILY < 15]
# One digit off need not be wrong there: decimals may be rounded, and names and units have digits of their own.
FORGIVING = ("decimals", "decimals of fractions", "assignments", "units")
Graded = list[tuple[Equivalent, Verdict]]


@pytest.fixture(scope="module")
def graded() -> Graded:
    grade(r"\boxed{\sin^2 x}", r"1 - \cos^2 x")  # once per process, what does the algebra has to be loaded
    problems = [(pair.response, Problem(user("?"), pair.truth, pair.rule, pair.family)) for pair in PAIRS]
    return list(zip(PAIRS, grade_many(problems), strict=True))


def same(left: Any, right: Any) -> bool:
    """Whether two meanings are one, whatever the grader thinks."""
    if isinstance(left, sympy.MatrixBase):
        return left.shape == right.shape and all(map(same, left, right))
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, frozenset):
        return len(left) == len(right) and all(any(same(one, other) for other in right) for one in left)
    if isinstance(left, sympy.Expr | int) and left != right:
        return _vanishes(sympy.sympify(left) - sympy.sympify(right))
    return bool(left == right)


def _vanishes(difference: sympy.Expr) -> bool:
    """Whether an expression is nought: at points drawn anew, and by sympy."""
    rng = random.Random(0)
    for _ in range(3):
        point = {symbol: sympy.Rational(rng.randint(1, 999), 101) for symbol in difference.free_symbols}
        if abs(sympy.N(difference.subs(point), 30)) > sympy.Float("1e-18"):
            return False
    return bool(sympy.simplify(difference) == 0)


def test_both_sides_of_every_pair_mean_the_same() -> None:
    unequal = [f"{pair.family}: {pair.answer} | {pair.truth}" for pair in PAIRS if not same(pair.left, pair.right)]
    assert not unequal


def test_a_slip_in_a_pair_would_be_seen() -> None:
    x = sympy.Symbol("x")
    assert not same(sympy.sqrt(8), 3 * sympy.sqrt(2))
    assert not same(x**2 - 1, (x - 1) ** 2)
    assert not same(frozenset({1, 2}), frozenset({1, 3}))
    assert not same((1, 2), (2, 1))
    assert not same(sympy.Interval(0, 1), sympy.Interval.open(0, 1))


def test_there_are_two_thousand_different_pairs() -> None:
    assert len({(pair.answer, pair.truth, pair.rule) for pair in PAIRS}) >= 2000
    assert all(count >= 20 for count in Counter(pair.family for pair in PAIRS).values())


def test_at_most_one_pair_in_two_hundred_is_refused(graded: Graded) -> None:
    refused = [(pair, verdict) for pair, verdict in graded if verdict.kind != "correct"]
    shown = [f"{verdict.kind:10} {p.family}: {p.response!r} for {p.truth!r}" for p, verdict in refused]
    assert len(refused) <= MOST_REFUSED * len(graded), f"{len(refused)} of {len(graded)}\n" + "\n".join(shown)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_loses_more_than_one_pair_in_thirty(graded: Graded, family: str) -> None:
    of_family = [(pair, verdict) for pair, verdict in graded if pair.family == family]
    refused = [f"{v.kind:10} {pair.response!r} for {pair.truth!r}" for pair, v in of_family if v.kind != "correct"]
    assert len(refused) <= len(of_family) / 30, "\n".join(refused)


@pytest.fixture(scope="module")
def near_misses() -> list[tuple[str, Equivalent]]:
    """Answers with one digit changed, and answers to another truth of the same family."""
    rng = random.Random("near misses")
    changed = [(_one_digit_off(pair, rng), pair) for pair in SAMPLE if pair.family not in FORGIVING]
    others = [
        (other.response, pair)
        for pair, other in pairwise(SAMPLE)
        if pair.family == other.family and not same(pair.right, other.left)
    ]
    return [(response, pair) for response, pair in (*changed, *others) if response != pair.response]


def _one_digit_off(pair: Equivalent, rng: random.Random) -> str:
    places = [place for place, char in enumerate(pair.answer) if char in "0123456789"]
    if not places:
        return pair.response
    place = rng.choice(places)
    digit = str((int(pair.answer[place]) + rng.randint(1, 9)) % 10)
    return pair.response.replace(pair.answer, pair.answer[:place] + digit + pair.answer[place + 1 :])


def test_no_near_miss_is_right(near_misses: list[tuple[str, Equivalent]]) -> None:
    problems = [(response, Problem(user("?"), p.truth, p.rule, p.family)) for response, p in near_misses]
    judged = zip(near_misses, grade_many(problems), strict=True)
    paid = [f"{p.family}: {response!r} for {p.truth!r}" for (response, p), v in judged if v.kind == "correct"]
    assert len(near_misses) > 800
    assert not paid, "\n".join(paid)


def test_the_pairs_are_judged_promptly(graded: Graded) -> None:
    seconds = sorted(verdict.seconds for _, verdict in graded)
    slowest = max(graded, key=lambda item: item[1].seconds)
    assert seconds[len(seconds) // 2] < 0.05
    assert seconds[int(0.99 * len(seconds))] < 0.5, slowest
