"""The figures of a stress test: what became of every run, and how far each objective could be pushed."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Annotated, Any

from pydantic import Field

from trimtab.collapse import HOLD_STEPS, LOW, MIN_BEST, find_fall
from trimtab.console import summarize_metrics
from trimtab.experiments.compare import RunOutcome
from trimtab.experiments.stress.grid import Axis, Cell, as_number
from trimtab.step_lines import LAST_STEP, iter_step_lines

ENTROPY_BAND = (0.22, 0.42)  # nats: where STARE's paper holds the entropy, for its target of 0.3
SURVIVING_SHARE = 2 / 3  # of the seeds, for a setting to count as survived
LEARNED = 0.02  # accuracy above a start near 0
CURVES = ("eval/accuracy", "eval/score", "reward/accuracy", "policy/entropy", "groups/mixed_share")
TOUCHED = ("silenced", "boosted", "damped", "masked", "dropped", "penalized", "clipped")
FELL = "fell"  # begins the end, in words, of a run that ended low
RESAMPLES = 2_000

Step = Annotated[int, Field(ge=0, le=LAST_STEP)]  # checked where figures are read from a file


@dataclass(frozen=True)
class RunFigures:
    """What became of a run; `survived` is None if it failed or is not finished."""

    cell: Cell
    seed: int
    folder: str
    state: str
    why: str
    survived: bool | None
    end: str
    collapse_step: Step | None
    steps: Step
    accuracy_start: float | None
    accuracy_end: float | None
    entropy_end: float | None
    in_band: float | None
    touched: dict[str, float]
    seconds: float | None
    curves: dict[str, list[tuple[Step, float]]]
    score_end: float | None = None  # held-out, of a rule that returns numbers

    @property
    def ended_low(self) -> bool:
        """Whether it ended below half of its best accuracy, too soon to tell whether that lasts."""
        return self.survived is False and self.collapse_step is None and self.end.startswith(FELL)

    @property
    def never_learned(self) -> bool:
        """Whether it did not survive although it neither collapsed nor fell."""
        return self.survived is False and self.collapse_step is None and not self.ended_low

    def as_json(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        table = asdict(self)
        return {**table.pop("cell"), **table}


def run_figures(cell: Cell, outcome: RunOutcome, came_back: bool = False) -> RunFigures:
    """Judge a run by its metrics; `came_back`: it was stopped since it had collapsed, and then had not."""
    run = outcome.run
    records = run.folder.records()
    summary = summarize_metrics(records)
    survived, end, step = _judge(outcome, records, came_back)
    entropies = [record["policy/entropy"] for record in records if "policy/entropy" in record]
    low, high = ENTROPY_BAND
    shares = {name: f"tokens/{name}_share" if name != "clipped" else "update/clip_share" for name in TOUCHED}
    touched = {name: [r[metric] for r in records if metric in r] for name, metric in shares.items()}
    return RunFigures(
        cell=cell,
        seed=run.seed,
        folder=run.name,
        state=outcome.state,
        why=outcome.why,
        survived=survived,
        end=end,
        collapse_step=step,
        steps=summary.steps,
        accuracy_start=summary.accuracy_start,
        accuracy_end=summary.accuracy_end,
        entropy_end=summary.entropy_end,
        in_band=fmean(low <= value <= high for value in entropies) if entropies else None,
        touched={name: fmean(values) for name, values in touched.items() if values},
        seconds=summary.seconds or None,
        curves={name: [(int(r["step"]), round(r[name], 6)) for r in records if name in r] for name in CURVES},
        score_end=summary.score_end,
    )


def _judge(
    outcome: RunOutcome, records: Sequence[Mapping[str, float]], came_back: bool
) -> tuple[bool | None, str, int | None]:
    """Return whether a run survived, how it ended in words, and the step at which it collapsed."""
    if not outcome.counts:
        return None, f"{outcome.state}: {outcome.why}", None
    last = int(records[-1]["step"]) if records else 0
    # A run whose weights are no longer finite ends in a step that is not logged.
    if any(line["step"] > last for line in iter_step_lines(outcome.run.folder.nonfinite, lambda problem: None)):
        return False, f"not finite at step {last + 1}", last + 1
    fall = find_fall(records)
    if fall and fall.kind != LOW:
        return False, fall.words, fall.step
    if came_back:
        return None, f"unfinished: it came back in step {last}, as it was being stopped", None
    return *((False, fall.words) if fall else _judge_end(records, last)), None


def _judge_end(records: Sequence[Mapping[str, float]], last: int) -> tuple[bool | None, str]:
    """Return whether a run that did not fall survived, and how it ended."""
    if last <= HOLD_STEPS:
        return None, f"too short to be judged: {last} steps, and a collapse lasts {HOLD_STEPS} or more"
    # As for a collapse, the mean of a rule's numbers stands for the accuracy.
    word = "score" if any("eval/score" in record for record in records) else "accuracy"
    found = [record[f"eval/{word}"] for record in records if f"eval/{word}" in record]
    if found and found[0] < MIN_BEST and max(found[-2:]) < found[0] + LEARNED:
        return False, f"never learned: {word} {found[-1]:.2f} after {last} steps"
    return True, "survived"


@dataclass(frozen=True)
class Margin:
    """The strongest stress that an objective survives, None if none; low and high are its 95 % interval over seeds.

    `multiple` is the margin as a multiple of the first objective's, where both are numbers.
    """

    value: str | None
    low: str | None
    high: str | None
    multiple: float | None = None
    multiple_low: float | None = None
    multiple_high: float | None = None


def margins(runs: Sequence[RunFigures], objectives: Sequence[str], axis: Axis) -> dict[str, Margin]:
    """Return the margin of every objective along an axis, with intervals by a bootstrap over paired seeds."""
    judged = [run for run in runs if run.cell.axis == axis.key and run.survived is not None]
    seeds = sorted({run.seed for run in judged})
    values = ordered_values(axis, {run.cell.value for run in judged})
    lived = _by_value(judged)
    # The same resampled seeds for every objective: runs of one seed see the same problems.
    chance = random.Random(0)
    samples = [Counter(chance.choices(seeds, k=len(seeds))) for _ in range(RESAMPLES)] if len(seeds) > 1 else []
    once = dict.fromkeys(seeds, 1)

    def margin(objective: str, chosen: Mapping[int, int]) -> str | None:
        mine = lived.get(objective, {})
        return next((value for value in reversed(values) if value in mine and _survives(mine[value], chosen)), None)

    first = [margin(objectives[0], chosen) for chosen in samples]
    found = {}
    for objective in objectives:
        each = [margin(objective, chosen) for chosen in samples]
        ranks = [-1 if value is None else values.index(value) for value in each]
        low, high = (None if at is None or at < 0 else values[int(at)] for at in _interval(ranks))
        ratios = [_ratio(mine, theirs) for mine, theirs in zip(each, first, strict=True)]
        multiples = _interval([ratio for ratio in ratios if ratio is not None])
        point = margin(objective, once)
        found[objective] = Margin(point, low, high, _ratio(point, margin(objectives[0], once)), *multiples)
    return found


def stable_value(runs: Sequence[RunFigures], objectives: Sequence[str], axis: Axis) -> str | None:
    """Return the strongest stress that every objective survives, None if there is none."""
    mine = [run for run in runs if run.cell.axis == axis.key]
    survived = [survivors([run for run in mine if run.cell.objective == name]) for name in objectives]
    # With a search not every objective was run at every value, and one may survive more than what breaks it.
    values = ordered_values(axis, {run.cell.value for run in mine})
    return next((value for value in reversed(values) if all(each.get(value) for each in survived)), None)


def median_of(runs: Sequence[RunFigures], figure: Callable[[RunFigures], float | None]) -> float | None:
    """Return the median of a figure over the runs that have it."""
    values = [value for run in runs if (value := figure(run)) is not None]
    return median(values) if values else None


def survivors(runs: Sequence[RunFigures]) -> dict[str, bool]:
    """Return which values of an axis the runs of one objective survive."""
    return {
        value: _survives(lived, dict.fromkeys(lived, 1))
        for by_value in _by_value([run for run in runs if run.survived is not None]).values()
        for value, lived in by_value.items()
    }


def ordered_values(axis: Axis, values: set[str]) -> list[str]:
    """Return values in the order of rising stress."""
    numbers = {value: as_number(value) for value in values}
    if not values or None in numbers.values():
        return [value for value in axis.values if value in values]
    first, last = as_number(axis.values[0]) or 0.0, as_number(axis.values[-1]) or 0.0
    return sorted(values, key=lambda value: numbers[value] or 0.0, reverse=first > last)


def _by_value(judged: Sequence[RunFigures]) -> dict[str, dict[str, dict[int, bool]]]:
    """Return which seeds survived, by objective and value."""
    table: dict[str, dict[str, dict[int, bool]]] = {}
    for run in judged:
        table.setdefault(run.cell.objective, {}).setdefault(run.cell.value, {})[run.seed] = bool(run.survived)
    return table


def _survives(lived: Mapping[int, bool], chosen: Mapping[int, int]) -> bool:
    """Return whether enough of the chosen seeds, each with its count, are known to survive."""
    alive = sum(chosen.get(seed, 0) for seed, alive in lived.items() if alive)
    return alive > 0 and alive >= SURVIVING_SHARE * sum(chosen.values())


def _ratio(mine: str | None, theirs: str | None) -> float | None:
    numbers = [None if value is None else as_number(value) for value in (mine, theirs)]
    if None in numbers or not numbers[1]:
        return None
    assert numbers[0] is not None
    return numbers[0] / numbers[1]


def _interval(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Return the 2.5 % and 97.5 % quantiles: each one of the values, since margins are values of the grid."""
    if not values:
        return None, None
    ordered = sorted(values)
    return ordered[math.floor(0.025 * len(values))], ordered[math.floor(0.975 * len(values))]
