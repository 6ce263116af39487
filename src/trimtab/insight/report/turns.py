"""The turns of a response for the page: its messages, the calls in each, and what tools replied."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from trimtab.insight.report.embed import truncated
from trimtab.insight.report.response_selection import ResponseExcerpt
from trimtab.record import RecordedCall, RecordedObservation, RecordedStep, RecordError

LONGEST_REPLY = 4_000  # characters of a reply, or of the arguments of a call
LONGEST_NAME = 100


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
        # The last message is there even where it is empty: a response may end with the reply of a tool.
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
