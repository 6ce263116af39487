"""Puzzles: the rule `countdown`, and reasoning-gym's checkers, which get only answers and entries that pass a filter.

By `countdown` a response must reach the target with the given numbers, each used exactly once. The ground truth is
`3 7 5=16`, optionally followed by the operations that are allowed and the form of the response: `3 7 5=16 +-* steps`.
Without them all four operations are allowed, and the response is an expression.

    expression   3*7-5, with parentheses where wanted; a value inside it may be negative
    steps        3*7=21,21-5=16; each step takes two numbers that are still there and puts back its result

Numbers are written as in the ground truth, without signs: a step cannot have a negative result. Divisions must leave
no remainder. Spaces between numbers and signs are ignored; anything else in the response makes it wrong.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.data import gym_dataset
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
_NUMBERS = re.compile(r"[-0-9\s]*")  # the checker calls eval
_MOVES = re.compile(r"(?:\D|\d(?!\d)){0,1000}")  # R999999999 is a billion moves
# Some checkers run the answer as Python, can be made to work for hours, or take NaN for correct. For those only answers
# of the form that a correct one has are passed on; another is wrong. Kinds that no filter makes safe are in
# `trimtab.data.gym.UNSUITABLE`. Found by reading reasoning-gym 0.1.25.
ANSWER_FILTERS: Mapping[str, re.Pattern[str]] = {
    "binary_matrix": _NUMBERS,
    "coin_flip": re.compile(r"[0-9./, ]+(?:[eE]-[0-9]{1,2})?"),  # 1e999999999
    "complex_arithmetic": re.compile(r"[-+0-9.ij\s()]*"),  # nan
    "countdown": re.compile(r"(?:[-+0-9() ]|\*(?!\*)|/(?!/)){0,200}"),  # code, and 9**9**9
    "n_queens": re.compile(r"[Q_\s]*"),
    "number_sorting": re.compile(r"[-0-9.,\s\[\]'\"]*"),  # [NaN, NaN]
    "rubiks_cube": _MOVES,
    "rush_hour": _MOVES,
    "spiral_matrix": _NUMBERS,
    "string_insertion": re.compile(r"[A-Za-z]*"),
}
# The entry of a problem may come from a data file, and two checkers run a text of it as Python: where it is, and the
# form that reasoning-gym gives it.
ENTRY_FILTERS: Mapping[str, tuple[tuple[str, ...], re.Pattern[str]]] = {
    "bitwise_arithmetic": (
        ("metadata", "problem"),
        re.compile(r"(?:[-+() ]|\*(?!\*)|(?:<<|>>) 0x[0-3](?![0-9a-f])|0x[0-9a-f]{1,4}(?![0-9a-f]))*"),
    ),
    "number_sorting": (("answer",), ANSWER_FILTERS["number_sorting"]),
}


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


def gym_score(answer: str, kind: str, entry: Mapping[str, Any], options: Mapping[str, Any]) -> float | None:
    """Return the checker's score between 0 and 1; None if the checker failed."""
    checker = gym_dataset(kind, options)
    allowed = ANSWER_FILTERS.get(kind)
    if allowed and not allowed.fullmatch(answer):
        return 0.0
    if not _entry_is_safe(kind, entry):
        return None
    try:
        return float(checker.score_answer(answer, entry))
    except Exception:  # a third-party checker may raise anything
        return None


def _entry_is_safe(kind: str, entry: Mapping[str, Any]) -> bool:
    """Return whether the text of an entry that the checker runs, if any, has the form of reasoning-gym's own."""
    if kind not in ENTRY_FILTERS:
        return True
    names, allowed = ENTRY_FILTERS[kind]
    text: Any = entry
    for name in names:
        text = text.get(name) if isinstance(text, Mapping) else None
    return isinstance(text, str) and allowed.fullmatch(text) is not None
