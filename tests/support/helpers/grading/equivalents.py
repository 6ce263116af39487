r"""Equivalents: pairs of an answer and a truth that are the same and that a fair grader therefore accepts.

Each family draws its pairs from a stream of its own and says of both sides, apart from their LaTeX, what they mean: a
sympy value, or a tuple or frozenset of such. The families' own test holds the two meanings against each other, so that
no pair is wrong by a slip in its making. What cannot mean a value (text, letters of choices) means its plain text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from helpers.grading import equivalent_numbers as numbers
from helpers.grading import equivalent_things as things

PER_FAMILY = 65
SAID = (
    "The answer is $\\boxed{%s}$.",
    "\\boxed{%s}",
    "Therefore,\n$$\\boxed{%s}$$",
    "So we have \\[ \\boxed{%s} \\]",
    "**Final Answer**\n\n\\( \\boxed{%s} \\)",
    "<think>Let me see. It could be 3.</think>\nThe final answer is: $\\boxed{%s}$",
    "$\\boxed{ %s }$",
)
Draw = Callable[[random.Random], tuple[str, str, Any, Any]]


@dataclass(frozen=True)
class Equivalent:
    """An answer, the truth that it equals, the response it stands in, and what the two mean."""

    family: str
    answer: str
    truth: str
    left: Any
    right: Any
    rule: str
    response: str


def equivalents(per_family: int = PER_FAMILY) -> list[Equivalent]:
    """So many pairs of every family."""
    return [_pair(family, number) for family in FAMILIES for number in range(per_family)]


def _pair(family: str, number: int) -> Equivalent:
    rng = random.Random(f"{family}-{number}")
    answer, truth, left, right = FAMILIES[family](rng)
    rule = RULES.get(family, "math")
    said = rng.choice(SAYINGS.get(family, SAID))
    return Equivalent(family, answer, truth, left, right, rule, said.replace("%s", answer))


FAMILIES: dict[str, Draw] = {
    "integers": numbers.integers,
    "thousands": numbers.thousands,
    "fractions": numbers.fractions,
    "negatives": numbers.negatives,
    "decimals": numbers.decimals,
    "decimals of fractions": numbers.decimals_of_fractions,
    "mixed numbers": numbers.mixed,
    "scientific": numbers.scientific,
    "percent": numbers.percent,
    "money": numbers.money,
    "degrees": numbers.degrees,
    "units": numbers.units,
    "radicals": numbers.radicals,
    "radical fractions": numbers.radical_fractions,
    "multiples of pi": numbers.pi_multiples,
    "powers": numbers.powers,
    "complex numbers": numbers.complex_numbers,
    "logarithms": numbers.logarithms,
    "trigonometry": numbers.trigonometry,
    "bases": numbers.bases,
    "assignments": things.assignments,
    "functions": things.functions,
    "sets": things.sets,
    "tuples": things.tuples,
    "lists": things.lists,
    "intervals": things.intervals,
    "unions": things.unions,
    "inequalities": things.inequalities,
    "matrices": things.matrices,
    "polynomials reordered": things.reordered,
    "polynomials factored": things.factored,
    "rational functions": things.rational,
    "identities": things.identities,
    "products": things.products,
    "lines": things.lines,
    "spacing": things.spacing,
    "words": things.words,
    "choices": things.choices,
    "answer lines": numbers.fractions,
    "numbers in text": numbers.plain,
}
RULES = {"choices": "choice", "answer lines": "dapo", "numbers in text": "number"}
SAYINGS: dict[str, tuple[str, ...]] = {
    "choices": (
        "The answer is $\\boxed{%s}$.",
        "\\boxed{%s}",
        "B looks right at first, but is not.\n\n$\\boxed{%s}$",
        "Answer: %s",
    ),
    "answer lines": (
        "We compute.\n\nAnswer: %s",
        "Answer: $%s$",
        "Some steps, 1, 2, 3.\nAnswer: %s\n",
        "Answer: %s.",
    ),
    "numbers in text": ("First 3, then 5. The answer is %s.", "#### %s", "12 + 3 is 15, so it is %s", "%s"),
}
