"""The dry run: the resolved recipe, its objective, batch sizes, prompts and memory, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

from trimtab.data import FixedTask, Task, prompts_per_epoch
from trimtab.text import cut_middle, printable
from trimtab.trainer.config import TASK_TERM, Config, base_model
from trimtab.trainer.memory import describe_estimate, known_positions, longest_response, minibatches
from trimtab.trainer.model import Policy, tokenizer_at_hand
from trimtab.trainer.train import (
    build_tool_use,
    build_tools,
    check_problems,
    check_prompts,
    longest_prompt,
    prompt_lengths,
    repeated_problems,
    resolved_toml,
    some_problems,
)

MOST_COUNTED = 1000  # prompts
MOST_OPENED = 32  # those of an environment, which starts a process for each
BINS, BAR = 8, 40  # of the histogram: lines, and the width of the longest bar
MOST_SHOWN = 2000  # characters of the prompt that is shown


def describe_dry_run(config: Config, gpus: int | None = None) -> str:
    """Return the resolved configuration as TOML, and all that follows from it as comments below.

    With a number of `gpus` the memory is that of each of them.
    """
    problems = _problems(config)
    lines = config.build_objective().explain().splitlines()
    lines += ["", "One step", *_step(config), "", "The run", *_run(config, problems)]
    if problems is not None and not config.has_agent:  # an agent writes its prompts itself
        lines += ["", "Prompts", *describe_prompts(config, *problems)]
    lines += ["", "Memory", *_memory(config), *describe_estimate(config, gpus=gpus)]
    # Comments, so that the whole output is a recipe again: `--dry-run > mine.toml`.
    return resolved_toml(config) + "\n" + "\n".join(f"# {line}".rstrip() for line in lines)


def _step(config: Config) -> list[str]:
    rollout = config.rollout
    sizes = minibatches(config)
    passes = config.update.passes
    each = f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"
    repeated, key = (f" in each of {passes} passes", ", update.passes") if passes > 1 else ("", "")
    lines = [
        f"  {rollout.prompts:,} prompts x {rollout.samples} samples = {sum(sizes):,} responses, in groups of "
        f"{rollout.samples} (rollout.prompts, rollout.samples)",
        f"  cut into {_count(len(sizes), 'mini-batch', 'mini-batches')} of {each} responses (whole groups), "
        f"one update each{repeated}: {_count(len(sizes) * passes, 'update')} per step (update.per_step{key})",
    ]
    if len(sizes) < config.update.per_step:
        lines.append(
            f"  update.per_step = {config.update.per_step} is more than the number of groups: "
            f"there are only {len(sizes)} mini-batches"
        )
    if len(sizes) * passes == 1:
        lines.append("  with one update per step the policy is the one that sampled: ratios are 1, nothing is clipped")
    if config.has_agent:
        agent = config.agent
        named = " ".join(agent.command) or str(config.agent_function)
        lines += [
            f"  the agent {printable(named)} runs once for each, at most {agent.concurrency:,} at a time, for at most "
            f"{agent.timeout:g} s (agent.concurrency, agent.timeout)",
            f"  a rollout samples at most {rollout.max_new_tokens:,} tokens in all, and messages and answer of a "
            f"request have at most {rollout.max_prompt_tokens + rollout.max_new_tokens:,} (rollout.max_new_tokens, "
            "rollout.max_prompt_tokens)",
        ]
    if config.reward.terms:
        weights = {TASK_TERM: config.reward.weight} | {name: term.weight for name, term in config.reward.terms.items()}
        total = " + ".join(f"{weight:g} x {name}" for name, weight in weights.items())
        lines.append(f"  the reward of a response: {total} (reward.weight, reward.terms)")
    if config.gates:
        refused = "without reward spread" if config.gates == ["mixed"] else f"that {', '.join(config.gates)} refuse"
        lines.append(
            f"  dynamic sampling: groups {refused} are sampled again, {rollout.dynamic_oversample:g} times "
            f"the number missing, for at most {rollout.dynamic_max_rounds} rounds"
        )
    if config.curriculum.problems != "uniform":
        lines.append(f"  the next problems: {printable(config.curriculum.problems)} (curriculum.problems)")
    return lines


def _problems(config: Config) -> tuple[Task, Task | None] | None:
    """Return the problems of a run; None if they are on the hub."""
    path = config.task.arguments.get("path")
    # Without a file, gsm8k would be downloaded from the hub just to be counted.
    known = config.task.name != "gsm8k" or (path is not None and Path(path).exists())
    return check_problems(config) if known else None


def _run(config: Config, problems: tuple[Task, Task | None] | None) -> list[str]:
    steps = config.run.steps
    updates = len(minibatches(config)) * config.update.passes
    prompts = steps * config.rollout.prompts
    if problems is None:
        epochs = "prompts; how many epochs that is shows once the data set is loaded"
    else:
        size = len(problems[0])
        epochs = f"prompts of a task with {size:,} problems = {prompts / size:.2f} epochs"
    # Further prompts are sampled in place of groups that are refused.
    at_least = "at least " if config.gates else ""
    return [
        f"  {steps:,} steps x {_count(updates, 'update')} = {steps * updates:,} updates in all",
        f"  {steps:,} steps x {config.rollout.prompts * config.rollout.samples:,} responses = "
        f"{prompts * config.rollout.samples:,} responses",
        f"  {at_least}{prompts:,} {epochs}",
    ]


def _memory(config: Config) -> list[str]:
    rollout = config.rollout
    update = config.update
    longest, largest = longest_response(config), max(minibatches(config))
    fit = update.token_budget // longest
    if fit:
        packing = (
            f": at most {_count(fit, 'response')} of that length in one forward pass (a micro-batch), so the "
            f"{_count(largest, 'response')} of an update take at most {_count(-(-largest // fit), 'pass', 'passes')}"
        )
    else:
        packing = (
            " is less than one response of that length: such a response is a micro-batch of its own, of up to "
            f"{longest:,} tokens"
        )
    at_once = max(1, rollout.batch_size // rollout.samples) * rollout.samples  # whole groups
    parts = {"prompt": ["max_prompt_tokens"], "response": ["max_new_tokens"]}
    sizes = [rollout.max_prompt_tokens, rollout.max_new_tokens]
    if rollout.max_observed_tokens:
        parts["replies of tools"] = ["max_turns", "max_observation_tokens"]
        sizes.append(rollout.max_observed_tokens)
    keys = ", ".join(f"rollout.{key}" for names in parts.values() for key in names)
    lines = [
        f"  {' + '.join(parts)} are at most {' + '.join(f'{size:,}' for size in sizes)} = {longest:,} tokens ({keys})",
        f"  update.token_budget = {update.token_budget:,}{packing}",
        f"  sampling: at most {at_once:,} responses at once (rollout.batch_size), and on a GPU as many of them as the "
        "KV cache holds (rollout.kv_cache_memory)",
        f"  logits of at most {update.head_chunk:,} tokens exist at one time (update.head_chunk)",
    ]
    # An objective that plans per micro-batch depends on how responses are packed, as other trainers do.
    if config.build_objective().scope == "minibatch":
        lines.append("  none of these changes the update beyond rounding: they only trade memory for speed")
    return lines


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


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
