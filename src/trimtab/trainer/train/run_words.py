"""The numbers of a run, from its metrics, and what summaries and reports say about it in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from trimtab.data import source_paths
from trimtab.own_parts import shown_file
from trimtab.text import command, percent
from trimtab.trainer.config import Config
from trimtab.trainer.model import DEMO_MODELS

LONGEST_WINDOW = 10  # steps that the numbers of the end are averaged over, at most
END_WINDOW = f"the last quarter of the steps, at most {LONGEST_WINDOW}"  # `window_length` in words
ALMOST_NOTHING = 1e-5  # share of tokens; STAPO's paper silences about one in ten thousand
SWEEP = (0.002, 0.01, 0.05, 0.2, 0.5)  # thresholds of the probability to try


@dataclass(frozen=True)
class RunSummary:
    """A run's numbers: start is the first step, end a mean over `window` steps, shares are means over the run."""

    steps: int
    window: int
    accuracy_start: float | None
    accuracy_end: float | None
    score_start: float | None  # held-out, of a rule that returns numbers
    score_end: float | None
    seen: float | None  # share of the held-out problems that were trained on too
    problems: int | None  # held-out ones, if there are fewer than the recipe asks for
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
    # Step 1 is sampled before the first update. A mean over the first steps would hide that a run broke in them.
    first = steps[:1]
    end = steps[-window:]
    accuracy_start, accuracy_end = _held_out(records, "eval/accuracy")
    score_start, score_end = _held_out(records, "eval/score")
    problems = [int(record["eval/problems"]) for record in records if record.get("eval/problems", 0) >= 1]
    return RunSummary(
        steps=int(records[-1]["step"]) if records else 0,
        window=window,
        accuracy_start=accuracy_start,
        accuracy_end=accuracy_end,
        score_start=score_start,
        score_end=score_end,
        seen=next((record["eval/seen_share"] for record in records if "eval/seen_share" in record), None),
        problems=problems[0] if problems else None,
        reward_start=_mean(first, "reward/mean"),
        reward_end=_mean(end, "reward/mean"),
        called_start=_mean(first, "conversation/called_share"),
        called_end=_mean(end, "conversation/called_share"),
        entropy_start=_mean(first, "policy/entropy"),
        entropy_end=_mean(end, "policy/entropy"),
        silenced=_mean(steps, "tokens/silenced_share"),
        boosted=_mean(steps, "tokens/boosted_share"),
        clipped=_mean(steps, "update/clip_share"),
        seconds=sum(record.get(key, 0.0) for record in steps for key in ("time/rollout", "time/update")),
    )


def window_length(steps: int) -> int:
    """Return how many steps the numbers of a run's end are averaged over."""
    # A quarter at most, so that the end of a short run does not reach its start.
    return max(1, min(LONGEST_WINDOW, steps // 4))


def _held_out(records: Sequence[Mapping[str, Any]], name: str) -> tuple[float | None, float | None]:
    """Return a metric of the evaluation before training, and of the last one after it."""
    found = {record["step"]: record[name] for record in records if name in record}
    return found.get(0), found[max(found)] if found and max(found) > 0 else None


def _mean(records: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [record[key] for record in records if math.isfinite(record.get(key, math.nan))]
    return fmean(values) if values else None


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


def _wilson(share: float, problems: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of problems."""
    z = 1.96
    weight = z * z / problems
    half = math.sqrt(weight * share * (1 - share) + weight * weight / 4)
    return (share + weight / 2 - half) / (1 + weight), (share + weight / 2 + half) / (1 + weight)


def silencing_advice(silenced: float | None, objective: Mapping[str, Any], run: str) -> tuple[str, str]:
    """Say if S2T silenced almost nothing, and by which command to see what other thresholds would; else nothing.

    Without the name of a run, its tokens were not recorded, and there is no such command.
    """
    tau_p = objective.get("tau_p")
    if silenced is None or silenced >= ALMOST_NOTHING or not isinstance(tau_p, int | float):
        return "", ""
    said = f"S2T silenced almost nothing ({percent(silenced)} of the tokens), so this was a run nearly without it."
    larger = [f"{value:g}" for value in SWEEP if value > tau_p]
    if not larger or not run:
        return said, ""
    sweep = command("replay", run, "--sweep", f"tau_p={','.join(larger)}")
    return f"{said} What larger values of objective.tau_p (it was {tau_p:g}) would silence, this shows:", sweep


def nothing_to_learn(records: Sequence[Mapping[str, Any]]) -> str:
    """Say that rewards never differed within a group, and what to do; nothing if they did."""
    mixed = [record["groups/mixed_share"] for record in records if "groups/mixed_share" in record]
    if not mixed or max(mixed) > 0:
        return ""
    return (
        "Rewards never differed within a group, so there was nothing to learn from. If all answers are wrong: easier "
        "problems, a warm start, more rollout.samples, or another rule; if all are right: harder problems."
    )


def describe_task(config: Config) -> str:
    """Return the task in a few words."""
    name = config.task.name
    given = config.task.arguments
    if name == "countdown":
        return f"{given['numbers']}-number countdown"
    if name != "arithmetic":
        return f"{name} ({', '.join(map(shown_file, paths))})" if (paths := source_paths(given.get("path"))) else name
    fewest = f"{given['min_terms']} to " if given["min_terms"] else ""
    long = f" of {fewest}{given['terms']} numbers" if given["family"] in {"chain", "words"} else ""
    return f"{given['digits']}-digit {given['family']}{long}"


def describe_model(config: Config) -> str:
    """Return the model in a few words."""
    return "the demo model" if config.model.path in DEMO_MODELS else config.model.path
