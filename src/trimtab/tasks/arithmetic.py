"""Generated arithmetic: sums, differences, products, chains and small word problems, each with a worked solution.

A problem is drawn by its number from a stream of its own. Whether it belongs to the training or the test part is
decided by the question's text, so the two never share one, whatever their seeds and forms.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from trimtab.tasks.problems import Part, Problem, check_number, part_of, stream_seed, user

Family = Literal["addition", "subtraction", "multiplication", "chain", "words"]
Form = Literal["bare", "instruct"]
TEST_SHARE = 10  # one question in ten is kept for testing
DRAWS = 1000
INSTRUCTION = "Work step by step and put the final answer in \\boxed{}."


@dataclass(frozen=True)
class Drawn:
    """A question, its answer and the equations that lead there."""

    question: str
    answer: int
    working: list[str]


@dataclass(frozen=True)
class Arithmetic:
    """Arithmetic of one family: numbers of up to `digits` digits; chains and stories of `terms` numbers.

    `form="bare"` writes `12+34=` for models that know characters alone; `instruct` asks in words and wants a box.
    """

    family: Family = "addition"
    digits: int = 2
    terms: int = 3
    form: Form = "bare"
    size: int = 10_000
    seed: int = 0
    part: Part = "train"

    def __post_init__(self) -> None:
        for key, value, known in (
            ("family", self.family, get_args(Family)),
            ("form", self.form, get_args(Form)),
            ("part", self.part, get_args(Part)),
        ):
            if value not in known:
                raise ValueError(f"arithmetic: {key} is {value!r}; it is one of {', '.join(known)}")
        for key, number, least in (("digits", self.digits, 1), ("terms", self.terms, 2), ("size", self.size, 1)):
            if number < least:
                raise ValueError(f"arithmetic: {key} is {number}; it is at least {least}")

    @property
    def name(self) -> str:
        """Family and difficulty: digits, and terms where the family has them."""
        terms = f"x{self.terms}" if self.family in ("chain", "words") else ""
        return f"arithmetic/{self.family}-{self.digits}{terms}"

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> Problem:
        check_number(number, self.size)
        for draw in range(DRAWS):
            rng = random.Random(stream_seed(self.name, self.seed, self.part, number, draw))
            drawn = FAMILIES[self.family](rng, self.digits, self.terms)
            if part_of(drawn.question, TEST_SHARE) == self.part:
                return self._problem(drawn)
        raise ValueError(f"{self.name} has no {self.part} problem among {DRAWS} draws: raise digits or terms")

    def _problem(self, drawn: Drawn) -> Problem:
        answer = str(drawn.answer)
        story = self.family == "words"
        if self.form == "bare":
            asked = drawn.question if story else f"{drawn.question}="
            return Problem(user(asked), answer, "exact", self.name, solution=answer)
        asked = drawn.question if story else f"What is {drawn.question}?"
        solution = " ".join([*drawn.working, f"The answer is \\boxed{{{answer}}}."])
        return Problem(user(f"{asked} {INSTRUCTION}"), answer, "boxed", self.name, solution=solution)


def _number(rng: random.Random, digits: int) -> int:
    return rng.randrange(10**digits)


def _places(number: int) -> list[int]:
    """306 is 300 and 6."""
    text = str(number)
    places = [int(digit) * 10 ** (len(text) - 1 - place) for place, digit in enumerate(text)]
    return [place for place in places if place] or [0]


def _steps(total: int, sign: str, number: int) -> Iterator[str]:
    """Adds or takes away place by place: 58 + 34 is 58 + 30 = 88. 88 + 4 = 92."""
    for place in _places(number):
        after = total + place if sign == "+" else total - place
        yield f"{total} {sign} {place} = {after}."
        total = after


def _addition(rng: random.Random, digits: int, terms: int) -> Drawn:
    a, b = _number(rng, digits), _number(rng, digits)
    return Drawn(f"{a}+{b}", a + b, list(_steps(a, "+", b)))


def _subtraction(rng: random.Random, digits: int, terms: int) -> Drawn:
    b, a = sorted((_number(rng, digits), _number(rng, digits)))
    return Drawn(f"{a}-{b}", a - b, list(_steps(a, "-", b)))


def _multiplication(rng: random.Random, digits: int, terms: int) -> Drawn:
    a, b = _number(rng, digits), rng.randrange(2, 10)
    products = [place * b for place in _places(a)]
    working = [f"{place} * {b} = {place * b}." for place in _places(a)]
    total = products[0]
    for product in products[1:]:
        working.append(f"{total} + {product} = {total + product}.")
        total += product
    return Drawn(f"{a}*{b}", a * b, working)


def _chain(rng: random.Random, digits: int, terms: int) -> Drawn:
    """Sums and differences from left to right; no partial result is negative."""
    total = _number(rng, digits)
    question = str(total)
    working: list[str] = []
    for _ in range(terms - 1):
        number = _number(rng, digits)
        sign = "-" if number <= total and rng.random() < 0.5 else "+"
        question += f"{sign}{number}"
        working += _steps(total, sign, number)
        total += number if sign == "+" else -number
    return Drawn(question, total, working)


_NAMES = ("Ada", "Ben", "Chen", "Dina", "Emil", "Fay", "Gus", "Hana", "Ivan", "Jo", "Kim", "Lena")
_THINGS = ("apples", "books", "coins", "cards", "marbles", "pencils", "shells", "stamps", "stones", "tickets")


def _words(rng: random.Random, digits: int, terms: int) -> Drawn:
    """A story: someone has things, gets some more, gives some away, or buys boxes of them."""
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    total = max(2, _number(rng, digits))
    story = [f"{name} has {total} {thing}."]
    working: list[str] = []
    for _ in range(terms - 1):
        event = rng.choice(("gets", "gives", "buys"))
        if event == "gives" and total > 1:
            number, sign = rng.randrange(1, total), "-"
            story.append(f"{name} gives {number} away.")
        elif event == "buys":
            boxes, each = rng.randrange(2, 6), rng.randrange(2, 10)
            number, sign = boxes * each, "+"
            story.append(f"{name} buys {boxes} boxes of {each} {thing}.")
            working.append(f"{boxes} * {each} = {number}.")
        else:
            number, sign = max(1, _number(rng, digits)), "+"
            story.append(f"{name} gets {number} more.")
        working += _steps(total, sign, number)
        total += number if sign == "+" else -number
    story.append(f"How many {thing} does {name} have now?")
    return Drawn(" ".join(story), total, working)


FAMILIES: dict[Family, Callable[[random.Random, int, int], Drawn]] = {
    "addition": _addition,
    "subtraction": _subtraction,
    "multiplication": _multiplication,
    "chain": _chain,
    "words": _words,
}
