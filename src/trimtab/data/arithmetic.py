"""Generated arithmetic: sums, differences, products, chains and small word problems, each with a worked solution.

Each index has its own random generator. A hash of the question's text decides whether it belongs to the training or
the test split, so the two never share a question, with any seeds and prompt forms.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Literal, get_args

from trimtab.data.problems import Message, Problem, Split, check_index, derive_seed, split_of, user
from trimtab.own_parts import Option

Family = Literal["addition", "subtraction", "multiplication", "product", "chain", "words"]
PromptForm = Literal["bare", "instruct"]  # the recipe's key `task.form`
LONG_FAMILIES = ("chain", "words")  # their problems have `terms` numbers
TEST_ONE_IN = 10  # one question in ten is held out
MAX_ATTEMPTS = 1000
INSTRUCTION = "Work step by step and put the final answer in \\boxed{}."


@dataclass(frozen=True)
class ArithmeticProblem:
    """A question, its answer and the equations of its worked solution."""

    question: str
    answer: int
    working: list[str]


@dataclass(frozen=True)
class Arithmetic:
    """Generated sums, differences, products, chains of them, and word problems, with worked solutions."""

    family: Annotated[Family, Option("the kind of problem")] = "addition"
    digits: Annotated[int, Option("digits of each number", 1, 9)] = 2
    terms: Annotated[int, Option("how many numbers a chain or word problem has", 2, 9)] = 3
    min_terms: Annotated[
        int | None, Option("mix problems with this many up to task.terms numbers; none: always task.terms", 2, 9)
    ] = None
    form: Annotated[
        PromptForm, Option(r"the prompt: bare is `12+34=`, instruct is a question that asks for a \boxed answer")
    ] = "bare"
    size: Annotated[int, Option("number of problems per epoch", 1, 10_000_000)] = 10_000
    calls: Annotated[
        float,
        Option("share of worked solutions that call a tool: the calculator if bare, python if instruct", 0, 1),
    ] = 0.0
    seed: int = 0
    split: Split = "train"

    def __post_init__(self) -> None:
        for key, value, known in (
            ("family", self.family, get_args(Family)),
            ("form", self.form, get_args(PromptForm)),
            ("split", self.split, get_args(Split)),
        ):
            if value not in known:
                raise ValueError(f"arithmetic: {key} is {value!r}; it is one of {', '.join(known)}")
        for key, number, least in (("digits", self.digits, 1), ("terms", self.terms, 2), ("size", self.size, 1)):
            if number < least:
                raise ValueError(f"arithmetic: {key} is {number}; it is at least {least}")
        if self.min_terms is not None and not 2 <= self.min_terms <= self.terms:
            raise ValueError(f"arithmetic: min_terms is {self.min_terms}; it is from 2 to terms, which is {self.terms}")
        if self.calls and self.family == "words":
            raise ValueError(f"arithmetic: calls is {self.calls}, but a story has no expression that a tool could take")

    @property
    def name(self) -> str:
        """Return family and difficulty: digits, and terms if the family has them."""
        # The name is part of every seed: changing it changes every problem.
        fewest = "" if self.min_terms is None else f"{self.min_terms}-"
        terms = f"x{fewest}{self.terms}" if self.family in LONG_FAMILIES else ""
        return f"arithmetic/{self.family}-{self.digits}{terms}"

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Problem:
        check_index(index, self.size)
        for attempt in range(MAX_ATTEMPTS):  # rejection sampling until the text falls into this split
            rng = random.Random(derive_seed(self.name, self.seed, self.split, index, attempt))
            mixed = self.min_terms is not None and self.family in LONG_FAMILIES
            terms = rng.randint(self.min_terms or 2, self.terms) if mixed else self.terms
            generated = FAMILIES[self.family](rng, self.digits, terms)
            if split_of(generated.question, TEST_ONE_IN) == self.split:
                return self._problem(generated)
        raise ValueError(f"{self.name} has no {self.split} problem in {MAX_ATTEMPTS} attempts: raise digits or terms")

    def _problem(self, generated: ArithmeticProblem) -> Problem:
        answer = str(generated.answer)
        story = self.family == "words"
        # By the question, so that every epoch and every split of the same problem has the same solution.
        called = self.calls > 0 and derive_seed("call", self.seed, generated.question) % 1000 < 1000 * self.calls
        if self.form == "bare":  # no words in the prompt, so none in the solution
            prompt = generated.question if story else f"{generated.question}="
            worked = call_transcript("calculator", f"calculator({generated.question})", answer, answer)
            return Problem(user(prompt), answer, "exact", self.name, solution=worked if called else answer)
        prompt = generated.question if story else f"What is {generated.question}?"
        end = f"The answer is \\boxed{{{answer}}}."
        worked = call_transcript("python", f"```python\nprint({generated.question})\n```", answer, end)
        solution = worked if called else " ".join([*generated.working, end])
        return Problem(user(f"{prompt} {INSTRUCTION}"), answer, "boxed", self.name, solution=solution)


def call_transcript(tool: str, call: str, reply: str, answer: str) -> tuple[Message, ...]:
    """Return a worked solution with one call: what the assistant writes, what the tool says, and the answer."""
    return (
        {"role": "assistant", "content": call},
        {"role": "tool", "name": tool, "content": reply},
        {"role": "assistant", "content": answer},
    )


def _random_number(rng: random.Random, digits: int) -> int:
    return rng.randrange(10**digits)


def _place_values(number: int) -> list[int]:
    """Split a number by its digits: 306 is [300, 6]."""
    text = str(number)
    places = [int(digit) * 10 ** (len(text) - 1 - place) for place, digit in enumerate(text)]
    return [place for place in places if place] or [0]


def _steps(total: int, sign: str, number: int) -> Iterator[str]:
    """Yield the equations that add or subtract digit by digit: 58 + 34 is 58 + 30 = 88. 88 + 4 = 92."""
    for place in _place_values(number):
        after = total + place if sign == "+" else total - place
        yield f"{total} {sign} {place} = {after}."
        total = after


def _addition(rng: random.Random, digits: int, terms: int) -> ArithmeticProblem:
    a, b = _random_number(rng, digits), _random_number(rng, digits)
    return ArithmeticProblem(f"{a}+{b}", a + b, list(_steps(a, "+", b)))


def _subtraction(rng: random.Random, digits: int, terms: int) -> ArithmeticProblem:
    b, a = sorted((_random_number(rng, digits), _random_number(rng, digits)))  # no answer is negative
    return ArithmeticProblem(f"{a}-{b}", a - b, list(_steps(a, "-", b)))


def _multiplication(rng: random.Random, digits: int, terms: int) -> ArithmeticProblem:
    a, b = _random_number(rng, digits), rng.randrange(2, 10)  # one digit: the working is one product per digit of a
    return _long_product(a, b, [(place, b) for place in _place_values(a)])


def _product(rng: random.Random, digits: int, terms: int) -> ArithmeticProblem:
    """Generate a product of two numbers of exactly so many digits: beyond two, hard to work out without a tool."""
    a, b = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
    return _long_product(a, b, [(a, place) for place in _place_values(b)])


def _long_product(a: int, b: int, pairs: list[tuple[int, int]]) -> ArithmeticProblem:
    """Return a product whose working multiplies pairs and adds up their products."""
    products = [left * right for left, right in pairs]
    working = [f"{left} * {right} = {left * right}." for left, right in pairs]
    sums = zip(accumulate(products), products[1:], strict=False)
    working += [f"{total} + {product} = {total + product}." for total, product in sums]
    return ArithmeticProblem(f"{a}*{b}", a * b, working)


def _chain(rng: random.Random, digits: int, terms: int) -> ArithmeticProblem:
    """Generate sums and differences from left to right; no partial result is negative."""
    total = _random_number(rng, digits)
    question = str(total)
    working: list[str] = []
    for _ in range(terms - 1):
        number = _random_number(rng, digits)
        sign = "-" if number <= total and rng.random() < 0.5 else "+"
        question += f"{sign}{number}"
        working += _steps(total, sign, number)
        total += number if sign == "+" else -number
    return ArithmeticProblem(question, total, working)


_NAMES = ("Ada", "Ben", "Chen", "Dina", "Emil", "Fay", "Gus", "Hana", "Ivan", "Jo", "Kim", "Lena")
_THINGS = ("apples", "books", "coins", "cards", "marbles", "pencils", "shells", "stamps", "stones", "tickets")


def _words(rng: random.Random, digits: int, terms: int) -> ArithmeticProblem:
    """Generate a word problem: someone has things, gets more, gives some away, or buys boxes of them."""
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    total = max(2, _random_number(rng, digits))  # so that something can be given away
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
            number, sign = max(1, _random_number(rng, digits)), "+"
            story.append(f"{name} gets {number} more.")
        working += _steps(total, sign, number)
        total += number if sign == "+" else -number
    story.append(f"How many {thing} does {name} have now?")
    return ArithmeticProblem(" ".join(story), total, working)


FAMILIES: dict[Family, Callable[[random.Random, int, int], ArithmeticProblem]] = {
    "addition": _addition,
    "subtraction": _subtraction,
    "multiplication": _multiplication,
    "product": _product,
    "chain": _chain,
    "words": _words,
}
