"""What a grid runs: every objective with every seed, and in a stress test under every value of every axis.

The axes are independent of each other: while one is changed, the others keep the recipe's value. A search takes fewer
values: it doubles the stress until runs break and then bisects, or bisects the values that it is given.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from trimtab.files import require_empty
from trimtab.record import HOLD_STEPS, last_step
from trimtab.text import shown, slug
from trimtab.trainer.config import Config, load
from trimtab.trainer.train import InputReader, RunFolder, config_changes, input_changes, read_inputs

LONGEST_NAME = 200  # bytes of a run's name; file systems take 255, and the log has a suffix

RunState = Literal["new", "unfinished", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class Cell:
    """One setting of a grid: an objective, and in a stress test a value of an axis."""

    objective: str
    axis: str = ""
    value: str = ""

    @property
    def settings(self) -> list[str]:
        """The setting of the recipe, none without an axis."""
        return [f"{self.axis}={self.value}"] if self.axis else []

    @property
    def variant(self) -> str:
        """What sets the names of its runs apart."""
        return "".join(self.settings)


@dataclass(frozen=True)
class GridRun:
    """A run of a recipe under an objective and a seed, in its own folder below `out`.

    `variant` sets the names of runs apart that differ in other settings too; in a stress test it is `axis=value`.
    """

    out: Path
    recipe: str
    objective: str
    seed: int
    settings: tuple[str, ...]
    config: Config
    variant: str = ""

    @property
    def name(self) -> str:
        """The run folder's name."""
        # As slugs: a value such as the path of a model has slashes in it.
        return "-".join(filter(None, (slug(self.objective), slug(self.variant), f"seed{self.seed}")))

    @property
    def cell(self) -> Cell:
        """The cell of the grid."""
        axis, _, value = self.variant.partition("=")
        return Cell(self.objective, axis, value)

    @property
    def folder(self) -> RunFolder:
        """The run's folder."""
        return RunFolder(self.out / self.name)

    @property
    def log(self) -> Path:
        """The file that the run's output goes to."""
        return self.out / "logs" / f"{self.name}.log"

    def command(self) -> list[str]:
        """Return the command line that starts the run, or resumes it."""
        settings = [f"--set={setting}" for setting in self.settings]
        where = ["--out" if self.state() == "new" else "--resume", str(self.folder.path)]
        # -P: without it `python -m` looks for every module in the current folder first, also those that come with data.
        command = [sys.executable, "-P", "-m", "trimtab", "train", self.recipe, "--quiet"]
        return [*command, *settings, *where]

    def state(self) -> RunState:
        """Return how far the run has come, judged by its folder."""
        if not self.folder.config.exists():
            return "new"
        # The model is written after the last step, so a run killed in between still has that to do.
        done = self.last_step() >= self.config.run.steps and self.folder.model.is_dir()
        return "finished" if done else "unfinished"

    def last_step(self) -> int:
        """Return the last step in the metrics, 0 before the first."""
        # Polled several times a second while it runs, so only the end of the file is read.
        return last_step(self.folder.metrics)

    def is_warm(self) -> bool:
        """Return whether the warm start is done: the first checkpoint is written right after it."""
        return any(self.folder.checkpoints.glob("step-*"))


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended; `why` is empty for a run that reached its last step."""

    run: GridRun
    state: RunState
    why: str = ""

    @property
    def counts(self) -> bool:
        """Whether the means include it; a run that stopped for lack of learning signal counts with what it reached."""
        return self.state in ("finished", "stopped")


def plan_run(
    out: Path,
    recipe: str,
    objective: str,
    seed: int,
    settings: Sequence[str],
    variant: str = "",
    reader: InputReader | None = None,
) -> GridRun:
    """Return a run with its configuration, after a check that its folder holds no other."""
    for setting in settings:
        if setting.partition("=")[0].strip() in ("objective", "objective.name"):
            raise ValueError(f"{shown(setting)}: objectives are named as arguments of the command")
    # The objective first: naming one replaces the whole table, to which settings such as objective.scope then add.
    every = (f"objective.name={objective}", *settings, f"run.seed={seed}")
    run = GridRun(out, recipe, objective, seed, every, load(recipe, every), variant)
    _check_folder(run, reader or InputReader())
    return run


def _check_folder(run: GridRun, reader: InputReader) -> None:
    """Refuse a folder with a run of another recipe or on other data: its numbers do not belong into the table."""
    if len(run.name.encode("utf-8", "replace")) > LONGEST_NAME:
        raise ValueError(f"{shown(run.name)} is too long for the name of a folder: at most {LONGEST_NAME} bytes")
    if run.state() == "new":
        require_empty(run.folder.path)
        return
    changes = config_changes(load(run.folder.config), run.config)
    # The number of steps may grow on resuming, but a longer run cannot be shortened.
    if run.last_step() > run.config.run.steps:
        changes.append(f"run.steps: {run.last_step()} are done already, {run.config.run.steps} are asked for")
    if before := {} if changes else read_inputs(run.folder.path):
        changes = input_changes(before, reader.inputs(run.config), run.config)
    if changes:
        lines = "".join(f"\n  {line}" for line in changes)
        raise ValueError(f"{run.folder.path} holds a run of another recipe or other data; choose another --out{lines}")


MAX_RUNS = 10_000  # each is checked before the first one starts
EVALUATIONS = 20  # of a run of a stress test: fewer would show a collapse late
NO_RECORDS = ("run.report=false", "record.enabled=false")  # hundreds of runs: records would fill the disk
FACTOR = 2.0
RESOLUTION = 1.5  # ratio of the weakest stress that breaks and the strongest that does not, at which the search ends


@dataclass(frozen=True)
class Axis:
    """A key of the recipe and its values, in the order of rising stress."""

    key: str
    values: Annotated[tuple[str, ...], Field(min_length=1)]

    def __str__(self) -> str:
        return f"{self.key}={','.join(self.values)}"


@dataclass(frozen=True)
class Grid:
    """A grid as the user asked for it: without axes a comparison, with them a stress test.

    `jobs` is the number of runs at a time.
    """

    objectives: tuple[str, ...]
    out: Path
    recipe: str = "demo"
    seeds: int = 3
    settings: tuple[str, ...] = ()
    jobs: int = 1
    axes: tuple[Axis, ...] = ()
    search: bool = False

    @property
    def kind(self) -> str:
        """The command that makes it, which also names its files."""
        return "stress" if self.axes else "compare"

    def command(self) -> list[str]:
        """Return the command line that makes this grid."""
        arguments = ["trimtab", self.kind, *self.objectives]
        for axis in self.axes:
            arguments += ["--axis", str(axis)]
        arguments += ["--seeds", str(self.seeds), "--recipe", self.recipe, *(["--search"] if self.search else [])]
        for setting in self.settings:
            arguments += ["--set", setting]
        return [*arguments, "--out", str(self.out), *(["--jobs", str(self.jobs)] if self.jobs != 1 else [])]

    def cells(self, values: Callable[[Axis], Sequence[str]] = lambda axis: axis.values) -> list[Cell]:
        """Return all cells of the grid, or those with some values of each axis."""
        if not self.axes:
            return [Cell(name) for name in self.objectives]
        return [Cell(name, axis.key, value) for axis in self.axes for value in values(axis) for name in self.objectives]

    def first_cells(self) -> list[Cell]:
        """Return what to run first: the whole grid, or the weakest stress of a search."""
        return self.cells(lambda axis: axis.values[:1]) if self.search else self.cells()

    def plan(self) -> list[GridRun]:
        """Return every run that may be needed, each checked before the first one starts."""
        self._check()
        runs = self.runs(self.cells(possible_values) if self.search else self.cells())
        for run in runs if self.axes else ():
            if (steps := run.config.run.steps) <= HOLD_STEPS:
                raise ValueError(
                    f"run.steps = {steps} is too short for a stress test: a collapse lasts {HOLD_STEPS} steps or more, "
                    f"so runs need more than {HOLD_STEPS} steps to be judged, and better {EVALUATIONS} and more"
                )
        return runs

    def runs(self, cells: Sequence[Cell]) -> list[GridRun]:
        """Return the runs of cells with every seed."""
        # All objectives before any folder is looked at: a name that does not exist is the nearer mistake.
        configs = [load(self.recipe, [f"objective.name={name}", *self.settings]) for name in self.objectives]
        first = configs[0].run.seed
        steps = configs[0].run.steps
        seeds = range(first, first + self.seeds)
        given = self.settings
        reader = InputReader()
        pairs = [(cell, seed) for cell in cells for seed in seeds]
        if self.axes:  # seed by seed, so that a test that is stopped has compared all objectives
            pairs.sort(key=lambda pair: pair[1])
            given = (*NO_RECORDS, f"run.eval_every={max(1, steps // EVALUATIONS)}", *self.settings)
        return [
            plan_run(self.out, self.recipe, cell.objective, seed, (*given, *cell.settings), cell.variant, reader)
            for cell, seed in pairs
        ]

    def _check(self) -> None:
        """Refuse objectives and axes that are given twice, and numbers of runs that nobody can want."""
        if self.seeds < 1 or self.jobs < 1:
            raise ValueError("--seeds and --jobs are at least 1")
        if len(self.cells()) * self.seeds > MAX_RUNS or self.jobs > MAX_RUNS:
            raise ValueError(f"--seeds {shown(self.seeds)} and --jobs {shown(self.jobs)}: {MAX_RUNS} runs at most")
        # Compared as slugs: "sspo+s2t" and "sspo + s2t" would share a folder.
        names = [slug(name) for name in self.objectives]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name} is given twice: each objective once, seeds with --seeds")
        keys = [axis.key for axis in self.axes]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"--axis {key} is given twice: write all values of an axis after one `=`")
            if key == "run.seed":
                raise ValueError("--axis run.seed: every setting is run with all seeds; their number is --seeds")
            if any(setting.partition("=")[0].strip() == key for setting in self.settings):
                raise ValueError(f"--set {key} and --axis {key} both set it: leave one of them out")
        if self.search:
            for axis in self.axes:
                check_search(axis)


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
    """Return a value of an axis as a number; None if it is not one."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def check_search(axis: Axis) -> None:
    """Refuse an axis with nothing to search, or along which nothing can be doubled."""
    numbers = [as_number(value) for value in axis.values]
    if len(numbers) > 2:
        return
    if len(numbers) != 2 or any(number is None or number <= 0 for number in numbers):
        raise ValueError(
            f"--search along {shown(str(axis))}: give two positive numbers, the weakest stress and the strongest, "
            "for example update.lr=1e-5,1e-3; or three values and more, in the order of rising stress"
        )


def possible_values(axis: Axis) -> list[str]:
    """Return the values that a search may try: the given ones, or those doubled while all survive."""
    if len(axis.values) > 2:
        return list(axis.values)
    tried: dict[str, bool] = {}
    while (value := next_value(axis, tried)) is not None:
        tried[value] = True
    return list(tried)


def next_value(axis: Axis, survived: Mapping[str, bool]) -> str | None:
    """Return the value to try next, given which values an objective has survived; None once the margin is found."""
    if len(axis.values) > 2:
        return _next_listed(axis.values, survived)
    weakest, strongest = (float(value) for value in axis.values)
    rising = weakest < strongest
    known = {float(value): lived for value, lived in survived.items()}
    if weakest not in known:
        return axis.values[0]
    order = sorted(known, reverse=not rising)
    broken = next((value for value in order if not known[value]), None)
    if broken is None:
        if order[-1] == strongest:
            return None
        doubled = order[-1] * (FACTOR if rising else 1 / FACTOR)
        beyond = doubled >= strongest if rising else doubled <= strongest
        return axis.values[1] if beyond else _text(doubled)
    below = order[: order.index(broken)]
    # Whole numbers, such as updates per step, are doubled only: what lies between may not divide what it must.
    whole = all(value.lstrip("-").isdigit() for value in axis.values)
    if not below or whole or max(broken / below[-1], below[-1] / broken) <= RESOLUTION:
        return None
    return _text(math.sqrt(broken * below[-1]))


def _next_listed(values: Sequence[str], survived: Mapping[str, bool]) -> str | None:
    # The weakest stress is always run: the accuracy there is what an objective costs.
    if values[0] not in survived:
        return values[0]
    broken = next((rank for rank, value in enumerate(values) if survived.get(value) is False), len(values))
    safe = max((rank for rank, value in enumerate(values[:broken]) if survived.get(value)), default=-1)
    return values[(safe + broken) // 2] if broken - safe > 1 else None


def _text(value: float) -> str:
    """Return a number in few digits, so that the names of folders stay short."""
    return f"{value:.2g}" if not value.is_integer() else str(int(value))
