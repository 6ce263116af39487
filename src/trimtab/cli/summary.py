"""The summary of a run: a few numbers from its metrics, and the text that `trimtab train` ends with."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.objectives import entropy_control
from trimtab.own_parts import is_own
from trimtab.record import Collapse, find_fall, iter_step_lines
from trimtab.text import clock, command, number, one_line, percent, shorten
from trimtab.trainer.config import POOLS, Config, list_checkpoints, run_checkpoints
from trimtab.trainer.train import (
    AccuracyChange,
    RunFolder,
    RunSummary,
    accuracy_change,
    best_evaluation,
    describe_model,
    describe_task,
    nothing_to_learn,
    silencing_advice,
    summarize_metrics,
    time_words,
)

COMMAND_INDENT = "    "
CANDIDATES = "s2t/candidate_share"  # logged by every objective with S2T
MOST_ALARMS = 30  # names that the summary lists
LOWER_LR = 3  # divides the learning rate that is advised after a fall
COMPARED_SEEDS = 3  # of each objective, in the comparison that the summary suggests


def closing_summary(
    config: Config,
    folder: RunFolder,
    seconds: float,
    report: Path | None = None,
    processes: int = 1,
    *,
    has_model: bool = True,
) -> str:
    """Return one screen on a run that has ended, for someone who sees trimtab for the first time.

    `report` is the file that was written now: one that lies in the folder may be older than the run's last steps.
    Without `has_model`, so may the model.
    """
    records = folder.records()
    objective = config.build_objective()
    result = summarize_metrics(records)
    fall = find_fall(records)
    change = None if fall else _held_out_change(result, config)
    idle = nothing_to_learn(records)
    rang = _alarms(folder)

    title = (
        f"Trained {describe_model(config)} on {describe_task(config)} with {objective.name}: "
        f"{result.steps} of {config.run.steps} steps, {clock(seconds)}."
    )
    numbers = _number_lines(result, _held_out_note(config, result))
    if spent := time_words(records):
        numbers.append(f"  {'time':<18} {spent}")
    numbers += _pool_lines(records)
    held = [f"  {sentence}" for sentence in entropy_control.control_sentences(records, objective.entropy_target)]

    finished = result.steps >= config.run.steps and folder.model.exists() and has_model
    files = [f"  run folder  {folder.path}"]
    files += [f"  model       {folder.model}"] if finished else []
    files += [f"  report      {report}"] if report else []
    files += _best_lines(records, folder.path)

    alarms = f"Alarms that rang: {rang}." if rang else ""
    trouble = [f"  {sentence}" for sentence in (*_fall_lines(fall, change, config), idle, alarms) if sentence]
    # Of responses that taught nothing, no other threshold would have silenced more.
    silenced = [] if idle else _silenced_lines(result, config, folder, records)

    longer = not (fall or idle or (change is not None and change.high < 0))
    following = _command_lines("what the alarms advise", ["alarms", str(folder.path)]) if rang else []
    following += _back_lines(config, folder, fall.step) if fall else []
    following += _next_lines(config, folder, finished, processes, result.steps, longer=longer)
    blocks = [[title], numbers, held, files, trouble, silenced, ["Next:", *following]]
    return "\n" + "\n\n".join("\n".join(block) for block in blocks if block)


def _silenced_lines(
    result: RunSummary, config: Config, folder: RunFolder, records: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return what to try if S2T silenced almost nothing."""
    if not any(CANDIDATES in record for record in records):
        return []
    run = str(folder.path) if (folder.path / "tokens").is_dir() else ""
    said, sweep = silencing_advice(result.silenced, config.objective, run)
    return [f"  {said}", *([COMMAND_INDENT + sweep] if sweep else [])] if said else []


def _held_out_change(result: RunSummary, config: Config) -> AccuracyChange | None:
    """Return how the held-out accuracy changed; None without two evaluations."""
    first = result.accuracy_start
    last = result.accuracy_end
    if first is None or last is None:
        return None
    return accuracy_change(first, last, result.problems or config.run.eval_problems)


def _fall_lines(fall: Collapse | None, change: AccuracyChange | None, config: Config) -> list[str]:
    """Say that a run collapsed, or that its held-out accuracy is lower than before it."""
    if fall is not None:
        return [f"The run {fall.words}."]
    if change is None or change.difference >= 0:
        return []
    if not change.certain:
        return [f"Held-out accuracy fell by no more than chance may ({change.words})."]
    return [f"Held-out accuracy fell ({change.words}): try a lower update.lr (it was {config.update.lr:g})."]


def _alarms(folder: RunFolder) -> str:
    """Name the alarms that rang, each with its first step."""
    first: dict[str, int] = {}
    for line in iter_step_lines(folder.alarms, lambda problem: None):
        if len(first) < MOST_ALARMS:
            first.setdefault(shorten(one_line(str(line.get("alarm")))), line["step"])
    return ", ".join(f"{name} (step {step:,})" for name, step in first.items())


def _back_lines(config: Config, folder: RunFolder, fall: int) -> list[str]:
    """Return how to train again from before a fall, with a lower learning rate."""
    lower = ["--set", f"update.lr={config.update.lr / LOWER_LR:.2g}"]
    steps = [int(path.name.removeprefix("step-")) for path in list_checkpoints(folder.checkpoints)]
    before = max((step for step in steps if 0 < step < fall), default=None)
    if before is None:
        again = ["train", str(folder.config), *lower]
        return _command_lines("train again with a lower learning rate", again)
    back = ["train", "--from", f"{folder.path}@{before}", *lower]
    return _command_lines("go back to a step before the fall, with a lower learning rate", back)


def fit_lines(text: str, width: int) -> str:
    """Break the lines of a summary between words, as a terminal would not; commands stay whole."""
    wrapper = textwrap.TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(line if line.startswith(COMMAND_INDENT) else wrapper.fill(line) for line in text.split("\n"))


def _held_out_note(config: Config, result: RunSummary) -> str:
    """Return what held-out problems are; that they were not trained on only where that is known."""
    if result.seen:
        return f"on held-out problems; {percent(result.seen)} of them were trained on too"
    # A program may return any problems, and the run behind a checkpoint may have had others.
    known = not is_own(config.task.name) and config.model.start_from is None
    return "on problems it was not trained on" if known else "on held-out problems"


def _best_lines(records: Sequence[Mapping[str, Any]], path: Path) -> list[str]:
    """Name the step with the best held-out score, and how to use its checkpoint if there is one."""
    best = best_evaluation(records)
    if best is None or best.later == 0:
        return []
    scores = [record.get("eval/score", record.get("eval/accuracy")) for record in records]
    if [score for score in scores if score is not None][-1] == best.score:  # the last one is as good
        return []
    kept = any(saved.name == f"step-{best.step:08d}" for saved in run_checkpoints(path))
    use = f"{path}@{best.step}, as a model or for train --from" if kept else "not kept; run.keep_best = true keeps it"
    return [f"  best step   {best.step}, with a held-out score of {best.score:.3g}: {use}"]


def _number_lines(result: RunSummary, held_out: str) -> list[str]:
    one = result.window == 1
    ends = "the first and the last step" if one else f"the first step, and the mean over the last {result.window}"
    accuracy = f"{percent(result.accuracy_start)} -> {percent(result.accuracy_end)}"
    entropy = f"{number(result.entropy_start)} -> {number(result.entropy_end)}"
    rows = [
        ("held-out accuracy", accuracy, held_out),
        ("held-out score", f"{number(result.score_start)} -> {number(result.score_end)}", "mean number of the rule"),
        ("reward", f"{number(result.reward_start)} -> {number(result.reward_end)}", ends),
        (
            "calls",
            f"{percent(result.called_start)} -> {percent(result.called_end)}",
            "of answers have a successful one",
        ),
        ("entropy", entropy, "near 0 the model no longer explores"),
        ("silenced", percent(result.silenced), "of tokens: their gradient was set to zero"),
        ("boosted", percent(result.boosted), "of tokens: their weight was raised"),
        ("clipped", percent(result.clipped), "of tokens: the policy had moved too far"),
    ]
    # A run whose objective silences nothing, or without evaluation, has no such line.
    optional = {"silenced": result.silenced, "boosted": result.boosted, "held-out accuracy": result.accuracy_start}
    optional |= {"calls": result.called_start, "held-out score": result.score_start}
    shown = [row for row in rows if optional.get(row[0], 0.0) is not None]
    return [f"  {name:<18} {values:<16}  {note}" for name, values, note in shown]


def _pool_lines(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how many problems the pools of a curriculum have at the end; nothing without pools."""
    sizes = {name: records[-1].get(f"curriculum/pool_{name}") for name in POOLS} if records else {}
    shown = ", ".join(f"{int(size):,} {name}" for name, size in sizes.items() if size is not None)
    return [f"  {'problems':<18} {shown}"] if shown else []


def _next_lines(
    config: Config, folder: RunFolder, finished: bool, processes: int, last: int, longer: bool
) -> list[str]:
    """Return what to do next, each with its command on its own line.

    `last` is the run's last step; `longer`: more steps may help.
    """
    path, saved = folder.path, [int(each.name.removeprefix("step-")) for each in list_checkpoints(folder.checkpoints)]
    behind = not saved or saved[-1] < last
    start = f"from step {saved[-1]}, the last that is saved" if saved else "from the beginning: nothing is saved"
    several = [] if processes == 1 else ["--gpus", str(processes)]
    resume = ["train", "--resume", str(path), *several]
    steps = config.run.steps
    if not finished:
        return _command_lines(f"continue {start}" if behind else "continue where it stopped", resume)
    name = str(config.objective["name"])
    # A method with attachments is compared with the method without them.
    bare = name.partition("+")[0].strip()
    other = bare if bare != name else "grpo" if name != "grpo" else "stapo"
    # The run's own recipe: that of the user may have been changed by --set.
    compared = ["compare", name, other, "--seeds", str(COMPARED_SEEDS)]
    compared += ["--recipe", str(path / "config.toml")]
    cost = f"{2 * COMPARED_SEEDS} runs with run.steps = {steps}"
    train_longer = f"train for longer, {start}" if behind else "train for longer"
    return [
        *_command_lines(f"compare with another objective ({cost})", compared),
        *(_command_lines(train_longer, [*resume, "--set", f"run.steps={2 * steps}"]) if longer else []),
    ]


def _command_lines(purpose: str, words: Sequence[str]) -> list[str]:
    return [f"  {purpose}:", COMMAND_INDENT + command(*words)]
