"""The metrics of conversations with tools, and the table of their meanings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from trimtab.agents import OUTCOMES, Conversation

CONVERSATION_METRICS: dict[str, str] = {
    "conversation/called_share": "share of sampled conversations with a successful call",
    "conversation/observed_tokens_mean": "mean number of tokens per conversation that tools wrote, including markup",
    "conversation/out_of_turns_share": "share of conversations that ended with a call, which was not run",
    "conversation/turns_mean": "mean number of messages of the policy per conversation",
    "conversation/void_share": "share of conversations with a message that contains neither a call nor an answer",
    "eval/called_share": "share of held-out problems with a successful call",
    "eval/turns_mean": "mean number of messages of the policy per held-out problem",
    "time/tool_call": "mean seconds per call",
    "time/tools": "seconds in which the sampler only waited for tools",
    "time/tools_wait_share": "share of the sampling time in which the sampler only waited for tools",
    "tools/calls": "number of calls in the step",
    "tools/failed_share": "share of the calls whose outcome is not ok; logged only if there are calls",
    **{f"tools/{outcome}": f"number of calls with this outcome: {meaning}" for outcome, meaning in OUTCOMES.items()},
}


def called(conversation: Conversation) -> bool:
    """Return whether a conversation has a successful call."""
    return any(call.outcome == "ok" for call in conversation.calls)


def conversation_metrics(held: Sequence[Conversation], void: Sequence[bool]) -> dict[str, float]:
    """Return the metrics of a step's conversations; `void` says which of them have a void turn."""
    if not held:
        return {}
    outcomes = Counter(call.outcome for conversation in held for call in conversation.calls)
    calls = outcomes.total()
    metrics: dict[str, float] = {
        "conversation/turns_mean": fmean(conversation.turns for conversation in held),
        "conversation/called_share": fmean(map(called, held)),
        "conversation/void_share": fmean(void),
        "conversation/out_of_turns_share": fmean(conversation.ended == "turns" for conversation in held),
        "conversation/observed_tokens_mean": fmean(conversation.observation_tokens for conversation in held),
        "tools/calls": calls,
        **{f"tools/{outcome}": outcomes[outcome] for outcome in OUTCOMES},
    }
    if calls:
        metrics["time/tool_call"] = fmean(call.seconds for conversation in held for call in conversation.calls)
        metrics["tools/failed_share"] = 1 - outcomes["ok"] / calls
    return metrics


def evaluation_metrics(held: Sequence[Conversation]) -> dict[str, float]:
    """Return the metrics of the conversations on held-out problems."""
    if not held:
        return {}
    return {"eval/called_share": fmean(map(called, held)), "eval/turns_mean": fmean(each.turns for each in held)}


def conversation_text(conversation: Conversation) -> str:
    """Return a conversation for people: what the policy wrote, and what tools replied."""
    lines = [f"[{m.name or 'tool'}] {m.text}" if m.role == "tool" else m.text for m in conversation.messages]
    return "\n".join(lines)
