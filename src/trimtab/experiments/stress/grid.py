"""What a stress test runs: every objective under every value of every axis, with every seed.

The axes are independent of each other: while one is changed, the others keep the recipe's value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from trimtab.collapse import HOLD_STEPS
from trimtab.console import slug
from trimtab.experiments.compare import MAX_RUNS, CompareRun, check_objectives, plan_run
from trimtab.text import shown
from trimtab.trainer.config import load
from trimtab.trainer.train import InputReader

EVALUATIONS = 20  # of a run: fewer would show a collapse late
NO_RECORDS = ("run.report=false", "record.enabled=false")  # hundreds of runs: records would fill the disk


@dataclass(frozen=True)
class Axis:
    """A key of the recipe and its values, in the order of rising stress."""

    key: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.key}={','.join(self.values)}"


@dataclass(frozen=True)
class Cell:
    """One setting of a stress test: an objective under one value of an axis."""

    objective: str
    axis: str
    value: str


@dataclass(frozen=True)
class StressTest:
    """A stress test as the user asked for it; `jobs` is the number of runs at a time."""

    objectives: tuple[str, ...]
    axes: tuple[Axis, ...]
    out: Path
    recipe: str = "demo"
    seeds: int = 3
    settings: tuple[str, ...] = ()
    jobs: int = 1
    search: bool = False

    def command(self) -> list[str]:
        """Return the command line of this stress test."""
        arguments = ["trimtab", "stress", *self.objectives]
        for axis in self.axes:
            arguments += ["--axis", str(axis)]
        arguments += ["--seeds", str(self.seeds), "--recipe", self.recipe, *(["--search"] if self.search else [])]
        for setting in self.settings:
            arguments += ["--set", setting]
        return [*arguments, "--out", str(self.out), *(["--jobs", str(self.jobs)] if self.jobs != 1 else [])]

    def cells(self) -> list[Cell]:
        """Return all cells of the grid."""
        return [Cell(name, axis.key, value) for axis in self.axes for value in axis.values for name in self.objectives]

    def runs(self, cells: list[Cell]) -> list[tuple[Cell, CompareRun]]:
        """Return the runs of cells, seed by seed, so that a test that is stopped has compared all objectives."""
        first, steps = self._seed_and_steps()
        reader = InputReader()
        settings = (*NO_RECORDS, f"run.eval_every={max(1, steps // EVALUATIONS)}", *self.settings)
        return [
            (cell, plan_run(self.out, self.recipe, cell.objective, seed, (*settings, setting), setting, reader))
            for seed in range(first, first + self.seeds)
            for cell in cells
            for setting in [f"{cell.axis}={cell.value}"]
        ]

    def checked_runs(self, cells: list[Cell]) -> list[tuple[Cell, CompareRun]]:
        """Return the runs of cells; refuse runs that are too short to be judged."""
        runs = self.runs(cells)
        for _, run in runs:
            if (steps := run.config.run.steps) <= HOLD_STEPS:
                raise ValueError(
                    f"run.steps = {steps} is too short for a stress test: a collapse lasts {HOLD_STEPS} steps or more, "
                    f"so runs need more than {HOLD_STEPS} steps to be judged, and better {EVALUATIONS} and more"
                )
        return runs

    def check(self) -> None:
        """Refuse a test that cannot run, before the first run starts."""
        check_objectives(self.objectives, self.seeds, self.jobs)
        if not self.axes:
            raise ValueError("--axis is missing: write for example --axis update.lr=1e-4,3e-4,1e-3")
        keys = [axis.key for axis in self.axes]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"--axis {key} is given twice: write all values of an axis after one `=`")
            if key == "run.seed":
                raise ValueError("--axis run.seed: every setting is run with all seeds; their number is --seeds")
            if any(setting.partition("=")[0].strip() == key for setting in self.settings):
                raise ValueError(f"--set {key} and --axis {key} both set it: leave one of them out")
        if len(self.cells()) * self.seeds > MAX_RUNS:
            raise ValueError(f"{len(self.cells()) * self.seeds:,} runs are asked for, {MAX_RUNS:,} at most may be")

    def _seed_and_steps(self) -> tuple[int, int]:
        run = load(self.recipe, [f"objective.name={self.objectives[0]}", *self.settings]).run
        return run.seed, run.steps


def parse_axis(text: str) -> Axis:
    """Parse `section.key=value,value,...`; numbers must rise or fall, so that their order is that of the stress."""
    key, _, values = text.partition("=")
    axis = Axis(key.strip(), tuple(value.strip() for value in values.split(",")))
    if not axis.key or not all(axis.values):
        raise ValueError(f"--axis {shown(text)}: write section.key=value,value,... for example update.lr=1e-4,3e-4")
    numbers = [as_number(value) for value in axis.values]
    # Numbers by their value, since 1e-3 and 0.001 are one stress; others by the name of their folder.
    same = [
        slug(f"{key}={value}") if known is None else known for value, known in zip(axis.values, numbers, strict=True)
    ]
    for value, each in zip(axis.values, same, strict=True):
        if same.count(each) > 1:
            raise ValueError(f"--axis {shown(text)}: {value} is given twice")
    if None not in numbers and numbers not in (sorted(numbers), sorted(numbers, reverse=True)):  # type: ignore[type-var]
        raise ValueError(f"--axis {shown(text)}: give the values in the order of rising stress")
    return axis


def as_number(value: str) -> float | None:
    """Return a value of an axis as a number, None if it is none."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
