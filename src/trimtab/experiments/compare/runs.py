"""What a comparison runs: every objective with every seed, each in a folder of its own.

Runs of one seed share their warm start, and a finished run is not run again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trimtab.console import slug
from trimtab.files import require_empty
from trimtab.step_lines import last_step
from trimtab.text import shown
from trimtab.trainer.config import Config, load
from trimtab.trainer.train import InputReader, RunFolder, config_changes, input_changes, read_inputs

MAX_RUNS = 10_000  # each is checked before the first one starts
LONGEST_NAME = 200  # bytes of a run's name; file systems take 255, and the log has a suffix

RunState = Literal["new", "unfinished", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class Comparison:
    """A comparison as the user asked for it; `jobs` is the number of runs at a time."""

    objectives: tuple[str, ...]
    out: Path
    recipe: str = "demo"
    seeds: int = 3
    settings: tuple[str, ...] = ()
    jobs: int = 1

    def command(self) -> list[str]:
        """Return the command line that makes this comparison."""
        arguments = ["trimtab", "compare", *self.objectives, "--seeds", str(self.seeds), "--recipe", self.recipe]
        for setting in self.settings:
            arguments += ["--set", setting]
        return [*arguments, "--out", str(self.out), *(["--jobs", str(self.jobs)] if self.jobs != 1 else [])]


@dataclass(frozen=True)
class CompareRun:
    """A run of a recipe under an objective and a seed, in a folder of its own under `out`.

    `variant` sets the names of runs apart that differ in other settings too.
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
        if not (self.folder.path / "config.toml").exists():
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

    run: CompareRun
    state: RunState
    why: str = ""

    @property
    def counts(self) -> bool:
        """Whether the means include it; a run that stopped for lack of learning signal counts with what it reached."""
        return self.state in ("finished", "stopped")


def plan_runs(comparison: Comparison) -> list[CompareRun]:
    """Return every run of a comparison, each checked before the first one starts."""
    check_objectives(comparison.objectives, comparison.seeds, comparison.jobs)
    # All objectives before any folder is looked at: a name that does not exist is the nearer mistake.
    configs = [load(comparison.recipe, [f"objective.name={o}", *comparison.settings]) for o in comparison.objectives]
    first, reader = configs[0].run.seed, InputReader()
    return [
        plan_run(comparison.out, comparison.recipe, objective, seed, comparison.settings, reader=reader)
        for objective in comparison.objectives
        for seed in range(first, first + comparison.seeds)
    ]


def check_objectives(objectives: Sequence[str], seeds: int, jobs: int) -> None:
    """Refuse an objective given twice, and numbers of runs that nobody can want."""
    if seeds < 1 or jobs < 1:
        raise ValueError("--seeds and --jobs are at least 1")
    if seeds * len(objectives) > MAX_RUNS or jobs > MAX_RUNS:
        raise ValueError(f"--seeds {shown(seeds)} and --jobs {shown(jobs)}: {MAX_RUNS} runs at most")
    # Compared as slugs: "sspo+s2t" and "sspo + s2t" would share a folder.
    names = [slug(name) for name in objectives]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is given twice: each objective once, seeds with --seeds")


def plan_run(
    out: Path,
    recipe: str,
    objective: str,
    seed: int,
    settings: Sequence[str],
    variant: str = "",
    reader: InputReader | None = None,
) -> CompareRun:
    """Return a run with its configuration, after a check that its folder holds no other."""
    for setting in settings:
        if setting.partition("=")[0].strip() in ("objective", "objective.name"):
            raise ValueError(f"{shown(setting)}: objectives are named as arguments of the command")
    # The objective first: naming one replaces the whole table, to which settings such as objective.scope then add.
    every = (f"objective.name={objective}", *settings, f"run.seed={seed}")
    run = CompareRun(out, recipe, objective, seed, every, load(recipe, every), variant)
    _check_folder(run, reader or InputReader())
    return run


def _check_folder(run: CompareRun, reader: InputReader) -> None:
    """Refuse a folder with a run of another recipe or on other data: its numbers do not belong into the table."""
    if len(run.name.encode("utf-8", "replace")) > LONGEST_NAME:
        raise ValueError(f"{shown(run.name)} is too long for the name of a folder: at most {LONGEST_NAME} bytes")
    if run.state() == "new":
        require_empty(run.folder.path)
        return
    changes = config_changes(load(run.folder.path / "config.toml"), run.config)
    # The number of steps may grow on resuming, but a longer run cannot be shortened.
    if run.last_step() > run.config.run.steps:
        changes.append(f"run.steps: {run.last_step()} are done already, {run.config.run.steps} are asked for")
    if before := {} if changes else read_inputs(run.folder.path):
        changes = input_changes(before, reader.inputs(run.config), run.config)
    if changes:
        lines = "".join(f"\n  {line}" for line in changes)
        raise ValueError(f"{run.folder.path} holds a run of another recipe or other data; choose another --out{lines}")
