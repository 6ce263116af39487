"""The tables of a stress test: margins and prices, survivors per setting; for a terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trimtab.compare import markdown_table
from trimtab.stress.figures import ENTROPY_BAND, Margin, RunFigures, margins, median_of, ordered_values, stable_value
from trimtab.stress.grid import Axis, StressTest
from trimtab.text import NOTHING, number, percent

HEADS = ["objective", "margin", "times the first", "accuracy", "collapse at step", "entropy in band", "touched", "s"]
LEGEND = (
    "Margin: the strongest stress that two of three seeds survive, in brackets its 95 % interval over seeds. Accuracy, "
    "seconds and what follows: means over the runs at {stable}. Collapse: median step over the runs that collapsed. "
    "Entropy in band: share of steps between {low} and {high} nats. Touched: share of tokens with another weight than "
    "1, or clipped."
)
NO_STABLE = "the weakest stress, since no setting is survived by all"


@dataclass(frozen=True)
class AxisTable:
    """What is known about one axis: the margins, and the runs by objective and value."""

    axis: Axis
    objectives: Sequence[str]
    runs: Sequence[RunFigures]

    @property
    def values(self) -> list[str]:
        """The values that were run, in the order of rising stress."""
        return ordered_values(self.axis, {run.cell.value for run in self.runs})

    @property
    def margins(self) -> dict[str, Margin]:
        """The margin of every objective."""
        return margins(self.runs, self.objectives, self.axis)

    @property
    def stable(self) -> str | None:
        """The strongest stress that all objectives survive."""
        return stable_value(self.runs, self.objectives, self.axis)

    def cell(self, objective: str, value: str) -> list[RunFigures]:
        """Return the judged runs of one cell."""
        return [
            run
            for run in self.runs
            if (run.cell.objective, run.cell.value) == (objective, value) and run.survived is not None
        ]

    def rows(self) -> list[list[str]]:
        """Return the row of every objective: margin, price and what the method did."""
        found, at = self.margins, self.stable or (self.values[0] if self.values else "")
        return [self._row(name, found[name], self.cell(name, at)) for name in self.objectives]

    def _row(self, objective: str, margin: Margin, stable: Sequence[RunFigures]) -> list[str]:
        mine = [run for run in self.runs if run.cell.objective == objective]
        step = median_of([run for run in mine if run.survived is False], lambda run: run.collapse_step)
        interval = (
            f" [{margin.low or NOTHING}, {margin.high or NOTHING}]" if len({run.seed for run in mine}) > 1 else ""
        )
        multiple = NOTHING if margin.multiple is None else f"{margin.multiple:.2g}x"
        if margin.multiple_low is not None and margin.multiple_high != margin.multiple_low:
            multiple += f" [{margin.multiple_low:.2g}, {margin.multiple_high:.2g}]"
        return [
            objective,
            f"{margin.value or 'none'}{interval}",
            multiple,
            percent(_mean([run.accuracy_end for run in stable])),
            NOTHING if step is None else f"{step:.0f}",
            percent(_mean([run.in_band for run in stable])),
            ", ".join(f"{name} {percent(share)}" for name, share in _touched(stable).items()) or NOTHING,
            number(_mean([run.seconds for run in stable]), 1),
        ]

    def grid(self) -> list[list[str]]:
        """Return objectives by values: how many seeds survived, and the mean accuracy at the end."""
        return [[name, *(_survivors(self.cell(name, value)) for value in self.values)] for name in self.objectives]

    def legend(self) -> str:
        """Return what the columns mean."""
        low, high = ENTROPY_BAND
        stable = f"{self.axis.key}={self.stable}, the strongest that all objectives survive"
        return LEGEND.format(stable=stable if self.stable else NO_STABLE, low=low, high=high)


def axis_tables(test: StressTest, runs: Sequence[RunFigures]) -> list[AxisTable]:
    """Return a table for every axis."""
    return [AxisTable(axis, test.objectives, [run for run in runs if run.cell.axis == axis.key]) for axis in test.axes]


def as_table(tables: Sequence[AxisTable]) -> RenderableType:
    """Return the tables for a terminal."""
    parts: list[RenderableType] = []
    for each in tables:
        margin_table = Table(*HEADS, title=f"Margin along {each.axis.key}", title_justify="left")
        for row in each.rows():
            margin_table.add_row(*map(Text, row))  # Text, since rich would read [..] as markup
        title = f"Seeds that survive, and accuracy at the end, by {each.axis.key}"
        grid = Table("objective", *each.values, title=title, title_justify="left")
        for row in each.grid():
            grid.add_row(*map(Text, row))
        parts += [margin_table, Text(each.legend(), style="dim"), grid]
    return Group(*parts, *(Text(note) for note in _notes(tables)))


def as_markdown(test: StressTest, tables: Sequence[AxisTable]) -> str:
    """Return the tables as Markdown, with the command that made them."""
    sections = ["# Stress test", f"```\n{shlex.join(test.command())}\n```"]
    for each in tables:
        sections += [f"## {each.axis.key}", markdown_table(HEADS, each.rows()), each.legend()]
        sections += ["Seeds that survive, and mean accuracy at the end:"]
        sections += [markdown_table(["objective", *each.values], each.grid())]
    notes = [f"- {note}" for note in _notes(tables)]
    return "\n\n".join([*sections, *(["\n".join(notes)] if notes else [])]) + "\n"


def as_json(test: StressTest, tables: Sequence[AxisTable]) -> str:
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
    head = {"command": test.command(), "recipe": test.recipe, "objectives": list(test.objectives), "axes": axes}
    lines = ",\n".join(json.dumps(run.as_json(), allow_nan=False) for each in tables for run in each.runs)
    text = json.dumps({**head, "runs": "RUNS"}, indent=1, allow_nan=False)
    return text.replace('"RUNS"', f"[\n{lines}\n]") + "\n"


def _notes(tables: Sequence[AxisTable]) -> list[str]:
    """Return a line for every run that is missing in the figures."""
    return [f"{run.folder}: {run.end}" for each in tables for run in each.runs if run.survived is None]


def _survivors(runs: Sequence[RunFigures]) -> str:
    if not runs:
        return NOTHING
    return f"{sum(bool(run.survived) for run in runs)}/{len(runs)} {percent(_mean([r.accuracy_end for r in runs]))}"


def _touched(runs: Sequence[RunFigures]) -> Mapping[str, float]:
    names = {name: None for run in runs for name in run.touched}
    return {name: fmean([run.touched[name] for run in runs if name in run.touched]) for name in names}


def _mean(values: Sequence[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
