"""What is known about one axis of a stress test: margins, prices and survivors, as cells of tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from trimtab.experiments.stress.figures import (
    ENTROPY_BAND,
    Margin,
    RunFigures,
    margins,
    median_of,
    ordered_values,
    stable_value,
)
from trimtab.experiments.stress.grid import Axis, StressTest
from trimtab.text import NOTHING, number, percent

LEGEND = (
    "Margin: the strongest stress that {survivors}. Accuracy, seconds and what follows: means over the runs at "
    "{stable}. Collapse: median step over the runs that collapsed. Entropy in band: share of steps between {low} and "
    "{high} nats. Touched: share of tokens with another weight than 1, or clipped."
)
SURVIVORS = {1: "the one seed survives", 2: "both seeds survive"}  # by number of seeds, as SURVIVING_SHARE says
INTERVAL = ", in brackets its 95 % interval over seeds"
NO_STABLE = "the weakest stress, since no setting is survived by all"


@dataclass(frozen=True)
class AxisTable:
    """What is known about one axis: the margins, and the runs by objective and value."""

    axis: Axis
    objectives: Sequence[str]
    runs: Sequence[RunFigures]

    @cached_property
    def values(self) -> list[str]:
        """The values that were run, in the order of rising stress."""
        return ordered_values(self.axis, {run.cell.value for run in self.runs})

    @cached_property
    def margins(self) -> dict[str, Margin]:
        """The margin of every objective."""
        return margins(self.runs, self.objectives, self.axis)

    @cached_property
    def stable(self) -> str | None:
        """The strongest stress that all objectives survive."""
        return stable_value(self.runs, self.objectives, self.axis)

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
            found.setdefault((run.cell.objective, run.cell.value), []).append(run)
        return found

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
            f"{margin.value or ('none' if mine else NOTHING)}{interval}",
            multiple,
            held_out_end(stable),
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
        seeds = len({run.seed for run in self.runs})
        survivors = SURVIVORS.get(seeds, "two of three seeds survive") + (INTERVAL if seeds > 1 else "")
        return LEGEND.format(survivors=survivors, stable=stable if self.stable else NO_STABLE, low=low, high=high)


def axis_tables(test: StressTest, runs: Sequence[RunFigures]) -> list[AxisTable]:
    """Return a table for every axis."""
    return [AxisTable(axis, test.objectives, [run for run in runs if run.cell.axis == axis.key]) for axis in test.axes]


def _survivors(runs: Sequence[RunFigures]) -> str:
    if not runs:
        return NOTHING
    return f"{sum(bool(run.survived) for run in runs)}/{len(runs)} {held_out_end(runs)}"


def held_out_end(runs: Sequence[RunFigures]) -> str:
    """Return the mean accuracy at the end, and the mean score where the rule gives numbers."""
    accuracy, score = _mean([run.accuracy_end for run in runs]), _mean([run.score_end for run in runs])
    return percent(accuracy) if score is None else f"{percent(accuracy)}, score {number(score)}"


def _touched(runs: Sequence[RunFigures]) -> Mapping[str, float]:
    names = {name: None for run in runs for name in run.touched}
    return {name: fmean([run.touched[name] for run in runs if name in run.touched]) for name in names}


def _mean(values: Sequence[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
