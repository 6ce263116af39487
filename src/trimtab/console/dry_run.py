"""The dry run: the resolved recipe, its objective, batch sizes and memory, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from trimtab.console.prompts_text import describe_prompts
from trimtab.data import Task
from trimtab.trainer.config import TASK_TERM, Config
from trimtab.trainer.memory import describe_estimate, longest_response, minibatches
from trimtab.trainer.train import check_problems, resolved_toml


def describe_dry_run(config: Config, gpus: int | None = None) -> str:
    """Return the resolved configuration as TOML, and all that follows from it as comments below.

    With a number of `gpus` the memory is that of each of them.
    """
    problems = _problems(config)
    lines = config.build_objective().explain().splitlines()
    lines += ["", "One step", *_step(config), "", "The run", *_run(config, problems)]
    if problems is not None:
        lines += ["", "Prompts", *describe_prompts(config, *problems)]
    lines += ["", "Memory", *_memory(config), *describe_estimate(config, gpus=gpus)]
    # Comments, so that the whole output is a recipe again: `--dry-run > mine.toml`.
    return resolved_toml(config) + "\n" + "\n".join(f"# {line}".rstrip() for line in lines)


def _step(config: Config) -> list[str]:
    rollout, sizes, passes = config.rollout, minibatches(config), config.update.passes
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
    if config.reward.terms:
        weights = {TASK_TERM: config.reward.weight} | {name: term.weight for name, term in config.reward.terms.items()}
        total = " + ".join(f"{weight:g} x {name}" for name, weight in weights.items())
        lines.append(f"  the reward of a response: {total} (reward.weight, reward.terms)")
    if rollout.dynamic_sampling:
        lines.append(
            f"  dynamic sampling: groups without reward spread are sampled again, {rollout.dynamic_oversample:g} times "
            f"the number missing, for at most {rollout.dynamic_max_rounds} rounds"
        )
    return lines


def _problems(config: Config) -> tuple[Task, Task | None] | None:
    """Return the problems of a run; None if they are on the hub."""
    path = config.task.arguments.get("path")
    # Without a file, gsm8k would be downloaded from the hub just to be counted.
    known = config.task.name != "gsm8k" or (path is not None and Path(path).exists())
    return check_problems(config) if known else None


def _run(config: Config, problems: tuple[Task, Task | None] | None) -> list[str]:
    steps, updates = config.run.steps, len(minibatches(config)) * config.update.passes
    prompts = steps * config.rollout.prompts
    if problems is None:
        epochs = "prompts; how many epochs that is shows once the data set is loaded"
    else:
        size = len(problems[0])
        epochs = f"prompts of a task with {size:,} problems = {prompts / size:.2f} epochs"
    # Dynamic sampling takes further prompts for groups without reward spread.
    at_least = "at least " if config.rollout.dynamic_sampling else ""
    return [
        f"  {steps:,} steps x {_count(updates, 'update')} = {steps * updates:,} updates in all",
        f"  {steps:,} steps x {config.rollout.prompts * config.rollout.samples:,} responses = "
        f"{prompts * config.rollout.samples:,} responses",
        f"  {at_least}{prompts:,} {epochs}",
    ]


def _memory(config: Config) -> list[str]:
    rollout, update = config.rollout, config.update
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
        f"  sampling: at most {at_once:,} responses at once (rollout.batch_size)",
        f"  logits of at most {update.head_chunk:,} tokens exist at one time (update.head_chunk)",
    ]
    # An objective that plans per micro-batch depends on how responses are packed, as other trainers do.
    if config.build_objective().scope == "minibatch":
        lines.append("  none of these changes the update beyond rounding: they only trade memory for speed")
    return lines


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
