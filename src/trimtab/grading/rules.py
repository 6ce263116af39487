"""The rules by which a response is graded.

No rule runs model output as code, extraction takes time linear in the response, and what could take long runs in a
worker within limits. No response makes a rule raise.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from trimtab import own_parts
from trimtab.data import Problem, Sample
from trimtab.grading.extract import answer_box, answer_boxes, answer_line, last_box, last_number, parse_number, tidy
from trimtab.grading.http_rule import HttpRule
from trimtab.grading.mathematics import asks_for_several, grade_extracted, tokenize, unbox
from trimtab.grading.puzzle_rules import grade_countdown, gym_score
from trimtab.grading.python_rule import DeferredCall, PythonRule, load_python_rule
from trimtab.grading.response_rules import RESPONSE_RULES, FormatRule, LanguageRule, LengthRule, make_rule
from trimtab.grading.verdicts import CORRECT_SCORE, Verdict, WorkerCall, make_verdict, verdict_of
from trimtab.text import shown
from trimtab.workers import WorkerResult, result_of, submit_call

MAX_ANSWER_CHARS = 10_000  # by `boxed` and `gym:KIND` a longer answer is wrong without a look
STRICT_BOX_CHARS = 100  # the end of a response that `strict-box` looks at

BatchRule = PythonRule | HttpRule | FormatRule | LengthRule | LanguageRule  # they grade a list of responses


def grade(response: str, answer: str, rule: str = "math", extra: Mapping[str, Any] | None = None) -> Verdict:
    """Grade a response against an answer by a rule; `docs/rewards.md` describes what each rule accepts.

    `extra` is the problem's: `gym:KIND` reads `entry` and `options` from it, `python:...` passes it to the function.
    """
    return grade_samples([Sample(Problem((), answer, rule, "", extra=extra or {}), response)])[0]


def grade_many(pairs: Iterable[tuple[str, Problem]]) -> list[Verdict]:
    """Grade each (response, problem) by the problem's rule; verdicts come in the order of the pairs."""
    return grade_samples([Sample(problem, text) for text, problem in pairs])


def grade_samples(
    samples: Sequence[Sample], rule: str | None = None, options: Mapping[str, Any] | None = None
) -> list[Verdict]:
    """Grade each sample by its problem's rule, or all by one; verdicts come in the order of the samples."""
    return start_grading(samples, rule, options)()


def start_grading(
    samples: Sequence[Sample], rule: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[[], list[Verdict]]:
    """Begin to grade each sample by its problem's rule, or all by one; return a function that waits for the verdicts.

    Easy ones are decided at once. The rest run in workers side by side, short ones first, and equal ones once.
    """
    by_rule: dict[str, list[int]] = {}
    for row, sample in enumerate(samples):
        by_rule.setdefault(rule or sample.problem.rule, []).append(row)
    verdicts: dict[int, Verdict] = {}
    deferred: list[DeferredCall] = []
    batches: list[tuple[BatchRule, list[int]]] = []
    for name, rows in by_rule.items():
        loaded = load_rule(name, options)
        if isinstance(loaded, PythonRule) and not loaded.call.in_process:
            deferred += loaded.worker_calls(samples, rows)
        elif loaded is not None:
            batches.append((loaded, rows))
        else:
            for row in rows:
                decided = _grade_or_defer(samples[row], name)
                if isinstance(decided, Verdict):
                    verdicts[row] = decided
                else:
                    deferred.append((decided, [row], _one_verdict(decided)))
    pending = _start_all(deferred)
    for batch_rule, rows in batches:  # meanwhile the workers work
        verdicts |= zip(rows, batch_rule.grade_here([samples[row] for row in rows]), strict=True)

    def finish() -> list[Verdict]:
        for call, graded, read in deferred:
            verdicts.update(zip(graded, read(_loaded_result(call, pending[repr(call)])), strict=True))
        return [verdicts[row] for row in range(len(samples))]

    return finish


def check_rule(rule: str) -> None:
    """Raise an error that lists the rules if there is no such rule; nothing is loaded."""
    if rule not in _GRADERS and not re.fullmatch(rf"gym:\S+|{own_parts.PATTERN}|https?://\S+", rule):
        raise ValueError(f"there is no rule {shown(rule)}; the rules are {', '.join(RULES)}")


def load_rule(rule: str, options: Mapping[str, Any] | None = None) -> BatchRule | None:
    """Load a rule that is not one of the built-in ones, with its options; None for those, which have none."""
    given = dict(options or {})
    if rule in RESPONSE_RULES:
        made: BatchRule = make_rule(rule, RESPONSE_RULES[rule], given)
        return made
    check_rule(rule)
    if own_parts.is_own(rule):
        return load_python_rule(rule, given)
    if rule.startswith(("http://", "https://")):
        service: HttpRule = make_rule("over HTTP", HttpRule, given, rule)
        return service
    if given:
        raise ValueError(f"the rule {rule} has no option {shown(next(iter(given)))}: it has none")
    return None


def _grade_or_defer(sample: Sample, rule: str) -> Verdict | WorkerCall:
    """Return the verdict of a built-in rule with its seconds, or the worker call that decides it."""
    start = time.perf_counter()
    kind, _, name = rule.partition(":")
    text, problem = sample.text, sample.problem
    decided = _grade_gym(text, name, problem.extra) if kind == "gym" else _GRADERS[rule](text, problem.answer)
    return replace(decided, seconds=time.perf_counter() - start) if isinstance(decided, Verdict) else decided


def _start_all(deferred: Sequence[DeferredCall]) -> dict[str, Future[WorkerResult]]:
    """Start every call once, short ones first; return the futures by the calls' repr."""
    pending: dict[str, Future[WorkerResult]] = {}  # by repr: a call's arguments may hold dicts, which do not hash
    for call in sorted((call for call, _, _ in deferred), key=lambda call: len(repr(call.arguments))):
        if repr(call) not in pending:
            pending[repr(call)] = submit_call(call.function, call.arguments, call.limits, call.keywords)
    return pending


def _loaded_result(call: WorkerCall, future: Future[WorkerResult]) -> WorkerResult:
    """Wait for the result of a call. A function that cannot be loaded is an error, not a verdict."""
    result = result_of(future, call.function)
    if result.outcome == "not_loaded":
        name = call.function.partition(f"@{own_parts.PREFIX}")[2] or call.function
        why = result.error.removeprefix(f"{own_parts.PREFIX}{name}: ")
        raise ValueError(f"the grading function {name} cannot be loaded: {why}")
    return result


def _one_verdict(call: WorkerCall) -> Callable[[WorkerResult], Sequence[Verdict]]:
    """Return the reader of a built-in rule's call, which grades one response."""

    def read(result: WorkerResult) -> list[Verdict]:
        kind = verdict_of(result.value if result.outcome == "done" else result.outcome).kind
        return [replace(make_verdict(kind, call.extracted), seconds=result.seconds, error=result.error)]

    return read


def _grade_exact(response: str, answer: str) -> Verdict:
    extracted = response.strip()
    return _right_or_wrong(extracted, extracted == answer.strip()) if extracted else Verdict("no_answer")


def _grade_number(response: str, answer: str) -> Verdict:
    truth = parse_number(answer)
    if truth is None:  # a bad row of the data says nothing about the response
        return Verdict("crashed", error=f"the answer {shown(answer)} is no number")
    extracted = last_number(response)
    return _right_or_wrong(extracted, parse_number(extracted) == truth) if extracted else Verdict("no_answer")


def _grade_boxed(response: str, answer: str) -> Verdict:
    extracted = (answer_box(response) or "").strip()
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
    extracted = _boxed_answer(response, answer)
    return grade_extracted(extracted, answer) if extracted else Verdict("no_answer")


def _boxed_answer(response: str, answer: str) -> str:
    """Return the content of the last box, or if the truth has several members, of all boxes that stand in one row."""
    box = answer_box(response)
    # The cheap questions first: most truths are one number, and most responses have one box.
    if box is not None and not answer.isalnum() and response.count("\\boxed") > 1 and asks_for_several(answer):
        box = answer_boxes(response)
    return (box or "").strip()


def _grade_dapo(response: str, answer: str) -> Verdict | WorkerCall:
    """Compare what follows the last `Answer:` as `math` does; of a box on that line, its content."""
    line = answer_line(response)
    extracted = _boxed_answer(line, answer) if line and "boxed" in line else line
    return grade_extracted(extracted, answer) if extracted else Verdict("no_answer")


def _grade_choice(response: str, answer: str) -> Verdict:
    """Compare the letter in the last box, or without a box after the last `Answer:`; nothing else may be beside it."""
    box = answer_box(response)
    extracted = ((answer_line(response) if box is None else box) or "").strip()
    if not extracted:
        return Verdict("no_answer")
    letter, truth = _letter(extracted), _letter(unbox(answer))
    if truth is None:
        return replace(make_verdict("crashed", extracted), error=f"the answer {shown(answer)} is no letter")
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
    extracted = (answer_box(response) or "").strip()
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
    "countdown": grade_countdown,
}
RULES = (*_GRADERS, "gym:KIND", "python:MODULE:FUNCTION", "http://HOST/PATH")
