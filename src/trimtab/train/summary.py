"""What came of a run, in a few numbers and in a few words. `trimtab train` ends with it, `trimtab compare` averages it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from trimtab.train.config import Config
from trimtab.train.run_folder import RunFolder
from trimtab.train.sparkline import clock, number, percent

LONGEST_WINDOW = 10


@dataclass(frozen=True)
class Outcome:
    """A run's numbers. Those of start and end are means over `window` steps, shares are means over the whole run."""

    steps: int
    window: int
    accuracy_start: float | None
    accuracy_end: float | None
    reward_start: float | None
    reward_end: float | None
    entropy_start: float | None
    entropy_end: float | None
    silenced: float | None
    boosted: float | None
    clipped: float | None
    seconds: float


def outcome(records: Sequence[Mapping[str, Any]]) -> Outcome:
    """The numbers of a run from its metrics; None where a run has no such number."""
    steps = [record for record in records if record["step"] > 0]
    window = max(1, min(LONGEST_WINDOW, len(steps) // 4))
    accuracy = [record["eval/accuracy"] for record in records if "eval/accuracy" in record]
    return Outcome(
        steps=int(records[-1]["step"]) if records else 0,
        window=window,
        accuracy_start=accuracy[0] if accuracy else None,
        accuracy_end=accuracy[-1] if accuracy else None,
        reward_start=_mean(steps[:window], "reward/mean"),
        reward_end=_mean(steps[-window:], "reward/mean"),
        entropy_start=_mean(steps[:window], "policy/entropy"),
        entropy_end=_mean(steps[-window:], "policy/entropy"),
        silenced=_mean(steps, "tokens/silenced_share"),
        boosted=_mean(steps, "tokens/boosted_share"),
        clipped=_mean(steps, "update/clip_share"),
        seconds=sum(record.get(key, 0.0) for record in steps for key in ("time/rollout", "time/update")),
    )


def summarize(config: Config, folder: RunFolder, seconds: float, recipe: str) -> str:
    """One screen on a run that has ended, for someone who sees trimtab for the first time."""
    result = outcome(folder.records())
    lines = [
        "",
        f"Trained {model_words(config)} on {task_words(config)} with {config.build_objective().name}: "
        f"{result.steps} of {config.run.steps} steps, {clock(seconds)}.",
        "",
        *_number_lines(config, result),
        "",
        f"  run folder  {folder.path}",
    ]
    model = folder.path / "model"
    finished = result.steps >= config.run.steps and model.exists()
    if finished:
        lines.append(f"  model       {model}")
    return "\n".join([*lines, "", "Next:", *_next_lines(config, folder.path, finished, recipe)])


def task_words(config: Config) -> str:
    """The task in a few words."""
    task = config.task
    if task.name != "arithmetic":
        return f"{task.name} ({task.path})" if task.path else task.name
    long = f" of {task.terms} numbers" if task.family in {"chain", "words"} else ""
    return f"{task.digits}-digit {task.family}{long}"


def model_words(config: Config) -> str:
    """The model in a few words."""
    return "the demo model" if config.model.path == "demo" else config.model.path


def _number_lines(config: Config, result: Outcome) -> list[str]:
    one = result.window == 1
    ends = "the first and the last step" if one else f"means of the first and the last {result.window} steps"
    rows = [
        (
            "held-out accuracy",
            f"{percent(result.accuracy_start)} -> {percent(result.accuracy_end)}",
            f"on up to {config.run.eval_problems} problems it was not trained on",
        ),
        ("reward", f"{number(result.reward_start)} -> {number(result.reward_end)}", ends),
        (
            "entropy",
            f"{number(result.entropy_start)} -> {number(result.entropy_end)}",
            "how open the next token is (nats); near 0 the model no longer explores",
        ),
        ("silenced", percent(result.silenced), "of tokens, kept from teaching: rare, confident, rewarded"),
        ("boosted", percent(result.boosted), "of tokens, with their weight raised"),
        ("clipped", percent(result.clipped), "of tokens, where the policy had moved too far already"),
    ]
    given = {"silenced": result.silenced, "boosted": result.boosted, "held-out accuracy": result.accuracy_end}
    shown = [row for row in rows if given.get(row[0], 0.0) is not None]
    return [f"  {name:<18} {values:<16}  {note}" for name, values, note in shown]


def _next_lines(config: Config, path: Path, finished: bool, recipe: str) -> list[str]:
    if not finished:
        return [f"  trimtab train --resume {path}   go on where it stopped"]
    other = "grpo" if config.objective["name"] != "grpo" else "stapo"
    name = str(config.objective["name"])
    shown = f"'{name}'" if " " in name or "(" in name else name
    rows = [
        (f"trimtab compare {shown} {other} --recipe {recipe}", "the same run under another objective"),
        (f"trimtab train --resume {path} --set run.steps={2 * config.run.steps}", "train on"),
    ]
    return [f"  {command}   {words}" for command, words in rows]


def _mean(records: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [record[key] for record in records if key in record and math.isfinite(record[key])]
    return fmean(values) if values else None
