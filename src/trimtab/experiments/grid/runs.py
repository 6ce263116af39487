"""One run of a grid: a recipe under an objective, a seed and other settings, in its own folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trimtab.files import require_empty
from trimtab.record import last_step
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
