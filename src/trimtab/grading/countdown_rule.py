"""The rule `countdown`: does a response reach the target with the given numbers, each used exactly once?

The ground truth is `3 7 5=16`, optionally followed by the operations that are allowed and the form of the response:
`3 7 5=16 +-* steps`. Without them all four operations are allowed, and the response is an expression.

    expression   3*7-5, with parentheses where wanted; a value inside it may be negative
    steps        3*7=21,21-5=16; each step takes two numbers that are still there and puts back its result

Numbers are written as in the ground truth, without signs: a step cannot have a negative result. Divisions must leave
no remainder. Spaces between numbers and signs are ignored; anything else in the response makes it wrong.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from trimtab.grading.verdicts import Verdict, make_verdict
from trimtab.text import shown

# A longer response is wrong without a look. The limit also bounds the values: 1,000 digits make no larger product.
MAX_CHARS = 1_000
MAX_DEPTH = 50  # of parentheses
OPERATIONS = "+-*/"
_NUMBER = "(?:0|[1-9][0-9]*)"  # not \d, which takes the digits of all scripts
_ANSWER = re.compile(rf"({_NUMBER}(?: +{_NUMBER})+) *= *({_NUMBER})(?: +([-+*/]+))?(?: +(expression|steps))?", re.ASCII)
_TOKEN = re.compile(r" *([0-9]+|.) *", re.DOTALL)  # a character that is not a sign becomes a token that nothing accepts
_STEP = re.compile(rf" *({_NUMBER}) *([-+*/]) *({_NUMBER}) *= *({_NUMBER}) *")
_STRENGTH = {"+": 1, "-": 1, "*": 2, "/": 2}


class _WrongError(Exception):
    """The response is not a solution."""


@dataclass(frozen=True)
class _Puzzle:
    numbers: list[str]  # as text: a response must write them alike
    target: str
    operations: str
    form: str


def grade_countdown(response: str, answer: str) -> Verdict:
    """Grade an expression or steps against `3 7 5=16 +-* steps`; operations and form may be left out."""
    found = _ANSWER.fullmatch(answer.strip())
    if found is None:  # a bad row of the data says nothing about the response
        wanted = "`3 7 5=16`, and after it, if wanted, the operations and the form: `3 7 5=16 +-* steps`"
        return Verdict("crashed", error=f"the answer {shown(answer)} is no countdown problem: it is written {wanted}")
    extracted = response.strip()
    if not extracted:
        return Verdict("no_answer")
    puzzle = _Puzzle(found[1].split(), found[2], found[3] or OPERATIONS, found[4] or "expression")
    try:
        solved = len(extracted) <= MAX_CHARS and (_steps_solve if puzzle.form == "steps" else _solves)(
            extracted, puzzle
        )
    except _WrongError:
        solved = False
    return make_verdict("correct" if solved else "wrong", extracted)


def _solves(text: str, puzzle: _Puzzle) -> bool:
    expression = _Expression(text, puzzle)
    value = expression.sum(1, MAX_DEPTH)
    return not expression.tokens and not expression.unused.total() and str(value) == puzzle.target


def _steps_solve(text: str, puzzle: _Puzzle) -> bool:
    available = Counter(puzzle.numbers)
    for step in text.split(","):
        found = _STEP.fullmatch(step)
        if found is None or found[2] not in puzzle.operations:
            return False
        left, sign, right, result = found.groups()
        available.subtract((left, right))
        if min(available[left], available[right]) < 0 or result != str(_apply(int(left), sign, int(right))):
            return False
        available[result] += 1
    return available.total() == 1 and available[puzzle.target] == 1


def _apply(left: int, sign: str, right: int) -> int:
    if sign == "/":
        if right == 0 or left % right:
            raise _WrongError
        return left // right
    return left + right if sign == "+" else left - right if sign == "-" else left * right


class _Expression:
    """Recursive descent over the tokens; it takes each number out of those that are unused."""

    def __init__(self, text: str, puzzle: _Puzzle) -> None:
        self.tokens = _TOKEN.findall(text)[::-1]  # the next one is the last
        self.unused = Counter(puzzle.numbers)
        self.operations = puzzle.operations

    def sum(self, least: int, depth: int) -> int:
        """Return the value of operands joined by operations that bind at least so strongly."""
        value = self.operand(depth)
        while self.tokens and self.tokens[-1] in self.operations and _STRENGTH[self.tokens[-1]] >= least:
            sign = self.tokens.pop()
            value = _apply(value, sign, self.sum(_STRENGTH[sign] + 1, depth))
        return value

    def operand(self, depth: int) -> int:
        """Return the value of a number or of a sum in parentheses."""
        token = self.tokens.pop() if self.tokens else ""
        if token == "(" and depth:
            value = self.sum(1, depth - 1)
            if not self.tokens or self.tokens.pop() != ")":
                raise _WrongError
            return value
        if not self.unused[token]:
            raise _WrongError
        self.unused[token] -= 1
        return int(token)
