"""Countdown: combine the given numbers, each exactly once, so that the result is the target.

Most problems have several right answers, so exploration pays. The worked solutions are attempts: right in their form,
with a value that has nothing to do with the target. A warm start on them teaches how to answer, and not the answers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from trimtab.data.problems import Problem, Split, check_index, derive_seed, split_of, user
from trimtab.own_parts import Option

CountdownForm = Literal["expression", "steps"]
TEST_ONE_IN = 10  # one question in ten is held out
MAX_ATTEMPTS = 1000
STRENGTH = {"+": 1, "-": 1, "*": 2, "/": 2}  # how strongly an operation binds
NUMBER_STRENGTH = 3  # a number never needs parentheses


@dataclass(frozen=True)
class Combined:
    """A number or a combination of numbers: its value, the expression, and the steps that lead to it."""

    value: int
    expression: str
    strength: int = NUMBER_STRENGTH
    steps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Countdown:
    """Reach a target number with given numbers, each used once; there are many right answers.

    Without `parentheses` every problem has a solution without them; a response may have them all the same.
    """

    numbers: Annotated[int, Option("how many numbers a problem has", 2, 6)] = 3
    largest: Annotated[int, Option("the largest of the numbers, which start at 1", 1, 999)] = 9
    operations: Annotated[str, Option("the operations that are allowed: one or more of + - * /")] = "+-*"
    largest_target: Annotated[int, Option("the largest target; the smallest is 0", 0, 9999)] = 99
    form: Annotated[CountdownForm, Option("the response: expression is `3*7-5`, steps is `3*7=21,21-5=16`")] = (
        "expression"
    )
    parentheses: Annotated[bool, Option("expression: whether some targets can only be reached with parentheses")] = (
        False
    )
    size: Annotated[int, Option("number of problems per epoch", 1, 10_000_000)] = 10_000
    seed: int = 0
    split: Split = "train"

    def __post_init__(self) -> None:
        for key, value, known in (("form", self.form, get_args(CountdownForm)), ("split", self.split, get_args(Split))):
            if value not in known:
                raise ValueError(f"countdown: {key} is {value!r}; it is one of {', '.join(known)}")
        for key, number, least in (
            ("numbers", self.numbers, 2),
            ("largest", self.largest, 1),
            ("largest_target", self.largest_target, 0),
            ("size", self.size, 1),
        ):
            if number < least:
                raise ValueError(f"countdown: {key} is {number}; it is at least {least}")
        if not self.operations or {*self.operations} - {*STRENGTH} or len({*self.operations}) < len(self.operations):
            raise ValueError(f"countdown: operations is {self.operations!r}; it has one or more of + - * /, each once")

    @property
    def name(self) -> str:
        """Return the form and how many numbers there are."""
        # The name is part of every seed: changing it changes every problem.
        return f"countdown/{self.form}-{self.numbers}" + "p" * self.parentheses

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Problem:
        check_index(index, self.size)
        for attempt in range(MAX_ATTEMPTS):  # rejection sampling until the target and the split are right
            rng = random.Random(derive_seed(self.name, self.seed, self.split, index, attempt))
            numbers = [rng.randint(1, self.largest) for _ in range(self.numbers)]
            reached = self._combine(rng, numbers)
            if reached is None or not 0 <= reached.value <= self.largest_target:
                continue
            # By the text: a held-out question may be in training with its numbers in another order.
            question = _question(numbers, reached.value)
            if split_of(question, TEST_ONE_IN) != self.split:
                continue
            # By the question, so that every epoch shows the same attempt.
            shown = self._combine(random.Random(derive_seed("attempt", self.seed, question)), numbers)
            if shown is not None:
                solution = shown.expression if self.form == "expression" else ",".join(shown.steps)
                answer = f"{question} {self.operations} {self.form}"
                return Problem(user(f"{question} "), answer, "countdown", self.name, solution=solution)
        raise ValueError(
            f"{self.name} has no {self.split} problem in {MAX_ATTEMPTS} attempts: raise largest, numbers or "
            "largest_target, or allow more operations"
        )

    def _combine(self, rng: random.Random, numbers: Sequence[int]) -> Combined | None:
        """Combine the numbers at random; None where that is not possible."""
        if self.form == "expression" and not self.parentheses:
            return self._write_down(rng, numbers)
        return self._join_up(rng, numbers)

    def _write_down(self, rng: random.Random, numbers: Sequence[int]) -> Combined | None:
        """Write the numbers in any order with any operations between them."""
        first, *others = rng.sample(numbers, len(numbers))
        text, total, term = str(first), 0, first  # the value is total + term
        for number in others:
            sign = rng.choice(self.operations)
            text += f"{sign}{number}"
            if STRENGTH[sign] == STRENGTH["+"]:
                total, term = total + term, number if sign == "+" else -number
            elif sign == "/" and term % number:
                return None
            else:
                term = term * number if sign == "*" else term // number
        return Combined(total + term, text)

    def _join_up(self, rng: random.Random, numbers: Sequence[int]) -> Combined | None:
        """Join two of the numbers at random until one is left."""
        left = [Combined(number, str(number)) for number in numbers]
        while len(left) > 1:
            choices = [
                (i, j, sign, value)
                for i, a in enumerate(left)
                for j, b in enumerate(left)
                for sign in self.operations
                if i != j and (value := self._value(a.value, sign, b.value)) is not None
            ]
            if not choices:
                return None
            i, j, sign, value = rng.choice(choices)
            joined = _join(left[i], sign, left[j], value)
            left = [each for place, each in enumerate(left) if place not in (i, j)] + [joined]
        return left[0]

    def _value(self, a: int, sign: str, b: int) -> int | None:
        """Return the value of an operation; None if it has none here."""
        if sign == "/":
            return a // b if b and a % b == 0 else None
        value = a + b if sign == "+" else a - b if sign == "-" else a * b
        # A step names its result, and the model knows no negative numbers. Inside an expression nobody writes them.
        return None if value < 0 and self.form == "steps" else value


def _question(numbers: Sequence[int], target: int) -> str:
    return f"{' '.join(map(str, numbers))}={target}"


def _join(a: Combined, sign: str, b: Combined, value: int) -> Combined:
    """Return the combination of two, with the parentheses that its expression needs."""
    strength = STRENGTH[sign]
    left = a.expression if a.strength >= strength else f"({a.expression})"
    bare = b.strength > strength or (b.strength == strength and sign in "+*")  # 7-(3-1) is not 7-3-1
    right = b.expression if bare else f"({b.expression})"
    steps = (*a.steps, *b.steps, f"{a.value}{sign}{b.value}={value}")
    return Combined(value, f"{left}{sign}{right}", strength, steps)
