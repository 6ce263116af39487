"""The verdict of a grader, and what a rule of one's own may return in its place.

A verdict is not yet a reward: a recipe maps each kind of verdict to one, unless the verdict carries a number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, get_args

from trimtab.data import Sample
from trimtab.text import printable, shorten, shown
from trimtab.workers import WorkerLimits

MAX_EXTRACTED_CHARS = 1000  # of an answer that a verdict keeps
CORRECT_SCORE = 0.99  # a number of at least this counts as correct

VerdictKind = Literal["correct", "wrong", "no_answer", "ambiguous", "too_costly", "crashed"]
VERDICT_KINDS: tuple[VerdictKind, ...] = get_args(VerdictKind)
LARGEST_SCORE = 1e30  # beyond it, sums of squares overflow in float32
SCORE = f"a finite number of at most {LARGEST_SCORE:g}"
RETURNS = f"True or False, {SCORE}, one of {', '.join(VERDICT_KINDS)}, or a Verdict"
MAX_ERRORS = 20  # of one step that are kept
MAX_EXCERPT = 200  # characters of a response that an error names


@dataclass(frozen=True)
class Verdict:
    """How a response was graded, the answer extracted from it (shortened), and the seconds it took.

    `no_answer`: the rule found no answer. `ambiguous`: several answers although one was wanted. `too_costly`: comparing
    the answer exceeds the limits. `crashed`: the grader failed, which says nothing about the response; `error` says
    how. A `score` is the reward in place of the one that a recipe gives to the kind.
    """

    kind: VerdictKind
    extracted: str | None = None
    seconds: float = field(default=0.0, compare=False)
    score: float | None = None
    error: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        # Rules of users make verdicts too, and one that is none must not get further than here.
        if self.kind not in VERDICT_KINDS:
            raise ValueError(
                f"the kind of a verdict is {shown(self.kind)}; it must be one of {', '.join(VERDICT_KINDS)}"
            )
        if self.score is not None and not is_score(self.score):
            raise ValueError(f"the score of a verdict is {shown(self.score)}; it must be {SCORE}, or None")

    def as_row(self) -> dict[str, Any]:
        """Return the verdict as a JSON object."""
        row = {"kind": self.kind, "extracted": self.extracted, "seconds": round(self.seconds, 6)}
        row |= {} if self.score is None else {"score": self.score}
        return row | ({"error": self.error} if self.error else {})

    @property
    def value(self) -> float:
        """The number that a rule stands for: its score, else 1 for a correct response and 0 for any other."""
        return float(self.kind == "correct") if self.score is None else self.score


@dataclass(frozen=True)
class WorkerCall:
    """A call `function(*arguments, **keywords)` for a worker; `extracted` is the answer that it grades."""

    function: str
    arguments: tuple[Any, ...]
    extracted: str | None = None
    limits: WorkerLimits = field(default_factory=WorkerLimits)
    keywords: Mapping[str, Any] = field(default_factory=dict)


def make_verdict(kind: VerdictKind, extracted: str | None = None) -> Verdict:
    """Return a verdict that keeps the first `MAX_EXTRACTED_CHARS` characters of the answer."""
    return Verdict(kind, None if extracted is None else extracted[:MAX_EXTRACTED_CHARS])


def verdict_of(value: object) -> Verdict:
    """Return the verdict that the result of a user's rule stands for; ValueError if it stands for none."""
    value = _python_number(value)
    if isinstance(value, Verdict):
        return value
    if isinstance(value, bool):
        return Verdict("correct" if value else "wrong")
    if is_score(value):
        score = float(value)  # type: ignore[arg-type]
        return Verdict("correct" if score >= CORRECT_SCORE else "wrong", score=score)
    if isinstance(value, str) and value in VERDICT_KINDS:
        return Verdict(value)
    if isinstance(value, Mapping) and "kind" in value and not value.keys() - {"kind", "score", "extracted"}:
        return Verdict(value["kind"], _text(value.get("extracted")), score=_python_number(value.get("score")))
    raise ValueError(f"{shown(value)} is no verdict: return {RETURNS}")


def verdict_or_crash(value: object, who: str, sample: Sample) -> Verdict:
    """Return the verdict that a result stands for; of one that stands for none, a crash of `who` gave it."""
    try:
        return verdict_of(value)
    except ValueError as error:
        return Verdict("crashed", error=f"{who}{sample.named}: {error}")


def plain_result(value: object) -> Any:
    """Return the result of a user's rule in a form that JSON can hold; for `json.dumps(default=...)`."""
    if isinstance(value, Verdict):
        return {"kind": value.kind, "score": value.score, "extracted": value.extracted}
    if hasattr(value, "tolist"):  # numbers and arrays of NumPy and torch
        return value.tolist()
    raise TypeError(f"{shown(value)} is no verdict: return {RETURNS}")


def _python_number(value: Any) -> Any:
    """Return the Python value of a NumPy or torch scalar; other values as they are."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def is_score(value: object) -> bool:
    """Return whether a value is a number that a reward can be."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return abs(float(value)) <= LARGEST_SCORE  # false for NaN
    except OverflowError:  # an integer of a thousand digits
        return False


def _text(value: object) -> str | None:
    return None if value is None else str(value)[:MAX_EXTRACTED_CHARS]


@dataclass
class RuleErrors:
    """The errors of rules since they were last taken: of equal ones the first, and how often there were such."""

    found: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)

    def add(self, rule: str, verdict: Verdict, sample: Sample, what: str = "rule") -> None:
        """Add a verdict that has an error, or that the rule failed to give; `what` it is that is called `rule`."""
        if verdict.kind != "crashed" and not verdict.error:
            return
        error = verdict.error or f"the rule {rule} failed on the answer {shorten(sample.problem.answer)!r}"
        # By the last line: that is the exception, and its message may quote the response.
        key = rule, error.splitlines()[-1].partition(":")[0]
        if key in self.found:
            self.found[key]["count"] += 1
        elif len(self.found) < MAX_ERRORS:
            where = {"location": sample.problem.location, "answer": shorten(sample.problem.answer, MAX_EXCERPT)}
            text = {"response": shorten(sample.text, MAX_EXCERPT), "error": error}
            self.found[key] = {"rule": rule, "what": what, "count": 1, "kind": verdict.kind, **where, **text}

    @staticmethod
    def merged(parts: Iterable[RuleErrors]) -> RuleErrors:
        """Return the errors of several processes as those of one."""
        merged = RuleErrors()
        for key, record in (item for part in parts for item in part.found.items()):
            if key in merged.found:
                merged.found[key]["count"] += record["count"]
            elif len(merged.found) < MAX_ERRORS:
                merged.found[key] = record
        return merged

    def take(self, step: int) -> list[dict[str, Any]]:
        """Return the errors as records of a step, and forget them."""
        taken = [{"step": step, **record} for record in self.found.values()]
        self.found = {}
        return taken


def describe_error(record: Mapping[str, Any], path: object) -> str:
    """Return a message that shows an error of a rule in full."""
    where = f"{record['location']}, " if record["location"] else ""
    return (
        f"warning: step {record['step']}: the {record['what']} {record['rule']} failed on {record['count']} "
        f"{'rollouts' if record['what'] == 'agent' else 'responses'}; the first: "
        f"{where}{json.dumps(record['response'])}\n{printable(record['error'])}\nFurther errors are in {path}"
    )


def crashed_diagnosis(share: float, steps: int, path: object, who: str = "the rules", error: str = "") -> str:
    """Explain why a run ends whose rules fail on most responses of some steps; of 0 steps: on held-out problems.

    `who` has failed, if not rules, with the last line of `error`.
    """
    when = "this step" if steps == 1 else f"each of the last {steps} steps"
    what = f"responses in {when}" if steps else "held-out problems"
    said = f" ({shorten(error.strip().splitlines()[-1], MAX_EXCERPT)})" if error.strip() else ""
    return f"{who} failed on {share:.0%} of the {what}{said}: nothing can be learnt from that. See {path}"


FACTS = ("prompt", "source", "tokens", "finished")


def facts(sample: Sample) -> dict[str, Any]:
    """Return what rules get of a sample by name; `tokens`, its length, and `finished` are None if they are unknown."""
    problem, response = sample.problem, sample.response
    return {
        "response": sample.text,
        "answer": problem.answer,
        "extra": problem.extra,
        "prompt": [dict(message) for message in problem.prompt],
        "source": problem.source,
        "tokens": None if response is None else response.num_sampled,
        "finished": None if response is None else response.finished,
    }
