"""Conversations of an evaluation: as they are stored, and their figures by benchmark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.conversation import Conversation


@dataclass(frozen=True)
class ToolFigures:
    """How the model used its tools on a benchmark: means over responses, shares of calls and of responses."""

    responses: int
    turns: float
    calls: float
    ok_share: float | None  # of calls
    answers_with_call_share: float  # responses with at least one call that went well
    outcomes: dict[str, int]
    ended: dict[str, int]


def conversation_row(conversation: Conversation) -> dict[str, Any]:
    """Return a conversation as a JSON object."""
    row = asdict(conversation)
    return {key: row[key] for key in ("ended", "messages", "calls", "void_turns", "reward", "error")}


def without_texts(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the figures need of a stored conversation, so that memory does not hold all that was said."""
    messages = [{"role": message["role"]} for message in row["messages"]]
    return {"ended": row["ended"], "messages": messages, "calls": [{"outcome": c["outcome"]} for c in row["calls"]]}


def tool_figures(rows: Iterable[Mapping[str, Any]]) -> ToolFigures | None:
    """Return the figures of stored conversations; None where there are none."""
    outcomes: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    turns = helped = 0
    for row in rows:
        found = [str(call["outcome"]) for call in row["calls"]]
        outcomes.update(found)
        ended[str(row["ended"])] += 1
        turns += sum(message["role"] == "assistant" for message in row["messages"])
        helped += "ok" in found
    responses, calls = ended.total(), outcomes.total()
    if not responses:
        return None
    return ToolFigures(
        responses=responses,
        turns=turns / responses,
        calls=calls / responses,
        ok_share=outcomes["ok"] / calls if calls else None,
        answers_with_call_share=helped / responses,
        outcomes=dict(sorted(outcomes.items())),
        ended=dict(sorted(ended.items())),
    )
