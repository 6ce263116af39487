"""How far each objective can be pushed along an axis: margins, prices and survivors, in words, tables and a file."""

from __future__ import annotations

import json
import math
import random
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from trimtab.experiments.grid.plan import MAX_RUNS, Axis, Grid, RunOutcome, as_number
from trimtab.files import read_bounded
from trimtab.record import HOLD_STEPS, LAST_STEP, LOW, MIN_BEST, find_fall, iter_step_lines
from trimtab.text import NOTHING, markdown_table, number, percent, shorten
from trimtab.trainer.train import summarize_metrics

SURVIVING_SHARE = 2 / 3  # of the seeds, for a setting to count as survived
RESAMPLES = 2_000
HEADS = ["objective", "margin", "times the first", "accuracy", "collapse at step", "entropy in band", "touched", "s"]
LEGEND = (
    "Margin: the strongest stress that {survivors}. Accuracy, seconds and what follows: means over the runs at "
    "{stable}. Collapse: median step over the runs that collapsed. Entropy in band: share of steps between {low} and "
    "{high} nats. Touched: share of tokens with another weight than 1, or clipped."
)
SURVIVORS = {1: "the one seed survives", 2: "both seeds survive"}  # by number of seeds, as SURVIVING_SHARE says
INTERVAL = ", in brackets its 95 % interval over seeds"
NO_STABLE = "the weakest stress, since no setting is survived by all"
FILE = "stress.json"
LARGEST = 200_000_000  # bytes: some ten thousand runs
MOST_CELLS = 10 * MAX_RUNS  # objectives times values


@dataclass(frozen=True)
class Margin:
    """The strongest stress that an objective survives, None if none; low and high are its 95 % interval over seeds.

    `multiple` is the margin as a multiple of the first objective's, if both are numbers.
    """

    value: str | None
    low: str | None
    high: str | None
    multiple: float | None = None
    multiple_low: float | None = None
    multiple_high: float | None = None


@dataclass(frozen=True)
class AxisTable:
    """What is known about one axis: the runs by objective and value, and what follows from them."""

    axis: Axis
    objectives: Sequence[str]
    runs: Sequence[RunFigures]

    @cached_property
    def values(self) -> list[str]:
        """The values that were run, in the order of rising stress."""
        found = {run.value for run in self.runs}
        numbers = {value: as_number(value) for value in found}
        if not found or None in numbers.values():
            return [value for value in self.axis.values if value in found]
        first, last = (as_number(self.axis.values[at]) or 0.0 for at in (0, -1))
        return sorted(found, key=lambda value: numbers[value] or 0.0, reverse=first > last)

    @cached_property
    def margins(self) -> dict[str, Margin]:
        """The margin of every objective, with intervals by a bootstrap over paired seeds."""
        seeds = sorted({run.seed for run in self.runs if run.survived is not None})
        # The same resampled seeds for every objective: runs of one seed see the same problems.
        chance = random.Random(0)
        samples = [Counter(chance.choices(seeds, k=len(seeds))) for _ in range(RESAMPLES)] if len(seeds) > 1 else []
        found = {name: self._margins(name, [Counter(seeds), *samples]) for name in self.objectives}
        return {name: self._with_interval(mine, found[self.objectives[0]]) for name, mine in found.items()}

    def _margins(self, objective: str, samples: Sequence[Counter[int]]) -> list[str | None]:
        """Return the strongest value that enough seeds survive, for every sample of seeds."""
        cells = [(value, self.cell(objective, value)) for value in reversed(self.values)]
        alive = [(value, [run.seed for run in runs if run.survived]) for value, runs in cells]
        return [
            next((v for v, seeds in alive if _enough(sum(chosen[s] for s in seeds), chosen.total())), None)
            for chosen in samples
        ]

    def _with_interval(self, mine: Sequence[str | None], first: Sequence[str | None]) -> Margin:
        """Return a margin from those of all seeds and of the samples; `first` are the first objective's."""
        ranks = [-1 if value is None else self.values.index(value) for value in mine[1:]]
        low, high = (None if at is None or at < 0 else self.values[int(at)] for at in _interval(ranks))
        multiple, *others = (_ratio(*pair) for pair in zip(mine, first, strict=True))
        return Margin(mine[0], low, high, multiple, *_interval([each for each in others if each is not None]))

    @cached_property
    def stable(self) -> str | None:
        """The strongest stress that all objectives survive, None if there is none."""
        # With a search not every objective was run at every value, and one may survive more than what breaks it.
        survived = [self.survived(name) for name in self.objectives]
        return next((value for value in reversed(self.values) if all(each.get(value) for each in survived)), None)

    def survived(self, objective: str) -> dict[str, bool]:
        """Return which values an objective survives, of those that were run."""
        cells = {value: self.cell(objective, value) for value in self.values}
        return {value: _enough(_alive(runs), len(runs)) for value, runs in cells.items() if runs}

    def cell(self, objective: str, value: str) -> list[RunFigures]:
        """Return the judged runs of one cell."""
        return [run for run in self.runs_at(objective, value) if run.survived is not None]

    def runs_at(self, objective: str, value: str) -> Sequence[RunFigures]:
        """Return all runs of one cell."""
        return self._by_cell.get((objective, value), ())

    @cached_property
    def _by_cell(self) -> dict[tuple[str, str], list[RunFigures]]:
        found: dict[tuple[str, str], list[RunFigures]] = {}
        for run in self.runs:
            found.setdefault((run.objective, run.value), []).append(run)
        return found

    def rows(self) -> list[list[str]]:
        """Return the row of every objective: margin, price and what the method did."""
        at = self.stable or (self.values[0] if self.values else "")
        return [self._row(name, self.margins[name], self.cell(name, at)) for name in self.objectives]

    def _row(self, objective: str, margin: Margin, stable: Sequence[RunFigures]) -> list[str]:
        mine = [run for run in self.runs if run.objective == objective]
        step = _median_collapse(mine)
        several = len({run.seed for run in mine}) > 1
        interval = f" [{margin.low or NOTHING}, {margin.high or NOTHING}]" if several else ""
        multiple = NOTHING if margin.multiple is None else f"{margin.multiple:.2g}x"
        if margin.multiple_low is not None and margin.multiple_high != margin.multiple_low:
            multiple += f" [{margin.multiple_low:.2g}, {margin.multiple_high:.2g}]"
        names = dict.fromkeys(name for run in stable for name in run.touched)
        touched = {name: fmean([run.touched[name] for run in stable if name in run.touched]) for name in names}
        return [
            objective,
            f"{margin.value or ('none' if mine else NOTHING)}{interval}",
            multiple,
            held_out_end(stable),
            NOTHING if step is None else f"{step:.0f}",
            percent(_mean([run.in_band for run in stable])),
            ", ".join(f"{name} {percent(share)}" for name, share in touched.items()) or NOTHING,
            number(_mean([run.seconds for run in stable]), 1),
        ]

    def grid(self) -> list[list[str]]:
        """Return objectives by values: how many seeds survived, and the mean accuracy at the end."""
        return [[name, *(_survivors(self.cell(name, value)) for value in self.values)] for name in self.objectives]

    def legend(self) -> str:
        """Return what the columns mean."""
        low, high = ENTROPY_BAND
        stable = f"{self.axis.key}={self.stable}, the strongest that all objectives survive"
        seeds = len({run.seed for run in self.runs})
        survivors = SURVIVORS.get(seeds, "two of three seeds survive") + (INTERVAL if seeds > 1 else "")
        return LEGEND.format(survivors=survivors, stable=stable if self.stable else NO_STABLE, low=low, high=high)

    def headline(self) -> str:
        """Say what was pushed and who held longest."""
        key = self.axis.key
        values = self.values
        judged = [run for run in self.runs if run.survived is not None]
        if not judged:
            return f"{key}: no run has finished yet."
        pushed = f"{key} was pushed from {values[0]} to {values[-1]}" if len(values) > 1 else f"{key} was {values[0]}"
        found = {name: self.margins[name].value for name in self.objectives}
        ranks = {name: -1 if value is None else values.index(value) for name, value in found.items()}
        best = max(ranks.values())
        if best < 0:
            return f"{pushed}: no objective survived any of it{_without_collapse(judged)}."
        longest = [name for name, rank in ranks.items() if rank == best]
        others = [
            f"{name} {f'up to {values[rank]}' if rank >= 0 else 'not at all'}"
            for name, rank in ranks.items()
            if rank < best
        ]
        held = "held longest," if others else "held" if len(longest) == 1 else "held equally long,"
        outcome = f"{_list(longest)} {held} up to {values[best]}{f'; {_list(others)}' if others else ''}."
        return f"{pushed}: {outcome}{' Nothing stronger was tried.' if best == len(values) - 1 else ''}"

    def describe(self, objective: str) -> str:
        """Say how far one objective can be pushed, and what happens beyond."""
        margin = self.margins[objective]
        lived = self.survived(objective)
        if not lived:
            return f"{objective}: no run has finished yet."
        if margin.value is None:
            text = f"{objective} survives none of the values."
        else:
            seeds, low, high = _seeds(self.cell(objective, margin.value)), margin.low or "none", margin.high or "none"
            interval = f", 95 % interval {low} to {high}" if low != high else ""
            text = f"{objective} holds up to {self.axis.key} = {margin.value} ({seeds}{interval})"
            if margin.multiple and objective != self.objectives[0]:
                times = f"{margin.multiple:.2g} times" if margin.multiple != 1 else "the same as"
                text += f", {times} {self.objectives[0]}'s"
            text += "."
        start = 0 if margin.value is None else self.values.index(margin.value) + 1
        broken = next((value for value in self.values[start:] if lived.get(value) is False), None)
        if broken is None:
            return f"{text} Nothing stronger was tried."
        runs = self.cell(objective, broken)
        step = _median_collapse(runs)
        after = f", and collapses are at step {step:.0f} (median)" if step is not None else ""
        return f"{text} At {broken}, {_seeds(runs)}{after}{_without_collapse(runs)}."


def axis_tables(grid: Grid, runs: Sequence[RunFigures]) -> list[AxisTable]:
    """Return a table for every axis."""
    return [AxisTable(axis, grid.objectives, [run for run in runs if run.axis == axis.key]) for axis in grid.axes]


def held_out_end(runs: Sequence[RunFigures]) -> str:
    """Return the mean accuracy at the end, and the mean score where the rule gives numbers."""
    accuracy, score = _mean([run.accuracy_end for run in runs]), _mean([run.score_end for run in runs])
    return percent(accuracy) if score is None else f"{percent(accuracy)}, score {number(score)}"


def as_table(tables: Sequence[AxisTable]) -> RenderableType:
    """Return the tables for a terminal."""
    parts: list[RenderableType] = []
    for each in tables:
        title = f"Seeds that survive, and accuracy at the end, by {each.axis.key}"
        parts += [
            Text(each.headline()),
            _terminal_table(f"Margin along {each.axis.key}", HEADS, each.rows()),
            Text(each.legend(), style="dim"),
            _terminal_table(title, ["objective", *each.values], each.grid()),
        ]
    return Group(*parts, *(Text(note) for note in _notes(tables)))


def _terminal_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    # Text everywhere, since rich would read [..] in a name or value as markup.
    table = Table(*(Column(Text(head)) for head in heads), title=Text(title), title_justify="left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def as_markdown(grid: Grid, tables: Sequence[AxisTable]) -> str:
    """Return the tables as Markdown, with the command that made them."""
    sections = ["# Stress test", f"```\n{shlex.join(grid.command())}\n```"]
    for each in tables:
        sections += [f"## {each.axis.key}", each.headline(), markdown_table(HEADS, each.rows()), each.legend()]
        sections += ["Seeds that survive, and mean accuracy at the end:"]
        sections += [markdown_table(["objective", *each.values], each.grid())]
    notes = [f"- {note}" for note in _notes(tables)]
    return "\n\n".join([*sections, *(["\n".join(notes)] if notes else [])]) + "\n"


def as_json(grid: Grid, tables: Sequence[AxisTable]) -> str:
    """Return the test as JSON, with the figures and curves of every run, one run per line."""
    axes = [
        {
            "key": each.axis.key,
            "values": each.values,
            "stable": each.stable,
            "margins": {name: asdict(margin) for name, margin in each.margins.items()},
        }
        for each in tables
    ]
    head = {"command": grid.command(), "recipe": grid.recipe, "objectives": list(grid.objectives), "axes": axes}
    lines = ",\n".join(json.dumps(asdict(run), allow_nan=False) for each in tables for run in each.runs)
    text = json.dumps(head, indent=1, allow_nan=False).removesuffix("\n}")
    return f'{text},\n "runs": [\n{lines}\n]\n}}\n'


def _notes(tables: Sequence[AxisTable]) -> list[str]:
    """Return a line for every run that is missing in the figures."""
    return [f"{run.folder}: {run.end}" for each in tables for run in each.runs if run.survived is None]


class StoredStressTest(BaseModel):
    """A stress test as its file has it; margins are computed again from its runs."""

    model_config = ConfigDict(allow_inf_nan=False)  # holds for the numbers of its runs too

    command: list[str]
    recipe: str
    objectives: list[str] = Field(min_length=1)
    axes: list[Axis] = Field(min_length=1)
    runs: list[RunFigures] = Field(max_length=MOST_CELLS)

    @cached_property
    def tables(self) -> list[AxisTable]:
        """A table for every axis."""
        return [
            AxisTable(axis, self.objectives, [r for r in self.runs if r.axis == axis.key and r.value in axis.values])
            for axis in self.axes
        ]


def read_stress(path: Path) -> StoredStressTest:
    """Read the stress test of a folder or a file, which may be damaged or from another program."""
    path = path / FILE if path.is_dir() else path
    try:
        stored = StoredStressTest.model_validate(json.loads(read_bounded(path, LARGEST)))
        if len(stored.objectives) * sum(len(axis.values) for axis in stored.axes) > MOST_CELLS:
            raise ValueError(f"it has more than {MOST_CELLS:,} settings")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path} holds no stress test: {shorten(where)}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} holds no stress test: {shorten(str(error), 300)}") from None
    return stored


def _alive(runs: Sequence[RunFigures]) -> int:
    return sum(bool(run.survived) for run in runs)


def _enough(alive: int, seeds: int) -> bool:
    """Return whether enough of the seeds survive for the setting to count as survived."""
    return alive > 0 and alive >= SURVIVING_SHARE * seeds


def _survivors(runs: Sequence[RunFigures]) -> str:
    return f"{_alive(runs)}/{len(runs)} {held_out_end(runs)}" if runs else NOTHING


def _seeds(runs: Sequence[RunFigures]) -> str:
    return f"{_alive(runs)} of {len(runs)} seeds survive"


def _without_collapse(runs: Sequence[RunFigures]) -> str:
    """Say how many runs broke without a collapse; nothing if none did."""
    low, count = sum(run.ended_low for run in runs), sum(run.never_learned for run in runs)
    if count and count == len(runs):
        return "; no run collapsed, but none learned"
    fell = f"; {low} of {len(runs)} ended below half of their best" if low else ""
    return f"{fell}; {count} of {len(runs)} never learned" if count else fell


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _median_collapse(runs: Sequence[RunFigures]) -> float | None:
    steps = [run.collapse_step for run in runs if run.survived is False and run.collapse_step is not None]
    return median(steps) if steps else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _ratio(mine: str | None, theirs: str | None) -> float | None:
    numbers = [None if value is None else as_number(value) for value in (mine, theirs)]
    return numbers[0] / numbers[1] if numbers[0] is not None and numbers[1] else None


def _interval(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Return the 2.5 % and 97.5 % quantiles: each one of the values, since margins are values of the grid."""
    if not values:
        return None, None
    ordered = sorted(values)
    return ordered[math.floor(0.025 * len(values))], ordered[math.floor(0.975 * len(values))]


ENTROPY_BAND = (0.22, 0.42)  # nats: where STARE's paper holds the entropy, for its target of 0.3
LEARNED = 0.02  # accuracy above a start near 0
CURVES = ("eval/accuracy", "eval/score", "reward/accuracy", "policy/entropy", "groups/mixed_share")
TOUCHED = ("silenced", "boosted", "damped", "masked", "dropped", "penalized", "clipped")
FELL = "fell"  # begins the end, in words, of a run that ended low

Step = Annotated[int, Field(ge=0, le=LAST_STEP)]  # checked where figures are read from a file


@dataclass(frozen=True)
class RunFigures:
    """What became of a run; `survived` is None if it failed or is not finished."""

    objective: str
    axis: str
    value: str
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


def run_figures(outcome: RunOutcome, came_back: bool = False) -> RunFigures:
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
        **asdict(run.cell),
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
    outcome: RunOutcome, records: Sequence[Mapping[str, Any]], came_back: bool
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


def _judge_end(records: Sequence[Mapping[str, Any]], last: int) -> tuple[bool | None, str]:
    """Return whether a run that did not fall survived, and how it ended."""
    if last <= HOLD_STEPS:
        return None, f"too short to be judged: {last} steps, and a collapse lasts {HOLD_STEPS} or more"
    # As for a collapse, the mean of a rule's numbers stands for the accuracy.
    word = "score" if any("eval/score" in record for record in records) else "accuracy"
    found = [record[f"eval/{word}"] for record in records if f"eval/{word}" in record]
    if found and found[0] < MIN_BEST and max(found[-2:]) < found[0] + LEARNED:
        return False, f"never learned: {word} {found[-1]:.2f} after {last} steps"
    return True, "survived"
