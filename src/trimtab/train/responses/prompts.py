"""Tokenize the prompts of problems, within the limits of the recipe and the model."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.config import Config
from trimtab.policy import LongPromptError, Policy
from trimtab.rollout import PromptTokens
from trimtab.tasks import Problem, Task
from trimtab.train.responses.conversations import ToolUse

PROBLEMS_CHECKED, PROMPTS_CHECKED = 1000, 16  # before the first step


def encode_prompts(
    policy: Policy,
    problems: Sequence[tuple[int, Problem]],
    limit: int,
    max_new_tokens: int = 0,
    tool_use: ToolUse | None = None,
) -> list[PromptTokens]:
    """Tokenize the prompts of numbered problems; one of more than `limit` tokens is an error.

    So is one that leaves no room for `max_new_tokens`, and for what tools reply, within the positions that the model
    knows.
    """
    advice = "raise it, or remove such problems"
    try:
        encoded = encode_problems(policy, [problem for _, problem in problems], tool_use, limit)
    except LongPromptError as error:
        problem = problems[error.number][1]
        raise ValueError(f"{_named(problem)}: {error}; rollout.max_prompt_tokens={limit} ({advice})") from None
    prompts = [PromptTokens(ids, number) for ids, (number, _) in zip(encoded, problems, strict=True)]
    for (_, problem), prompt in zip(problems, prompts, strict=True):
        if not 0 < len(prompt.ids) <= limit:
            raise ValueError(
                f"{_named(problem)} has {len(prompt.ids)} tokens; rollout.max_prompt_tokens={limit} ({advice})"
            )
        observed = 0 if tool_use is None else tool_use.max_observed_tokens
        if len(prompt.ids) + max_new_tokens + observed > policy.context:
            room = f"rollout.max_new_tokens={max_new_tokens}" + (f" and replies of {observed}" if observed else "")
            left = policy.context - observed - len(prompt.ids)
            lower = f"set rollout.max_new_tokens to {left} or less, or remove such problems"
            # With long prompts or replies no number of new tokens would do.
            replies = "lower rollout.max_turns or rollout.max_observation_tokens, or " if observed else ""
            raise ValueError(
                f"{_named(problem)} has {len(prompt.ids)} tokens: with {room} that is more than the model's "
                f"{policy.context} positions; {lower if left > 0 else replies + 'remove such problems'}"
            )
    return prompts


def encode_problems(
    policy: Policy, problems: Sequence[Problem], tool_use: ToolUse | None = None, limit: int | None = None
) -> list[list[int]]:
    """Tokenize the prompts of problems, with their tools written down as the model's chat template does."""
    if tool_use is None:
        return policy.encode_batch([problem.prompt for problem in problems], limit)
    return policy.encode_batch(tool_use.prompts(problems), limit, tool_use.schemas(problems))


def check_positions(policy: Policy, task: Task, config: Config, tool_use: ToolUse | None = None) -> None:
    """Raise at the start of a run where a prompt and its response would exceed the model's positions."""
    rollout, observed = config.rollout, 0 if tool_use is None else tool_use.max_observed_tokens
    if rollout.max_prompt_tokens + rollout.max_new_tokens + observed <= policy.context:
        return
    # The longest of some are tokenized: problems may be millions, or slow to make. Later ones are checked as they come.
    problems = [(number, task[number]) for number in range(min(len(task), PROBLEMS_CHECKED))]
    longest = sorted(problems, key=lambda each: -sum(len(message["content"]) for message in each[1].prompt))
    encode_prompts(policy, longest[:PROMPTS_CHECKED], rollout.max_prompt_tokens, rollout.max_new_tokens, tool_use)


def _named(problem: Problem) -> str:
    """Return where a problem's prompt is, for an error."""
    start = problem.prompt[-1]["content"][:40]
    return (
        f"{problem.location}: the prompt {start!r}" if problem.location else f"a prompt of {problem.source}, {start!r},"
    )
