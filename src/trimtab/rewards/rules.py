"""The rules by which a response is graded. A verdict says what was found and how it compares; it is not yet a reward.

No rule runs model output as code, and each takes time linear in the response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trimtab.rewards.extract import last_box, last_number, tidy, value
from trimtab.rewards.gym import gym_score
from trimtab.tasks import Problem

LONGEST_ANSWER = 10_000  # characters; a longer one is wrong unread
LONGEST_SHOWN = 1000

Kind = Literal["correct", "wrong", "no_answer", "crashed"]


@dataclass(frozen=True)
class Verdict:
    """How a response was graded, and the answer found in it (at most `LONGEST_SHOWN` characters of it).

    `crashed` means that the grader failed: it says nothing about the response.
    """

    kind: Kind
    extracted: str | None = None


def grade(response: str, answer: str, rule: str, extra: Mapping[str, Any] | None = None) -> Verdict:
    """The verdict on a response by a rule: `exact`, `number`, `boxed`, or `gym:KIND`.

    `extra` is the problem's: `gym:KIND` reads `entry` and `options` from it.
    """
    if rule.startswith("gym:"):
        return _gym(response, rule.removeprefix("gym:"), extra or {})
    if rule not in _GRADERS:
        raise ValueError(f"there is no rule {rule!r}; the rules are {', '.join(RULES)}")
    return _GRADERS[rule](response, answer)


def grade_many(pairs: Iterable[tuple[str, Problem]]) -> list[Verdict]:
    """The verdict on each (response, problem), by the problem's own rule."""
    return [grade(response, problem.answer, problem.rule, problem.extra) for response, problem in pairs]


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
    found = _box(response)
    if not found:
        return Verdict("no_answer")
    if len(found) > LONGEST_ANSWER:
        return _verdict(found, False)
    unboxed = last_box(answer)  # some data sets box their answers
    wanted = answer if unboxed is None else unboxed
    if tidy(found) == tidy(wanted):
        return _verdict(found, True)
    number = value(found)
    return _verdict(found, number is not None and number == value(wanted))


def _gym(response: str, kind: str, extra: Mapping[str, Any]) -> Verdict:
    if "entry" not in extra:
        raise ValueError(
            f"the rule gym:{kind} needs the problem's `extra` with `entry`: grade GymTask's problems by it"
        )
    found = _box(response)
    if not found:
        return Verdict("no_answer")
    if len(found) > LONGEST_ANSWER:
        return _verdict(found, False)
    score = gym_score(found, kind, extra["entry"], extra.get("options", {}))
    return Verdict("crashed", found[:LONGEST_SHOWN]) if score is None else _verdict(found, score >= 0.99)


def _box(response: str) -> str | None:
    found = last_box(response)
    return None if found is None else found.strip()


def _verdict(found: str, correct: bool) -> Verdict:
    return Verdict("correct" if correct else "wrong", found[:LONGEST_SHOWN])


_GRADERS: dict[str, Callable[[str, str], Verdict]] = {"exact": _exact, "number": _number, "boxed": _boxed}
RULES = (*_GRADERS, "gym:KIND")
