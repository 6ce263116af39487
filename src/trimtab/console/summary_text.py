"""The summary of a run: a few numbers from its metrics, and the text that `trimtab train` ends with."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from trimtab.config import Config, run_checkpoints
from trimtab.objectives import entropy_control
from trimtab.policy import DEMO_MODELS
from trimtab.text import clock, number, percent
from trimtab.train import RunFolder, best_evaluation, time_words

LONGEST_WINDOW = 10  # steps that the numbers of start and end are averaged over, at most
END_WINDOW = f"the last quarter of the steps, at most {LONGEST_WINDOW}"  # `window_length` in words
COMMAND_INDENT = "    "
COMPARED_SEEDS = 3  # of each objective, in the comparison that the summary suggests


@dataclass(frozen=True)
class RunSummary:
    """A run's numbers: start and end are means over `window` steps, shares are means over the whole run."""

    steps: int
    window: int
    accuracy_start: float | None
    accuracy_end: float | None
    score_start: float | None  # held-out, of a rule that returns numbers
    score_end: float | None
    problems: int | None  # held-out ones, where there are fewer than the recipe asks for
    reward_start: float | None
    reward_end: float | None
    called_start: float | None  # share of conversations with a successful call
    called_end: float | None
    entropy_start: float | None
    entropy_end: float | None
    silenced: float | None
    boosted: float | None
    clipped: float | None
    seconds: float


def summarize_metrics(records: Sequence[Mapping[str, Any]]) -> RunSummary:
    """Return the numbers of a run from its metrics; None where a run has no such number."""
    steps = [record for record in records if record["step"] > 0]
    window = window_length(len(steps))
    accuracy_start, accuracy_end = _held_out(records, "eval/accuracy")
    score_start, score_end = _held_out(records, "eval/score")
    return RunSummary(
        steps=int(records[-1]["step"]) if records else 0,
        window=window,
        accuracy_start=accuracy_start,
        accuracy_end=accuracy_end,
        score_start=score_start,
        score_end=score_end,
        problems=next(
            (int(record["eval/problems"]) for record in records if record.get("eval/problems", 0) >= 1), None
        ),
        reward_start=_mean(steps[:window], "reward/mean"),
        reward_end=_mean(steps[-window:], "reward/mean"),
        called_start=_mean(steps[:window], "conversation/called_share"),
        called_end=_mean(steps[-window:], "conversation/called_share"),
        entropy_start=_mean(steps[:window], "policy/entropy"),
        entropy_end=_mean(steps[-window:], "policy/entropy"),
        silenced=_mean(steps, "tokens/silenced_share"),
        boosted=_mean(steps, "tokens/boosted_share"),
        clipped=_mean(steps, "update/clip_share"),
        seconds=sum(record.get(key, 0.0) for record in steps for key in ("time/rollout", "time/update")),
    )


def _held_out(records: Sequence[Mapping[str, Any]], name: str) -> tuple[float | None, float | None]:
    """Return a metric of the evaluation before training, and of the last one after it."""
    found = {record["step"]: record[name] for record in records if name in record}
    return found.get(0), found[max(found)] if found and max(found) > 0 else None


def window_length(steps: int) -> int:
    """Return how many steps the numbers of a run's start and end are averaged over."""
    # A quarter at most, so that start and end of a short run do not overlap.
    return max(1, min(LONGEST_WINDOW, steps // 4))


@dataclass(frozen=True)
class AccuracyChange:
    """The difference of two accuracies on so many problems each, with its 95 % interval."""

    difference: float
    low: float
    high: float

    @property
    def certain(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0

    @property
    def words(self) -> str:
        """The difference in percentage points."""
        return f"{100 * self.difference:+.1f} points, 95 % interval {100 * self.low:+.0f} to {100 * self.high:+.0f}"


def accuracy_change(first: float, last: float, problems: int) -> AccuracyChange:
    """Return the change of an accuracy: Newcombe's interval, of two Wilson intervals.

    The two are taken as independent. They are of the same problems, which are not kept one by one: paired, the interval
    would mostly be narrower.
    """
    (low_1, high_1), (low_2, high_2) = (_wilson(share, problems) for share in (first, last))
    change = last - first
    down, up = math.hypot(last - low_2, high_1 - first), math.hypot(high_2 - last, first - low_1)
    return AccuracyChange(change, max(change - down, -1.0), min(change + up, 1.0))


def _wilson(share: float, problems: int, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of problems."""
    weight = z * z / problems
    half = math.sqrt(weight * share * (1 - share) + weight * weight / 4)
    return (share + weight / 2 - half) / (1 + weight), (share + weight / 2 + half) / (1 + weight)


def closing_summary(
    config: Config, folder: RunFolder, seconds: float, report: Path | None = None, processes: int = 1
) -> str:
    """Return one screen on a run that has ended, for someone who sees trimtab for the first time.

    `report` is the file that was written now: one that lies in the folder may be older than the run's last steps.
    """
    records, objective = folder.records(), config.build_objective()
    result = summarize_metrics(records)
    held = entropy_control.control_sentences(records, objective.entropy_target)
    lines = [
        "",
        f"Trained {describe_model(config)} on {describe_task(config)} with {objective.name}: "
        f"{result.steps} of {config.run.steps} steps, {clock(seconds)}.",
        "",
        *_number_lines(result),
        *([f"  {'time':<18} {spent}"] if (spent := time_words(records)) else []),
        *(["", *(f"  {sentence}" for sentence in held)] if held else []),
        "",
        f"  run folder  {folder.path}",
    ]
    model = folder.path / "model"
    finished = result.steps >= config.run.steps and model.exists()
    lines += [f"  model       {model}"] if finished else []
    lines += [f"  report      {report}"] if report else []
    lines += _best_lines(records, folder.path)
    first, last = result.accuracy_start, result.accuracy_end
    if first is not None and last is not None and last < first:
        change = accuracy_change(first, last, result.problems or config.run.eval_problems)
        advice = f"Held-out accuracy fell: try more steps, or a lower update.lr (it was {config.update.lr:g})."
        small = f"Held-out accuracy fell by no more than chance may ({change.words})."
        lines += ["", f"  {advice if change.certain else small}"]
    return "\n".join([*lines, "", "Next:", *_next_lines(config, folder.path, finished, processes)])


def fit_lines(text: str, width: int) -> str:
    """Break the lines of a summary between words, where a terminal would break them anywhere; commands stay whole."""
    wrapper = textwrap.TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(line if line.startswith(COMMAND_INDENT) else wrapper.fill(line) for line in text.split("\n"))


def describe_task(config: Config) -> str:
    """Return the task in a few words."""
    name, given = config.task.name, config.task.arguments
    if name == "countdown":
        return f"{given['numbers']}-number countdown"
    if name != "arithmetic":
        return f"{name} ({given['path']})" if given.get("path") else name
    fewest = f"{given['min_terms']} to " if given["min_terms"] else ""
    long = f" of {fewest}{given['terms']} numbers" if given["family"] in {"chain", "words"} else ""
    return f"{given['digits']}-digit {given['family']}{long}"


def describe_model(config: Config) -> str:
    """Return the model in a few words."""
    return "the demo model" if config.model.path in DEMO_MODELS else config.model.path


def _best_lines(records: Sequence[Mapping[str, Any]], path: Path) -> list[str]:
    """Name the step with the best held-out score, and how to use its checkpoint if there is one."""
    best = best_evaluation(records)
    if best is None or best.later == 0:  # the last one is the best
        return []
    kept = any(saved.name == f"step-{best.step:08d}" for saved in run_checkpoints(path))
    use = f"{path}@{best.step}, as a model or for train --from" if kept else "not kept; run.keep_best = true keeps it"
    return [f"  best step   {best.step}, with a held-out score of {best.score:.3g}: {use}"]


def _number_lines(result: RunSummary) -> list[str]:
    one = result.window == 1
    ends = "the first and the last step" if one else f"means over the first and last {result.window} steps"
    accuracy = f"{percent(result.accuracy_start)} -> {percent(result.accuracy_end)}"
    entropy = f"{number(result.entropy_start)} -> {number(result.entropy_end)}"
    rows = [
        ("held-out accuracy", accuracy, "on problems it was not trained on"),
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


def _next_lines(config: Config, path: Path, finished: bool, processes: int) -> list[str]:
    """Return what to do next, each with its command on a line of its own."""
    several = [] if processes == 1 else ["--gpus", str(processes)]
    resume, steps = ["trimtab", "train", "--resume", str(path), *several], config.run.steps
    if not finished:
        return _command_lines("continue where it stopped", resume)
    name = str(config.objective["name"])
    # A method with attachments is compared with the method alone.
    alone = name.partition("+")[0].strip()
    other = alone if alone != name else "grpo" if name != "grpo" else "stapo"
    # The run's own recipe: that of the user may have been changed by --set.
    compared = ["trimtab", "compare", name, other, "--seeds", str(COMPARED_SEEDS)]
    compared += ["--recipe", str(path / "config.toml")]
    cost = f"{2 * COMPARED_SEEDS} runs with run.steps = {steps}"
    return [
        *_command_lines(f"compare with another objective ({cost})", compared),
        *_command_lines("train for longer", [*resume, "--set", f"run.steps={2 * steps}"]),
    ]


def _command_lines(purpose: str, command: Sequence[str]) -> list[str]:
    return [f"  {purpose}:", COMMAND_INDENT + shlex.join(command)]


def _mean(records: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [record[key] for record in records if math.isfinite(record.get(key, math.nan))]
    return fmean(values) if values else None
