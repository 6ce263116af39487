"""Worked solutions as transcripts, for the warm start: what a tool says is context, and not trained on."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.data import Problem
from trimtab.trainer.model import Policy, Transcript
from trimtab.trainer.train.responses.conversations import ToolUse


def worked_transcript(policy: Policy, problem: Problem, prompt: Sequence[int], tool_use: ToolUse | None) -> Transcript:
    """Return the transcript of a problem's worked solution: a text, or messages of assistant and tool in turn."""
    solution = problem.solution
    if not isinstance(solution, tuple | list):
        return Transcript(prompt, policy.encode_solution(str(solution)))
    roles = [message.get("role") for message in solution]
    if not roles or roles[-1] != "assistant" or roles[0] != "assistant" or {*roles} - {"assistant", "tool"}:
        raise ValueError(
            f"{named(problem)} has messages of {', '.join(map(str, roles)) or 'nobody'}: it starts and ends with the "
            "assistant, and tools reply in between"
        )
    if "tool" in roles and tool_use is None:
        raise ValueError(f"{named(problem)} calls a tool: set tools.use and rollout.max_turns, or warm_start.steps = 0")
    tokens: list[int] = []
    observed: list[tuple[int, int]] = []
    replies: list[tuple[str, str]] = []
    written: list[int] = []  # the message before the replies
    for message in solution:
        if message["role"] == "tool":
            replies.append((message.get("name", ""), message["content"]))
            continue
        if replies and tool_use is not None:
            reply = tool_use.template.render(written, replies, tool_use.limits.max_observation_tokens).tokens
            observed.append((len(tokens), len(tokens) + len(reply)))
            tokens += reply
            replies = []
        written = policy.encode_solution(message["content"])
        tokens += written
    return Transcript(prompt, tokens, tuple(observed))


def named(problem: Problem) -> str:
    """Return where a worked solution comes from, for an error."""
    return f"the worked solution of {problem.location or problem.source}"
