"""The prompts of a run in a dry run: problems that occur twice, a histogram of lengths, one as the model reads it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch

from trimtab.data import FixedTask, Task, prompts_per_epoch
from trimtab.text import cut_middle, printable
from trimtab.trainer.config import Config, base_model
from trimtab.trainer.memory import known_positions
from trimtab.trainer.model import Policy, tokenizer_at_hand
from trimtab.trainer.train import (
    build_tool_use,
    build_tools,
    check_prompts,
    longest_prompt,
    prompt_lengths,
    repeated_problems,
    some_problems,
)

MOST_COUNTED = 1000  # prompts
MOST_OPENED = 32  # those of an environment, which starts a process for each
BINS, BAR = 8, 40  # of the histogram: lines, and the width of the longest bar
MOST_SHOWN = 2000  # characters of the prompt that is shown


def describe_prompts(config: Config, task: Task, test_task: Task | None) -> list[str]:
    """Return lines on the prompts of a run; without their tokens if the tokenizer is not on this machine."""
    lines = _files(task)
    lines += [f"  {sentence}" for sentence in repeated_problems(config, task, test_task).describe()]
    try:
        return lines + _tokenized(config, task)
    except ValueError as error:  # the rest of a dry run needs no tokenizer
        return [*lines, f"  a run stops before its first step: {error}"]


def _tokenized(config: Config, task: Task) -> list[str]:
    """Return the lengths of prompts, and one of them as the model reads it."""
    base = base_model(config.model.path)
    tokenizer = tokenizer_at_hand(base)
    if tokenizer is None:
        return [f"  the tokenizer of {base} is not on this machine yet: their lengths are not known"]
    # Without weights: of the model only the number of positions is asked for.
    shape = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=known_positions(base)))
    policy = Policy(shape, tokenizer, torch.device("cpu"), chat=config.model.chat)
    tools = build_tools(config)
    try:
        tool_use = build_tool_use(config, policy, tools)
        opened = tools is not None and tools.has_opening
        problems = some_problems(task, MOST_OPENED if opened else MOST_COUNTED)
        read = check_prompts(policy, problems[:1], tool_use)
        limit = longest_prompt(policy, config, tool_use)
        lines = _lengths(config, prompt_lengths(policy, problems, limit, tool_use), len(task), limit)
    finally:
        if tools is not None:
            tools.close()
    lines += ["  the first one as the model reads it:"] if read else []
    return lines + [f"    | {line}" for text in read for line in printable(cut_middle(text, MOST_SHOWN)).split("\n")]


def _files(task: Task) -> list[str]:
    weights = task.weights if isinstance(task, FixedTask) else ()
    return [
        f"  {count:,} prompts of an epoch are of a file with {size:,} problems (weight {weight:g} in task.path)"
        for (size, weight), count in zip(weights, prompts_per_epoch(weights), strict=True)
    ]


def _lengths(config: Config, lengths: Sequence[int], size: int, limit: int) -> list[str]:
    """Return how long prompts are, and how many of them are too long."""
    fit = [length for length in lengths if length <= limit]
    some = f"{len(lengths):,} of {size:,} prompts" if len(lengths) < size else f"{size:,} prompts"
    lines = _histogram(fit, some) if fit else []
    if long := len(lengths) - len(fit):
        drops = config.task.arguments.get("long_prompts") == "drop"
        what = "they are left out (task.long_prompts)" if drops else "a run stops at the first of them"
        lines.append(
            f"  {long:,} of {some} have more than {limit:,} tokens (rollout.max_prompt_tokens, or the model's context "
            f"less rollout.max_new_tokens): {what}"
        )
    return lines


def _histogram(lengths: Sequence[int], some: str) -> list[str]:
    low, high = min(lengths), max(lengths)
    width = (high - low) // BINS + 1
    counts = [0] * ((high - low) // width + 1)
    for length in lengths:
        counts[(length - low) // width] += 1
    digits = len(f"{low + len(counts) * width - 1:,}")
    mean = sum(lengths) / len(lengths)
    lines = [f"  {some}: {low:,} to {high:,} tokens, {mean:,.1f} on average"]
    for number, count in enumerate(counts):
        first = low + number * width
        bar = "*" * -(-BAR * count // max(counts))
        lines.append(f"    {first:{digits},} to {first + width - 1:{digits},}  {bar:<{BAR}} {count:,}")
    return lines
