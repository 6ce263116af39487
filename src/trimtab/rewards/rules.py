"""The rules by which a response is graded.

No rule runs model output as code, extraction takes time linear in the response, and what could take long runs in a
worker within limits. No response makes a rule raise.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from trimtab.rewards import pool
from trimtab.rewards.extract import answer_box, answer_line, last_box, last_number, parse_number, tidy
from trimtab.rewards.gym_rule import gym_score
from trimtab.rewards.mathematics import grade_extracted, tokenize, unbox
from trimtab.rewards.pool import WorkerCall, WorkerResult
from trimtab.rewards.python_rule import CORRECT_SCORE, kind_of, python_call
from trimtab.rewards.verdicts import Verdict, make_verdict
from trimtab.tasks import Problem

MAX_ANSWER_CHARS = 10_000  # by `boxed` and `gym:KIND` a longer answer is wrong without a look
STRICT_BOX_CHARS = 100  # the end of a response that `strict-box` looks at

PendingVerdict = Verdict | Callable[[], Verdict]


def grade(response: str, answer: str, rule: str = "math", extra: Mapping[str, Any] | None = None) -> Verdict:
    """Grade a response against an answer by a rule; `docs/rewards.md` describes what each rule accepts.

    `extra` is the problem's: `gym:KIND` reads `entry` and `options` from it, `python:...` passes it to the function.
    """
    pending = submit(response, answer, rule, extra)
    return pending if isinstance(pending, Verdict) else pending()


def grade_many(pairs: Iterable[tuple[str, Problem]]) -> list[Verdict]:
    """Grade each (response, problem) by the problem's rule; verdicts come in the order of the pairs.

    Easy ones are decided at once. The rest run in workers side by side, short ones first, and equal ones once.
    """
    results = [_grade_or_defer(response, p.answer, p.rule, p.extra) for response, p in pairs]
    calls = [item for item in results if isinstance(item, WorkerCall)]
    pending: dict[str, Callable[[], Verdict]] = {}  # by repr: a call's arguments may hold dicts, which do not hash
    for call in sorted(calls, key=lambda call: len(repr(call.arguments))):
        if repr(call) not in pending:
            pending[repr(call)] = _start(call)
    return [item if isinstance(item, Verdict) else pending[repr(item)]() for item in results]


def submit(response: str, answer: str, rule: str = "math", extra: Mapping[str, Any] | None = None) -> PendingVerdict:
    """Return the verdict where it is decided at once, or a function that waits for it."""
    item = _grade_or_defer(response, answer, rule, extra)
    return item if isinstance(item, Verdict) else _start(item)


def check_rule(rule: str) -> None:
    """Raise an error that lists the rules where there is no such rule."""
    if rule not in _GRADERS and not re.fullmatch(r"gym:\S+|python:[\w.]+:\w+", rule):
        raise ValueError(f"there is no rule {rule!r}; the rules are {', '.join(RULES)}")


def _grade_or_defer(response: str, answer: str, rule: str, extra: Mapping[str, Any] | None) -> Verdict | WorkerCall:
    """Return the verdict with its seconds, or the worker call that decides it."""
    start = time.perf_counter()
    check_rule(rule)
    kind, _, name = rule.partition(":")
    if kind == "python":
        return python_call(name, response, answer, extra or {})
    item = _grade_gym(response, name, extra or {}) if kind == "gym" else _GRADERS[rule](response, answer)
    return replace(item, seconds=time.perf_counter() - start) if isinstance(item, Verdict) else item


def _start(call: WorkerCall) -> Callable[[], Verdict]:
    future = pool.submit_call(call.function, call.arguments, call.limits)
    return lambda: _worker_verdict(call, pool.wait(future, call.function))


def _worker_verdict(call: WorkerCall, result: WorkerResult) -> Verdict:
    """Return the verdict of a worker's result. A function that cannot be loaded is an error, not a verdict."""
    if result.outcome == "not_loaded":
        raise ValueError(f"the grading function {call.function} cannot be loaded: {result.error}")
    kind = result.outcome if result.outcome != "done" else kind_of(result.value)
    return replace(make_verdict(kind, call.extracted), seconds=result.seconds)


def _grade_exact(response: str, answer: str) -> Verdict:
    extracted = response.strip()
    return _right_or_wrong(extracted, extracted == answer.strip()) if extracted else Verdict("no_answer")


def _grade_number(response: str, answer: str) -> Verdict:
    truth = parse_number(answer)
    if truth is None:  # a bad row of the data says nothing about the response
        return Verdict("crashed")
    extracted = last_number(response)
    return _right_or_wrong(extracted, parse_number(extracted) == truth) if extracted else Verdict("no_answer")


def _grade_boxed(response: str, answer: str) -> Verdict:
    extracted = (last_box(response) or "").strip()
    if not extracted:
        return Verdict("no_answer")
    if len(extracted) > MAX_ANSWER_CHARS:
        return _right_or_wrong(extracted, False)
    truth = unbox(answer)
    if tidy(extracted) == tidy(truth):
        return _right_or_wrong(extracted, True)
    number = parse_number(extracted)
    return _right_or_wrong(extracted, number is not None and number == parse_number(truth))


def _grade_strict_box(response: str, answer: str) -> Verdict:
    """Grade as JustRL does: a box within the last 100 characters holds the answer, character by character."""
    extracted = last_box(response[-STRICT_BOX_CHARS:])  # a box that starts before that is cut off, so not found
    same = extracted is not None and extracted.strip() == unbox(answer).strip()
    return _right_or_wrong(extracted, same) if extracted else Verdict("no_answer")


def _grade_math(response: str, answer: str) -> Verdict | WorkerCall:
    extracted = (answer_box(response) or "").strip()
    return grade_extracted(extracted, answer) if extracted else Verdict("no_answer")


def _grade_dapo(response: str, answer: str) -> Verdict | WorkerCall:
    """Compare what follows the last `Answer:` as `math` does; of a box on that line, its content."""
    line = answer_line(response)
    extracted = (answer_box(line) or "").strip() if line and "boxed" in line else line
    return grade_extracted(extracted, answer) if extracted else Verdict("no_answer")


def _grade_choice(response: str, answer: str) -> Verdict:
    """Compare the letter in the last box, or without a box after the last `Answer:`; nothing else may be beside it."""
    box = answer_box(response)
    extracted = ((answer_line(response) if box is None else box) or "").strip()
    if not extracted:
        return Verdict("no_answer")
    letter, truth = _letter(extracted), _letter(unbox(answer))
    if truth is None:
        return make_verdict("crashed", extracted)
    if letter is None:
        letters = set(re.findall(r"\b[A-J]\b", extracted[:MAX_ANSWER_CHARS]))
        return make_verdict("ambiguous" if len(letters) > 1 else "wrong", extracted)
    return _right_or_wrong(extracted, letter == truth)


def _letter(text: str) -> str | None:
    r"""Return the letter of `A`, `(A)`, `A.` or `\text{(A)}`, else None."""
    if len(text) > 100:  # no option is written like this; the tokenizer is not run on long text
        return None
    written = "".join(token.text for token in tokenize(text)).strip()
    match = re.fullmatch(r"\{*\(?([A-Za-z])\)?\}*[.):]?", written)
    return match[1].upper() if match else None


def _grade_gym(response: str, kind: str, extra: Mapping[str, Any]) -> Verdict:
    if "entry" not in extra:
        raise ValueError(f"the rule gym:{kind} needs the problem's `extra` with `entry`: use it for GymTask's problems")
    extracted = (last_box(response) or "").strip()
    if not extracted:
        return Verdict("no_answer")
    if len(extracted) > MAX_ANSWER_CHARS:
        return _right_or_wrong(extracted, False)
    score = gym_score(extracted, kind, extra["entry"], extra.get("options", {}))
    return make_verdict("crashed", extracted) if score is None else _right_or_wrong(extracted, score >= CORRECT_SCORE)


def _right_or_wrong(extracted: str, correct: bool) -> Verdict:
    return make_verdict("correct" if correct else "wrong", extracted)


_GRADERS: dict[str, Callable[[str, str], Verdict | WorkerCall]] = {
    "math": _grade_math,
    "strict-box": _grade_strict_box,
    "dapo": _grade_dapo,
    "choice": _grade_choice,
    "number": _grade_number,
    "boxed": _grade_boxed,
    "exact": _grade_exact,
}
RULES = (*_GRADERS, "gym:KIND", "python:MODULE:FUNCTION")
