"""The figures of an evaluation: avg@k, pass@k, maj@k, lengths and failures, each with its interval by question.

A sample that could not be drawn or could not be graded is counted apart: it is no wrong answer. A question with no
graded sample left counts in no mean, and is counted too.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from trimtab.evaluate.intervals import Interval, difference_interval, mean_interval, share_interval

GRADER_FAILURES = ("too_costly", "crashed")  # kinds of verdict that say nothing about the response


@dataclass(frozen=True)
class Sample:
    """One response as the figures see it. Without a `kind` it could not be drawn."""

    question: str
    kind: str | None
    extracted: str | None = None
    tokens: float | None = None
    finished: bool = True
    entropy: float | None = None
    logp: float | None = None

    @property
    def graded(self) -> bool:
        """Whether there is a verdict about the response."""
        return self.kind is not None and self.kind not in GRADER_FAILURES

    @property
    def correct(self) -> bool:
        """Whether the answer is right."""
        return self.kind == "correct"


@dataclass(frozen=True)
class Figures:
    """What is reported for one benchmark. Intervals are over its questions."""

    questions: int
    samples: int  # asked for, per question
    average: Interval | None  # avg@k
    pass_at: dict[int, Interval]
    majority: Interval | None  # maj@k
    length: Interval | None  # tokens
    truncated: Interval | None
    no_answer: Interval | None
    entropy: Interval | None  # nats per token
    surprisal: Interval | None  # mean negative log-probability per token
    kinds: dict[str, int]
    failed_samples: int
    grader_failures: int
    questions_without_samples: int
    average_if_failures_wrong: float | None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        plain = asdict(self)
        plain["pass_at"] = {str(k): value for k, value in plain["pass_at"].items()}
        return plain


def figures(samples: Iterable[Sample], asked: int) -> Figures:
    """The figures of one benchmark from its samples, `asked` of them per question."""
    drawn = list(samples)
    groups = by_question(drawn)
    graded = {name: [s for s in group if s.graded] for name, group in groups.items()}
    graded = {name: group for name, group in graded.items() if group}
    kinds = Counter(sample.kind for sample in drawn if sample.kind is not None)
    failed = sum(sample.kind is None for sample in drawn)
    lost = sum(kinds[kind] for kind in GRADER_FAILURES)
    worst = [math.fsum(s.correct for s in group) / len(group) for group in groups.values()]
    return Figures(
        questions=len(groups),
        samples=asked,
        average=share_interval([_share(group, lambda s: s.correct) for group in graded.values()]),
        pass_at=_pass_at(graded, asked),
        majority=share_interval([majority(group) for group in graded.values()]),
        length=mean_interval(_means(groups, lambda s: s.tokens)),
        truncated=share_interval([_share(g, lambda s: not s.finished) for g in _drawn(groups)]),
        no_answer=share_interval([_share(group, lambda s: s.kind == "no_answer") for group in graded.values()]),
        entropy=mean_interval(_means(groups, lambda s: s.entropy)),
        surprisal=mean_interval(_means(groups, lambda s: None if s.logp is None else -s.logp)),
        kinds=dict(sorted(kinds.items())),
        failed_samples=failed,
        grader_failures=lost,
        questions_without_samples=len(groups) - len(graded),
        average_if_failures_wrong=math.fsum(worst) / len(worst) if worst and failed + lost else None,
    )


def paired_difference(ours: Iterable[Sample], theirs: Iterable[Sample]) -> Interval | None:
    """The difference in avg@k over the questions that both have answered; None where there are none."""
    mine, other = (_accuracies(samples) for samples in (ours, theirs))
    both = sorted(mine.keys() & other.keys())
    return difference_interval([mine[name] for name in both], [other[name] for name in both])


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The chance that k of n samples, drawn without putting back, hold a right one: 1 - C(n-c, k) / C(n, k).

    Whole numbers until the last division, so it is exact for any n.
    """
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {correct} right among {n} samples: k goes from 1 to n, and 0 to n can be right")
    return float(1 - Fraction(math.comb(n - correct, k), math.comb(n, k)))


def majority(samples: Sequence[Sample]) -> float:
    """Whether the most frequent answer is right; on a tie the expected value of choosing among the tied.

    Answers that read the same are one. A response without an answer has no vote, and without votes nothing wins.
    """
    votes: dict[str, list[bool]] = defaultdict(list)
    for sample in samples:
        if sample.extracted is not None and sample.kind != "no_answer":
            votes[same_answer(sample.extracted)].append(sample.correct)
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    tied = [right for right in votes.values() if len(right) == most]
    return math.fsum(sum(right) / most for right in tied) / len(tied)


def same_answer(text: str) -> str:
    r"""An answer in the spelling that votes are counted by: without LaTeX's spacing and sizing, `$`, a last stop."""
    text = re.sub(
        r"\\(?:left|right|displaystyle|[,!;: ])", "", text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    )
    return re.sub(r"[\s$]+", "", text).rstrip(".").casefold()


def by_question(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Samples grouped by question, in the order in which questions first come."""
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.question].append(sample)
    return dict(groups)


def _pass_at(graded: dict[str, list[Sample]], asked: int) -> dict[int, Interval]:
    """pass@k for the powers of two up to the samples asked for, over the questions with that many graded."""
    found = {}
    for k in [*(2**power for power in range(asked.bit_length()) if 2**power < asked), asked]:
        values = [pass_at_k(len(g), sum(s.correct for s in g), k) for g in graded.values() if len(g) >= k]
        interval = share_interval(values)
        if interval is not None:
            found[k] = interval
    return found


def _accuracies(samples: Iterable[Sample]) -> dict[str, float]:
    graded = by_question(sample for sample in samples if sample.graded)
    return {name: _share(group, lambda s: s.correct) for name, group in graded.items()}


def _drawn(groups: dict[str, list[Sample]]) -> list[list[Sample]]:
    drawn = [[s for s in group if s.kind is not None] for group in groups.values()]
    return [group for group in drawn if group]


def _share(samples: Sequence[Sample], true: Callable[[Sample], bool]) -> float:
    return sum(map(true, samples)) / len(samples)


def _means(groups: dict[str, list[Sample]], value: Callable[[Sample], float | None]) -> list[float]:
    """A mean per question, over the samples that have the value."""
    known = [[v for s in group if (v := value(s)) is not None] for group in groups.values()]
    return [math.fsum(values) / len(values) for values in known if values]
