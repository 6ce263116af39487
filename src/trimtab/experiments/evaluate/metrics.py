"""The metrics of a benchmark: avg@k, pass@k, maj@k, lengths and failures, each with its interval over problems.

A sample that could not be generated or graded is not a wrong answer; it is counted separately. A problem without any
graded sample is in no mean, and is counted too.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from trimtab.experiments.evaluate.folder import Generation
from trimtab.experiments.intervals import Interval, difference_interval, mean_interval, score_interval, share_interval
from trimtab.grading import Verdict

GRADER_FAILURES = ("too_costly", "crashed")  # kinds of verdict that say nothing about the response


@dataclass(frozen=True)
class GradedSample:
    """A sample with its verdict; without one if it could not be generated."""

    generation: Generation
    verdict: Verdict | None

    @property
    def kind(self) -> str | None:
        """Return the kind of its verdict; None without one."""
        return self.verdict.kind if self.verdict else None

    @property
    def score(self) -> float | None:
        """Return the number that the rule gave, if it gives any."""
        return self.verdict.score if self.verdict else None

    @property
    def graded(self) -> bool:
        """Return whether there is a verdict about the response."""
        return self.kind is not None and self.kind not in GRADER_FAILURES

    @property
    def correct(self) -> bool:
        """Return whether the answer is correct."""
        return self.kind == "correct"


@dataclass(frozen=True)
class BenchmarkMetrics:
    """The metrics of one benchmark. Intervals are over its problems."""

    problems: int
    samples: int  # requested per problem
    average: Interval | None  # avg@k
    score: Interval | None  # mean of the rule's numbers, if it gives any
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
    problems_without_samples: int
    problems_of_equal_samples: int  # with several samples, all of them the same text
    average_if_failures_wrong: float | None


def compute_metrics(samples: Iterable[GradedSample], requested: int) -> BenchmarkMetrics:
    """Compute the metrics of one benchmark from its samples, `requested` of them per problem."""
    samples = list(samples)
    groups = by_problem(samples)
    graded = by_problem(sample for sample in samples if sample.graded)
    generated = by_problem(sample for sample in samples if sample.kind is not None)
    kinds = Counter(sample.kind for sample in samples if sample.kind is not None)
    failed = sum(sample.kind is None for sample in samples)
    ungraded = sum(kinds[kind] for kind in GRADER_FAILURES)
    # Failures counted as wrong: the lower bound that a reader may want who distrusts leaving them out.
    worst = [math.fsum(s.correct for s in group) / len(group) for group in groups.values()]
    return BenchmarkMetrics(
        problems=len(groups),
        samples=requested,
        average=share_interval([_share(group, lambda s: s.correct) for group in graded.values()]),
        score=score_interval(_scores(graded)) if any(s.score is not None for s in samples) else None,
        pass_at=_pass_at(graded, requested),
        majority=share_interval([majority(group) for group in graded.values()]),
        length=mean_interval(_means(groups, lambda s: s.generation.tokens)),
        truncated=share_interval([_share(g, lambda s: not s.generation.finished) for g in generated.values()]),
        no_answer=share_interval([_share(group, lambda s: s.kind == "no_answer") for group in graded.values()]),
        entropy=mean_interval(_means(groups, lambda s: s.generation.entropy)),
        surprisal=mean_interval(_means(groups, lambda s: None if s.generation.logp is None else -s.generation.logp)),
        kinds=dict(sorted(kinds.items())),
        failed_samples=failed,
        grader_failures=ungraded,
        problems_without_samples=len(groups) - len(graded),
        problems_of_equal_samples=sum(
            len(group) > 1 and len({sample.generation.text for sample in group}) == 1 for group in generated.values()
        ),
        average_if_failures_wrong=math.fsum(worst) / len(worst) if worst and failed + ungraded else None,
    )


def paired_difference(samples: Iterable[GradedSample], baseline: Iterable[GradedSample]) -> Interval | None:
    """Return the difference in avg@k over the problems that both have graded samples of; None where there are none."""
    ours, theirs = _accuracies(samples), _accuracies(baseline)
    both = sorted(ours.keys() & theirs.keys())
    return difference_interval([ours[name] for name in both], [theirs[name] for name in both])


def score_difference(samples: Iterable[GradedSample], baseline: Iterable[GradedSample]) -> Interval | None:
    """Return the difference in the mean score, as `paired_difference` does; None if neither rule gave numbers."""
    pair = [[sample for sample in each if sample.graded] for each in (samples, baseline)]
    if all(sample.score is None for each in pair for sample in each):
        return None
    ours, theirs = (dict(zip(groups, _scores(groups), strict=True)) for groups in map(by_problem, pair))
    return score_interval([ours[name] - theirs[name] for name in sorted(ours.keys() & theirs.keys())])


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from n samples, c of them correct: 1 - C(n-c, k) / C(n, k)."""
    # In integers until the last division: the product form in floats loses digits for large n.
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {correct} correct among {n} samples: k is 1 to n, and 0 to n can be correct")
    return float(1 - Fraction(math.comb(n - correct, k), math.comb(n, k)))


def majority(samples: Sequence[GradedSample]) -> float:
    """Return maj@k of one problem: 1 where the most frequent answer is correct, on a tie the share of the tied.

    Answers are counted by `vote_key`. A response without an answer has no vote; without votes the result is 0.
    """
    votes: dict[str, list[bool]] = defaultdict(list)
    for sample in samples:
        verdict = sample.verdict
        if verdict is not None and verdict.extracted is not None and verdict.kind != "no_answer":
            votes[vote_key(verdict.extracted)].append(sample.correct)
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    tied = [right for right in votes.values() if len(right) == most]
    return math.fsum(sum(right) / most for right in tied) / len(tied)


def vote_key(text: str) -> str:
    r"""Return the spelling of an answer by which votes are counted: no LaTeX spacing and sizing, `$`, final period."""
    text = re.sub(r"\\(?:left|right|displaystyle|[,!;: ])", "", re.sub(r"\\[dt]frac", r"\\frac", text))
    return re.sub(r"[\s$]+", "", text).rstrip(".").casefold()


def by_problem(samples: Iterable[GradedSample]) -> dict[str, list[GradedSample]]:
    """Group samples by problem, in the order of the problems' first samples."""
    groups: dict[str, list[GradedSample]] = defaultdict(list)
    for sample in samples:
        groups[sample.generation.problem].append(sample)
    return dict(groups)


def _pass_at(graded: dict[str, list[GradedSample]], requested: int) -> dict[int, Interval]:
    """Return pass@k for the powers of two up to the requested samples, over the problems with that many graded."""
    found = {}
    for k in [*(2**power for power in range(requested.bit_length()) if 2**power < requested), requested]:
        values = [pass_at_k(len(g), sum(s.correct for s in g), k) for g in graded.values() if len(g) >= k]
        interval = share_interval(values)
        if interval is not None:
            found[k] = interval
    return found


def _accuracies(samples: Iterable[GradedSample]) -> dict[str, float]:
    graded = by_problem(sample for sample in samples if sample.graded)
    return {name: _share(group, lambda s: s.correct) for name, group in graded.items()}


def _scores(graded: dict[str, list[GradedSample]]) -> list[float]:
    return [math.fsum(s.verdict.value for s in group if s.verdict) / len(group) for group in graded.values()]


def _share(samples: Sequence[GradedSample], true: Callable[[GradedSample], bool]) -> float:
    return sum(map(true, samples)) / len(samples)


def _means(groups: dict[str, list[GradedSample]], value: Callable[[GradedSample], float | None]) -> list[float]:
    """Return a mean per problem, over the samples that have the value."""
    known = [[v for s in group if (v := value(s)) is not None] for group in groups.values()]
    return [math.fsum(values) / len(values) for values in known if values]
