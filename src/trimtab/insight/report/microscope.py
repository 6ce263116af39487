"""The microscope: which responses it holds, and these as JSON with all numbers of every token.

It holds the most notable responses of every kind, until the budget is spent. Kinds take turns, so that none crowds out
another. A response comes whole unless it would take a quarter of the tokens left; then only the tokens around the
notable one come.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from trimtab.insight.replay import TokenEffects
from trimtab.insight.report.embed import NumpyArray, encode_array, safe_json, truncated
from trimtab.insight.report.tokens import (
    REMOVED,
    StepTokenTable,
    mini_batches,
    step_effects,
    token_table,
)
from trimtab.objectives import Objective, Reason
from trimtab.record import RecordedCall, RecordedObservation, RecordedStep, RecordError, Records, Vocabulary

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

LONGEST_TOKEN = 200  # characters
LONGEST_PROMPT = 4_000
PREVIEW_TOKENS, LONGEST_PREVIEW = 24, 80  # tokens and characters in the list of responses
MOST_REWARDS = 20  # of a response
BYTES_PER_TOKEN = 64  # estimated; without what compared objectives add
BYTES_PER_COMPARED_OBJECTIVE = 8
LONGEST_REPLY = 4_000  # characters of a reply, or of the arguments of a call
LONGEST_NAME = 100


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
        step = table.step
        offsets = np.array(table.step.offsets)
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
    left = tokens
    count = 0
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


@dataclass
class MicroscopeData:
    """Responses for the page: entries of its list, a JSON block each, and notes on what was left out."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def affordable_tokens(byte_budget: int, compared: int) -> int:
    """Return how many tokens fit into a number of bytes."""
    return byte_budget // (BYTES_PER_TOKEN + BYTES_PER_COMPARED_OBJECTIVE * compared)


def microscope_data(
    records: Records,
    excerpts: Sequence[ResponseExcerpt],
    recorded: Objective | None,
    compared: Mapping[str, Objective],
    *,
    byte_budget: int,
    first_block: int = 0,
) -> MicroscopeData:
    """Read the excerpts' steps again, and encode the excerpts that fit into the budget."""
    data = MicroscopeData()
    try:
        vocabulary = records.vocabulary
    except RecordError as error:
        data.notes.append(f"{error}: tokens are shown by their numbers")
        vocabulary = Vocabulary([], [])
    left = byte_budget
    skipped = 0
    for number, group in groupby(excerpts, key=lambda excerpt: excerpt.step):
        try:
            table = token_table(records.step(number), recorded)
        except RecordError as error:  # a run that is still training may delete records meanwhile
            data.notes.append(f"step {number} is left out: {error}")
            continue
        effects = dict(_compared_effects(table.step, compared, data.notes))
        for excerpt in group:
            turns = read_turns(table.step, excerpt.response, data.notes)
            length = int(table.step.responses["tokens"][excerpt.response])
            content = response_json(table, {name: effects.get(name) for name in compared}, excerpt, vocabulary)
            block = safe_json(content | {"turns": turns_json(*turns, excerpt, length)})
            size = len(block.encode())  # the selection only estimates sizes, and a token may be 200 characters
            if size > left:
                skipped += 1
                continue
            left -= size
            entry = list_entry(table, excerpt, first_block + len(data.blocks), vocabulary)
            data.entries.append(entry | count_turns(*turns, length))
            data.blocks.append(block)
    if skipped:
        data.notes.append(f"{skipped} responses were left out to keep the report small")
    return data


def _compared_effects(
    step: RecordedStep, compared: Mapping[str, Objective], notes: list[str]
) -> Iterator[tuple[str, TokenEffects]]:
    """Yield the effects of every compared objective whose fields are recorded."""
    batches = mini_batches(step, frozenset[str]().union(*(objective.needs for objective in compared.values())))
    for name, objective in compared.items():
        try:
            yield name, step_effects(step, objective, batches)
        except (ValueError, RecordError) as error:
            # Once for each objective, not for each step.
            if not any(known.startswith(f"{name} cannot") for known in notes):
                notes.append(f"{name} cannot be planned over these records: {truncated(str(error), 200)}")


def list_entry(table: StepTokenTable, excerpt: ResponseExcerpt, block: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return what the page needs to list, filter and sort a response before its block is parsed."""
    step = table.step
    tokens = _token_slice(table.step, excerpt)
    return {
        "block": block,
        "step": excerpt.step,
        "response": excerpt.response,
        "start": excerpt.start,
        "tokens": excerpt.stop - excerpt.start,
        "length": int(step.responses["tokens"][excerpt.response]),
        "reward": float(step.responses["reward"][excerpt.response]),
        "verdict": truncated(str(step.responses["verdict"][excerpt.response]), 60),
        "selected_for": excerpt.selected_for,
        "text": vocabulary.decode(step.tokens["token"][tokens][:PREVIEW_TOKENS].tolist())[:LONGEST_PREVIEW],
        "silenced": int(((table.effects.reason[tokens] & int(Reason.SILENCED)) != 0).sum()),
        "clipped": int(table.effects.clipped[tokens].sum()),
        "gradient": float(table.grad_norm[tokens].max(initial=0.0)),
    }


def response_json(
    table: StepTokenTable, compared: Mapping[str, TokenEffects | None], excerpt: ResponseExcerpt, vocabulary: Vocabulary
) -> dict[str, Any]:
    """Return a response with all its numbers; `compared` is None for an objective that could not be planned."""
    step = table.step
    tokens = _token_slice(table.step, excerpt)
    ids = step.tokens["token"][tokens].tolist()
    # Everything a model or a task wrote is truncated: one endless prompt must not fill the page.
    texts = {name: step.responses[name][excerpt.response] for name in ("prompt", "answer", "extracted", "source")}
    columns = ("logp", "entropy", "logp_grad_norm", "phi", "log_ratio")
    arrays = {name: encode_array(getattr(table, name)[tokens]) for name in columns}
    arrays["special"] = encode_array([vocabulary.is_special(token) for token in ids], "u1")
    if "segment" in step.tokens:
        arrays["segment"] = encode_array(step.tokens["segment"][tokens], "i4")
    if "tool_tokens" in step.tokens:
        arrays["tool_tokens"] = encode_array(step.tokens["tool_tokens"][tokens], "i4")
    return {
        **{name: truncated(str(text), LONGEST_PROMPT) for name, text in texts.items()},
        "rewards": _rewards(step, excerpt.response),
        "rollout": _rollout(step, excerpt.response),
        "finished": bool(step.responses["finished"][excerpt.response]),
        "ended": truncated(str(step.responses["ended"][excerpt.response]), 60) if "ended" in step.responses else "",
        "pieces": [truncated(piece, LONGEST_TOKEN) for piece in vocabulary.pieces(ids)],
        "arrays": arrays,
        "recorded": _effects_json(table.effects, tokens),
        "compared": [effects and _effects_json(effects, tokens) for effects in compared.values()],
    }


def _rewards(step: RecordedStep, response: int) -> dict[str, float]:
    """Return each of several rewards by name; what is recorded may be anybody's."""
    if "rewards" not in step.responses:
        return {}
    try:
        found = json.loads(step.responses["rewards"][response] or "{}")
        return {truncated(str(name), 40): float(value) for name, value in list(found.items())[:MOST_REWARDS]}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _rollout(step: RecordedStep, response: int) -> dict[str, int]:
    """Return which branch of which rollout a response is, counted from 1; nothing for one that is no branch."""
    rollouts = step.rollouts
    if rollouts is None:
        return {}
    names = ("group", "sample", "branch")
    group, sample, branch = (int(step.responses[name][response]) for name in names)
    return {
        "prompt": group,
        "sample": sample + 1,
        "branch": branch + 1,
        "branches": rollouts.count(rollouts[response]),
    }


def _effects_json(effects: TokenEffects, tokens: slice) -> dict[str, Any]:
    types = {"reason": "i2", "clipped": "u1"}
    return {name: encode_array(values[tokens], types.get(name, "f4")) for name, values in vars(effects).items()}


def _token_slice(step: RecordedStep, excerpt: ResponseExcerpt) -> slice:
    first = step.offsets[excerpt.response]
    return slice(first + excerpt.start, first + excerpt.stop)


def read_turns(
    step: RecordedStep, response: int, notes: list[str]
) -> tuple[list[RecordedObservation], list[RecordedCall]]:
    """Return what was observed in a response and its calls; what cannot be read becomes one note."""
    try:
        return sorted(step.observations(response), key=lambda each: each.after), step.calls(response)
    except RecordError as error:
        # Once, not for each response: they were all written by the same program.
        if not any("cannot be read" in note and "of response" in note for note in notes):
            notes.append(f"step {step.number}: {truncated(str(error), 300)}")
        return [], []


def turns_json(
    observations: list[RecordedObservation], calls: list[RecordedCall], excerpt: ResponseExcerpt, length: int
) -> list[dict[str, Any]]:
    """Return the messages that the excerpt has tokens of: where each begins in it, its calls, and the reply to it.

    A message that the excerpt does not reach the end of has neither; a response without turns has no messages.
    """
    if not observations and not calls:
        return []
    ends = [min(each.after, length) for each in observations]
    turns = []
    for number, (start, end) in enumerate(zip([0, *ends], [*ends, length], strict=True)):
        # The last message is there even if it is empty: a response may end with the reply of a tool.
        if end < excerpt.start or start > excerpt.stop or (start == end and number == len(ends)):
            continue
        whole = end <= excerpt.stop
        reply = observations[number] if whole and number < len(observations) else None
        turns.append({
            "number": number + 1,
            "start": max(start - excerpt.start, 0),
            "end": min(end, excerpt.stop) - excerpt.start,
            "calls": [_call_json(call) for call in calls if call.turn == number] if whole else [],
            "reply": reply and {"tokens": reply.tokens, "text": truncated(reply.text, LONGEST_REPLY)},
        })  # fmt: skip
    return turns


def count_turns(observations: list[RecordedObservation], calls: list[RecordedCall], length: int) -> dict[str, int]:
    """Return how many messages and calls a response has, and how many calls failed; nothing for one without turns."""
    if not observations and not calls:
        return {}
    last = not observations or observations[-1].after < length
    failed = sum(call.outcome != "ok" for call in calls)
    return {"messages": len(observations) + last, "calls": len(calls), "failed_calls": failed}


def _call_json(call: RecordedCall) -> dict[str, Any]:
    texts = {"tool": LONGEST_NAME, "arguments": LONGEST_REPLY, "outcome": LONGEST_NAME}
    values = asdict(call)
    return {"seconds": call.seconds, **{name: truncated(values[name], longest) for name, longest in texts.items()}}
