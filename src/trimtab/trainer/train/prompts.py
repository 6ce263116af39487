"""Tokenize the prompts of problems, within the limits of the recipe and the model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from trimtab.data import FixedTask, Problem, PromptTokens, Task
from trimtab.trainer.config import Config
from trimtab.trainer.model import LongPromptError, Policy
from trimtab.trainer.train.conversations import ToolUse

PROBLEMS_CHECKED, PROMPTS_CHECKED = 1000, 16  # before the first step
PROMPTS_DECODED = 8  # before the first step, to see that they survive the tokenizer
PROMPTS_ENCODED = 256  # at a time
MOST_CHARACTERS = 1 << 15  # of a prompt that is decoded again
PROMPTS_NAMED = 5  # of those that are left out


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
    try:
        encoded = encode_problems(policy, [problem for _, problem in problems], tool_use, limit)
    except LongPromptError as error:
        problem = problems[error.number][1]
        raise ValueError(
            f"{_named(problem)}: {error}; rollout.max_prompt_tokens={limit} ({_advice(problem)})"
        ) from None
    prompts = [PromptTokens(ids, number) for ids, (number, _) in zip(encoded, problems, strict=True)]
    for (_, problem), prompt in zip(problems, prompts, strict=True):
        if not 0 < len(prompt.ids) <= limit:
            raise ValueError(
                f"{_named(problem)} has {len(prompt.ids)} tokens; rollout.max_prompt_tokens={limit} "
                f"({_advice(problem)})"
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


def drop_long_prompts(policy: Policy, task: Task, config: Config, tool_use: ToolUse | None = None) -> Task:
    """Return the task without problems whose prompts are too long, and warn which ones; `task.long_prompts`."""
    if config.task.arguments.get("long_prompts") != "drop" or not isinstance(task, FixedTask):
        return task
    limit = longest_prompt(policy, config, tool_use)
    lengths = prompt_lengths(policy, task.problems, limit, tool_use)
    dropped = [number for number, length in enumerate(lengths) if length > limit]
    if len(dropped) == len(task):
        raise ValueError(f"{task.name}: all {len(task):,} prompts have more than {limit:,} tokens; none is left")
    if dropped:
        names = "; ".join(_named(task[number]) for number in dropped[:PROMPTS_NAMED])
        more = f"; and {len(dropped) - PROMPTS_NAMED:,} more" if len(dropped) > PROMPTS_NAMED else ""
        warnings.warn(
            f"{len(dropped):,} of {len(task):,} problems of {task.name} are left out (task.long_prompts = 'drop'), "
            f"whose prompts have more than {limit:,} tokens: {names}{more}",
            stacklevel=2,
        )
    return task.without({*dropped}) if dropped else task


def longest_prompt(policy: Policy, config: Config, tool_use: ToolUse | None = None) -> int:
    """Return how many tokens a prompt may have: by the recipe, and by the positions that its response needs."""
    rollout, observed = config.rollout, 0 if tool_use is None else tool_use.max_observed_tokens
    return min(rollout.max_prompt_tokens, policy.context - rollout.max_new_tokens - observed)


def prompt_lengths(
    policy: Policy, problems: Sequence[Problem], limit: int, tool_use: ToolUse | None = None
) -> list[int]:
    """Return how many tokens each prompt has; those that are far above `limit` are not counted, and have one more."""
    lengths: list[int] = []
    while len(lengths) < len(problems):
        batch = problems[len(lengths) : len(lengths) + PROMPTS_ENCODED]
        try:
            lengths += map(len, encode_problems(policy, batch, tool_use, limit))
        except LongPromptError as error:
            before = encode_problems(policy, batch[: error.number], tool_use, limit)
            lengths += [*map(len, before), limit + 1]
    return lengths


def check_prompts(policy: Policy, problems: Sequence[Problem], tool_use: ToolUse | None = None) -> list[str]:
    """Raise if one of a few prompts does not survive encoding and decoding; return them as the model reads them.

    Huge ones are left out: they are refused by their lengths.
    """
    problems = [each for each in problems if sum(len(message["content"]) for message in each.prompt) < MOST_CHARACTERS]
    if tool_use is None:
        return policy.check_survival([problem.prompt for problem in problems])
    return policy.check_survival(tool_use.prompts(problems), tool_use.schemas(problems))


def some_problems(task: Task, count: int) -> list[Problem]:
    """Return up to `count` problems from all over a task."""
    count = min(count, len(task))
    return [task[number * len(task) // count] for number in range(count)]


def check_tasks(policy: Policy, tasks: Sequence[Task | None], config: Config, tool_use: ToolUse | None = None) -> None:
    """Raise at the start of a run for prompts that the model cannot take; the first task is trained on."""
    for task in filter(None, tasks):
        check_prompts(policy, some_problems(task, PROMPTS_DECODED), tool_use)
    if tasks[0] is not None:
        check_positions(policy, tasks[0], config, tool_use)


def check_positions(policy: Policy, task: Task, config: Config, tool_use: ToolUse | None = None) -> None:
    """Raise at the start of a run where a prompt and its response would exceed the model's positions."""
    rollout, observed = config.rollout, 0 if tool_use is None else tool_use.max_observed_tokens
    if rollout.max_prompt_tokens + rollout.max_new_tokens + observed <= policy.context:
        return
    # The longest of some are tokenized: problems may be millions, or slow to make. Later ones are checked as they come.
    problems = [(number, task[number]) for number in range(min(len(task), PROBLEMS_CHECKED))]
    longest = sorted(problems, key=lambda each: -sum(len(message["content"]) for message in each[1].prompt))
    encode_prompts(policy, longest[:PROMPTS_CHECKED], rollout.max_prompt_tokens, rollout.max_new_tokens, tool_use)


def _advice(problem: Problem) -> str:
    # Only problems of a file can be left out: others are made one by one.
    dropped = ", or leave them out with task.long_prompts = 'drop'" if problem.location else ""
    return "raise it, or remove such problems" + dropped


def _named(problem: Problem) -> str:
    """Return where a problem's prompt is, for an error."""
    start = problem.prompt[-1]["content"][:40]
    return (
        f"{problem.location}: the prompt {start!r}" if problem.location else f"a prompt of {problem.source}, {start!r},"
    )
