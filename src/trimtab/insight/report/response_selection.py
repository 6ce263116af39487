"""Which responses the microscope holds: the most notable of every kind, until the budget is spent.

Kinds take turns, so that none crowds out another. A response comes whole unless it would take a quarter of the tokens
left; then only the tokens around the notable one come.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from trimtab.insight.report.embed import NumpyArray
from trimtab.insight.report.token_statistics import REMOVED
from trimtab.insight.report.token_table import StepTokenTable
from trimtab.record import RecordedStep, RecordError

# Why a response is in the report, in the order in which kinds take turns, and the text on the page.
SELECTION_REASONS = {
    "requested": "requested step",
    "alarm": "at an alarm",
    "silenced": "most silenced",
    "gradient": "largest gradient",
    "ends": "first or last step",
    "clipped": "most clipped",
    "failed_calls": "failed calls of tools",
    "longest": "longest",
    "random": "random sample",
}
MOST_RESPONSES = 400
EXCERPT = 512  # tokens
TOP_TOKENS = 100  # of a step, by gradient norm
POOL_SIZE = 200  # candidates of each kind
_FAIR_SHARE = 4  # a whole response may take one part in so many of the tokens left


@dataclass(frozen=True, order=True)
class ResponseCandidate:
    """A response with its score among candidates of its kind, and the position of its notable token."""

    score: float
    step: int
    response: int
    position: int = field(compare=False)
    length: int = field(compare=False)


@dataclass
class CandidatePool:
    """The best candidates of every kind over the steps added so far, each kind as a heap with the worst first."""

    alarm_steps: frozenset[int] = frozenset()
    end_steps: frozenset[int] = frozenset()
    requested_steps: frozenset[int] = frozenset()
    candidates: dict[str, list[ResponseCandidate]] = field(default_factory=dict)

    def add(self, table: StepTokenTable, sample: bool) -> None:
        """Add a step's candidates; `sample` adds a random response as well."""
        step, offsets = table.step, np.array(table.step.offsets)
        if not step.info.tokens:
            return
        grad_norm = np.nan_to_num(table.grad_norm)
        self._add_top_tokens("gradient", step.number, grad_norm, offsets, TOP_TOKENS)
        self._add_top_counts("silenced", step.number, (table.effects.reason & int(REMOVED)) != 0, offsets)
        self._add_top_counts("clipped", step.number, table.effects.clipped, offsets)
        self._add_failed_calls(table, offsets)
        if step.number in self.alarm_steps:
            self._add_top_tokens("alarm", step.number, grad_norm, offsets, 4)
        lengths = np.diff(offsets)
        self._add("longest", int(lengths.max()), step.number, int(lengths.argmax()), offsets)
        rng = np.random.default_rng(step.number)  # by step: the same run gives the same report
        if sample:
            self._add("random", rng.random(), step.number, int(rng.integers(len(lengths))), offsets)
        for kind, steps, limit in (("ends", self.end_steps, 8), ("requested", self.requested_steps, POOL_SIZE)):
            if step.number in steps:
                for response in rng.permutation(len(lengths))[:limit].tolist():
                    self._add(kind, rng.random(), step.number, response, offsets)

    def _add_failed_calls(self, table: StepTokenTable, offsets: NumpyArray) -> None:
        """Add the responses with the most calls of tools that failed."""
        step = table.step
        if "calls" not in step.responses:
            return
        failed = np.array([_failed_calls(step, n) for n in range(step.info.responses)])
        for response in np.argsort(-failed, kind="stable")[:4].tolist():
            if failed[response]:
                self._add("failed_calls", int(failed[response]), step.number, response, offsets)

    def _add_top_counts(self, kind: str, step: int, mask: NumpyArray, offsets: NumpyArray) -> None:
        """Add the responses with the most tokens in a mask, at the first of them."""
        counts = np.bincount(_owners(offsets)[mask], minlength=len(offsets) - 1)
        for response in np.argsort(-counts, kind="stable")[:4].tolist():
            if counts[response]:
                first = int(np.flatnonzero(mask[offsets[response] : offsets[response + 1]])[0])
                self._add(kind, int(counts[response]), step, response, offsets, first)

    def _add_top_tokens(self, kind: str, step: int, score: NumpyArray, offsets: NumpyArray, limit: int) -> None:
        """Add the responses of the tokens with the highest scores."""
        owners = _owners(offsets)
        for token in np.argpartition(-score, min(limit, len(score)) - 1)[:limit].tolist():
            if score[token] > 0:
                response = int(owners[token])
                self._add(kind, float(score[token]), step, response, offsets, int(token - offsets[response]))

    def _add(self, kind: str, score: float, step: int, response: int, offsets: NumpyArray, position: int = 0) -> None:
        length = int(offsets[response + 1] - offsets[response])
        candidate = ResponseCandidate(score, step, response, position, length)
        heap = self.candidates.setdefault(kind, [])
        if len(heap) < POOL_SIZE:
            heapq.heappush(heap, candidate)
        elif candidate > heap[0]:
            heapq.heapreplace(heap, candidate)


def _failed_calls(step: RecordedStep, response: int) -> int:
    try:
        return sum(call.outcome != "ok" for call in step.calls(response))
    except RecordError:  # the microscope has a note about it; the tokens can be shown all the same
        return 0


def _owners(offsets: NumpyArray) -> NumpyArray:
    """Return the response that each token belongs to."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


@dataclass
class ResponseExcerpt:
    """A response of the microscope, or its tokens from `start` up to `stop`, and why it was selected."""

    step: int
    response: int
    start: int
    stop: int
    selected_for: list[str] = field(default_factory=list)


def select_responses(
    candidates: Mapping[str, Sequence[ResponseCandidate]], tokens: int, most: int = MOST_RESPONSES
) -> list[ResponseExcerpt]:
    """Return at most `most` excerpts of together at most `tokens` tokens, by step and response."""
    queues = {kind: sorted(candidates.get(kind, ())) for kind in SELECTION_REASONS}  # the best last
    excerpts: dict[tuple[int, int], list[ResponseExcerpt]] = {}
    left, count = tokens, 0
    while any(queues.values()) and count < most:
        for kind, queue in queues.items():
            if not queue or count >= most:
                continue
            candidate = queue.pop()
            of_response = excerpts.setdefault((candidate.step, candidate.response), [])
            selected = [each for each in of_response if each.start <= candidate.position < each.stop]
            if selected:
                selected[0].selected_for += [kind] if kind not in selected[0].selected_for else []
                continue
            excerpt = _excerpt(candidate, kind, left)
            if excerpt.stop - excerpt.start <= left:
                of_response.append(excerpt)
                left, count = left - (excerpt.stop - excerpt.start), count + 1
    found = [excerpt for of_response in excerpts.values() for excerpt in of_response]
    return sorted(found, key=lambda excerpt: (excerpt.step, excerpt.response, excerpt.start))


def _excerpt(candidate: ResponseCandidate, kind: str, left: int) -> ResponseExcerpt:
    length = candidate.length
    if length <= max(left // _FAIR_SHARE, EXCERPT):
        return ResponseExcerpt(candidate.step, candidate.response, 0, length, [kind])
    start = min(max(candidate.position - EXCERPT // 2, 0), length - EXCERPT)
    return ResponseExcerpt(candidate.step, candidate.response, start, start + EXCERPT, [kind])
