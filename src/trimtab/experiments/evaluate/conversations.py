"""Conversations of an evaluation: as they are stored, and their figures by benchmark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict
from typing_extensions import TypedDict  # Pydantic takes the standard library's only from Python 3.12 on

from trimtab.agents import Conversation
from trimtab.grading import Verdict, verdict_of


class _StoredMessage(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    role: str


class _StoredCall(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    outcome: str


def _check_reward(value: float | None) -> float | None:
    if value is not None:
        verdict_of(value)
    return value


class StoredConversation(TypedDict):
    """A conversation as a JSON object: what is read of it again, and more that is only kept."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    ended: str | None
    messages: list[_StoredMessage]
    calls: list[_StoredCall]
    reward: Annotated[float | None, AfterValidator(_check_reward)]
    error: str


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


def conversation_row(conversation: Conversation) -> Any:
    """Return a conversation as a `StoredConversation`."""
    row = asdict(conversation)
    return {key: row[key] for key in ("ended", "messages", "calls", "void_turns", "reward", "error")}


def environment_verdict(row: StoredConversation | None) -> Verdict | None:
    """Return what the environment says of a stored conversation; None where it leaves that to the rule."""
    if row is None:
        return None
    if row["reward"] is not None:
        return verdict_of(row["reward"])
    return Verdict("crashed", error=row["error"]) if row["ended"] == "environment" else None


def without_texts(row: StoredConversation) -> dict[str, Any]:
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
