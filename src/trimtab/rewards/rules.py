"""The rules by which a response is graded. A verdict says what was found and how it compares; it is not yet a reward.

No rule runs model output as code, extraction takes time linear in the response, and what could take long is done by a
worker within limits. No response makes a rule raise.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from trimtab.rewards import pool
from trimtab.rewards.extract import answer_box, answer_line, last_box, last_number, tidy, value
from trimtab.rewards.gym_rule import gym_score
from trimtab.rewards.math_rule import Question, judge, unboxed
from trimtab.rewards.mathematics.latex import tokens
from trimtab.rewards.python_rule import own_question, own_verdict
from trimtab.rewards.verdicts import LONGEST_SHOWN, VERDICT_KINDS, Verdict, VerdictKind, verdict
from trimtab.tasks import Problem

__all__ = [
    "LONGEST_SHOWN",
    "RULES",
    "VERDICT_KINDS",
    "Verdict",
    "VerdictKind",
    "check_rule",
    "grade",
    "grade_many",
    "submit",
]

LONGEST_ANSWER = 10_000  # characters; by `boxed` and `gym:KIND` a longer one is wrong unread
LAST_CHARACTERS = 100  # where `strict-box` looks

Pending = Verdict | Callable[[], Verdict]


def grade(response: str, answer: str, rule: str = "math", extra: Mapping[str, Any] | None = None) -> Verdict:
    """The verdict on a response: is it the answer, by this rule? `docs/rewards.md` says what each rule accepts.

    `extra` is the problem's: `gym:KIND` reads `entry` and `options` from it, `python:...` hands it to the function.
    """
    pending = submit(response, answer, rule, extra)
    return pending if isinstance(pending, Verdict) else pending()


def grade_many(pairs: Iterable[tuple[str, Problem]]) -> list[Verdict]:
    """The verdict on each (response, problem), by the problem's own rule, in order.

    What is easy is decided at once. The rest is worked on side by side, short ones first, and each question once.
    """
    begun = [_timed(response, p.answer, p.rule, p.extra) for response, p in pairs]
    asked: dict[str, Callable[[], Verdict]] = {}
    questions = sorted(
        (item for item in begun if isinstance(item, Question)), key=lambda item: len(repr(item.arguments))
    )
    for question in questions:
        if repr(question) not in asked:
            asked[repr(question)] = _ask(question)
    return [item if isinstance(item, Verdict) else asked[repr(item)]() for item in begun]


def submit(response: str, answer: str, rule: str = "math", extra: Mapping[str, Any] | None = None) -> Pending:
    """The verdict where it is known at once, or a function that waits for it."""
    item = _timed(response, answer, rule, extra)
    return item if isinstance(item, Verdict) else _ask(item)


def check_rule(rule: str) -> None:
    """Raise an error that lists the rules where there is no such rule."""
    if rule not in _GRADERS and not re.fullmatch(r"gym:\S+|python:[\w.]+:\w+", rule):
        raise ValueError(f"there is no rule {rule!r}; the rules are {', '.join(RULES)}")


def begin(response: str, answer: str, rule: str, extra: Mapping[str, Any] | None = None) -> Verdict | Question:
    """The verdict, or the question that a worker has to answer for it."""
    check_rule(rule)
    kind, _, name = rule.partition(":")
    if kind == "gym":
        return _gym(response, name, extra or {})
    if kind == "python":
        return own_question(name, response, answer, extra or {})
    return _GRADERS[rule](response, answer)


def _timed(response: str, answer: str, rule: str, extra: Mapping[str, Any] | None) -> Verdict | Question:
    start = time.perf_counter()
    item = begin(response, answer, rule, extra)
    return replace(item, seconds=time.perf_counter() - start) if isinstance(item, Verdict) else item


def _ask(question: Question) -> Callable[[], Verdict]:
    future: Future[pool.Result] = pool.ask(question.function, question.arguments, question.limits)
    return lambda: own_verdict(pool.wait(future, question.function), question.function, question.found)


def _exact(response: str, answer: str) -> Verdict:
    found = response.strip()
    return _verdict(found, found == answer.strip()) if found else Verdict("no_answer")


def _number(response: str, answer: str) -> Verdict:
    wanted = value(answer)
    if wanted is None:
        return Verdict("crashed")
    found = last_number(response)
    return _verdict(found, value(found) == wanted) if found else Verdict("no_answer")


def _boxed(response: str, answer: str) -> Verdict:
    found = _stripped(last_box(response))
    if not found:
        return Verdict("no_answer")
    if len(found) > LONGEST_ANSWER:
        return _verdict(found, False)
    wanted = unboxed(answer)
    if tidy(found) == tidy(wanted):
        return _verdict(found, True)
    number = value(found)
    return _verdict(found, number is not None and number == value(wanted))


def _strict_box(response: str, answer: str) -> Verdict:
    """JustRL's: the last box within the last 100 characters holds the answer, character by character."""
    found = last_box(response[-LAST_CHARACTERS:])
    return _verdict(found, found.strip() == unboxed(answer).strip()) if found else Verdict("no_answer")


def _math(response: str, answer: str) -> Verdict | Question:
    found = _stripped(answer_box(response))
    return judge(found, answer) if found else Verdict("no_answer")


def _dapo(response: str, answer: str) -> Verdict | Question:
    """What stands behind the last `Answer:`, compared as `math` does; a box on that line is looked into."""
    line = answer_line(response)
    box = _stripped(answer_box(line)) if line and "boxed" in line else line
    return judge(box, answer) if box else Verdict("no_answer")


def _choice(response: str, answer: str) -> Verdict:
    """The letter in the last box, or without a box behind the last `Answer:`, and nothing beside it."""
    box = answer_box(response)
    found = _stripped(answer_line(response) if box is None else box)
    if not found:
        return Verdict("no_answer")
    letter, wanted = _letter(found), _letter(unboxed(answer))
    if wanted is None:
        return Verdict("crashed", found[:LONGEST_SHOWN])
    if letter is None:
        return verdict(
            "ambiguous" if len(set(re.findall(r"\b[A-J]\b", found[:LONGEST_ANSWER]))) > 1 else "wrong", found
        )
    return _verdict(found, letter == wanted)


def _letter(text: str) -> str | None:
    r"""The letter that `A`, `(A)`, `A.` or `\text{(A)}` is."""
    if len(text) > 100:
        return None
    written = "".join(token.text for token in tokens(text)).strip()
    match = re.fullmatch(r"\{*\(?([A-Za-z])\)?\}*[.):]?", written)
    return match[1].upper() if match else None


def _gym(response: str, kind: str, extra: Mapping[str, Any]) -> Verdict:
    if "entry" not in extra:
        raise ValueError(
            f"the rule gym:{kind} needs the problem's `extra` with `entry`: grade GymTask's problems by it"
        )
    found = _stripped(last_box(response))
    if not found:
        return Verdict("no_answer")
    if len(found) > LONGEST_ANSWER:
        return _verdict(found, False)
    score = gym_score(found, kind, extra["entry"], extra.get("options", {}))
    return verdict("crashed", found) if score is None else _verdict(found, score >= 0.99)


def _stripped(found: str | None) -> str | None:
    return None if found is None else found.strip()


def _verdict(found: str, correct: bool) -> Verdict:
    return verdict("correct" if correct else "wrong", found)


_GRADERS: dict[str, Callable[[str, str], Verdict | Question]] = {
    "math": _math,
    "strict-box": _strict_box,
    "dapo": _dapo,
    "choice": _choice,
    "number": _number,
    "boxed": _boxed,
    "exact": _exact,
}
RULES = (*_GRADERS, "gym:KIND", "python:MODULE:FUNCTION")
