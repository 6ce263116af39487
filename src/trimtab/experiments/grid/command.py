"""Run what is missing of a grid, round by round if it is a search; print the tables and write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from trimtab.experiments.grid import comparison, stress
from trimtab.experiments.grid.plan import Cell, Grid, GridRun, RunOutcome, next_value
from trimtab.experiments.grid.pool import ProcessPool, Watch
from trimtab.experiments.grid.stress import RunFigures, run_figures
from trimtab.files import locked, mark_folder, write_atomically
from trimtab.process import StopRequest
from trimtab.record import HOLD_STEPS, find_collapse
from trimtab.text import PrintLine, bars_for, shown
from trimtab.trainer.train import STOPPED

ENDED = "ended.json"  # in the folder of a run that is not to be run again
GIVE_UP = 0.25  # of a run's steps after a collapse: some runs come back
NAMES = {"compare": "comparison", "stress": "stress test"}
WriteReport = Callable[[list[Path]], Path | None]


def show_grid(grid: Grid, console: Console, write_report: WriteReport = lambda folders: None) -> int:
    """Run what is missing, print the tables and write them to files; return the exit code.

    `write_report` is called with the folders of all runs that have metrics, or with that of the stress test.
    """

    def print_line(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    planned = grid.plan()  # before the first one starts
    # Two grids in one folder would write each other's logs and tables.
    with locked(grid.out):
        mark_folder(grid.out, grid.kind, (run.name for run in planned))
        work = GridWork(grid, console, print_line)
        work.run()
        result = work.stress_result() if grid.axes else work.comparison_result()
        for suffix, text in (("json", result.json), ("md", result.markdown)):
            write_atomically(grid.out / f"{grid.kind}.{suffix}", text)
        if console.is_terminal:
            console.print(result.table)
        else:
            console.print(Text(result.markdown), soft_wrap=True)
        print_line(f"written: {grid.out / grid.kind}.md and {grid.out / grid.kind}.json")
        # Who sends SIGTERM or SIGHUP may not wait for a report.
        if result.measured and not work.stop_request.urgent and (report := write_report(result.measured)):
            print_line(f"written: {report}")
        if work.stop_request:
            print_line(f"the same command resumes the {NAMES[grid.kind]}")
        return 0 if result.complete and not work.stop_request else STOPPED


@dataclass(frozen=True)
class GridResult:
    """The tables of a grid, the folders that a report is about, and whether every run has its verdict."""

    table: RenderableType
    markdown: str
    json: str
    measured: list[Path]
    complete: bool


@dataclass
class GridWork:
    """The runs of a grid under way. Those of a stress test are ended early once they have collapsed."""

    grid: Grid
    console: Console
    print_line: PrintLine
    outcomes: list[RunOutcome] = field(default_factory=list)
    figures: list[RunFigures] = field(default_factory=list)  # of a stress test
    stop_request: StopRequest = field(default_factory=StopRequest)
    _collapses: dict[str, tuple[int, str]] = field(default_factory=dict)  # by run: the step, and why it ends there

    def run(self) -> None:
        """Run all cells, and those that a search asks for next."""
        cells = self.grid.first_cells()
        while cells and not self.stop_request:
            outcomes = self._run_missing(self.grid.runs(cells))
            self.outcomes += outcomes
            if self.grid.axes:
                self.figures += [run_figures(outcome, self._came_back(outcome.run)) for outcome in outcomes]
            cells = self._next_cells() if self.grid.search else []

    def _run_missing(self, runs: list[GridRun]) -> list[RunOutcome]:
        """Run those that have not ended before; return the outcomes of all."""
        outcomes = {run.name: outcome for run in runs if (outcome := ended_before(run))}
        if outcomes:
            self.print_line(f"{len(outcomes)} of {len(runs)} runs have ended before")
        missing = [run for run in runs if run.name not in outcomes]
        with progress_bars(missing, self.console) as watch:
            pool = ProcessPool(missing, self.grid.jobs, self.print_line, watch)
            if self.grid.axes:
                pool.end_early = self._end_early
                pool.on_end = self._mark_ended
            outcomes |= {outcome.run.name: outcome for outcome in pool.run()}
        self.stop_request = pool.stop_request
        return [outcomes[run.name] for run in runs]

    def _end_early(self, run: GridRun) -> str:
        """Return why a run needs no further step: it has collapsed and had time to come back; empty if it does."""
        last, steps = run.last_step(), run.config.run.steps
        # Called several times a second for each run; the metrics are read once per step only.
        if self._collapses.get(run.name, (0, ""))[0] != last:
            collapse = find_collapse(run.folder.records())
            long_ago = collapse and last - collapse.step >= max(HOLD_STEPS, GIVE_UP * steps)
            why = f"collapsed at step {collapse.step} of {steps}: {collapse.message}" if collapse and long_ago else ""
            self._collapses[run.name] = last, why
        return self._collapses.get(run.name, (0, ""))[1]

    def _came_back(self, run: GridRun) -> bool:
        """Return whether the step that a run finished while it was being stopped undid its collapse."""
        return bool(self._collapses.get(run.name, (0, ""))[1]) and not find_collapse(run.folder.records())

    def _mark_ended(self, outcome: RunOutcome) -> None:
        """Note how a run has ended, and remove its weights: hundreds of runs would fill the disk with them."""
        if outcome.counts and not self._came_back(outcome.run):
            noted = {"state": outcome.state, "why": outcome.why, "steps": outcome.run.config.run.steps}
            write_atomically(outcome.run.folder.path / ENDED, json.dumps(noted) + "\n")
            outcome.run.folder.remove_weights()

    def _next_cells(self) -> list[Cell]:
        """Return the next cell of every objective whose margin is not found yet."""
        cells = []
        for table in stress.axis_tables(self.grid, self.figures):
            for name in self.grid.objectives:
                # A run that failed has no verdict, so its search cannot go on.
                if any(run.survived is None for run in table.runs if run.objective == name):
                    continue
                value = next_value(table.axis, table.survived(name))
                cells += [Cell(name, table.axis.key, value)] if value is not None else []
        return cells

    def comparison_result(self) -> GridResult:
        """Return the tables of a comparison."""
        rows = comparison.make_rows(self.outcomes)
        return GridResult(
            table=comparison.as_table(rows, bars_for(self.console.encoding)),
            markdown=comparison.as_markdown(self.grid, rows),
            json=comparison.as_json(self.grid, rows),
            measured=[outcome.run.folder.path for outcome in self.outcomes if outcome.run.folder.records()],
            complete=all(outcome.counts for outcome in self.outcomes),
        )

    def stress_result(self) -> GridResult:
        """Return the tables of a stress test."""
        tables = stress.axis_tables(self.grid, self.figures)
        return GridResult(
            table=stress.as_table(tables),
            markdown=stress.as_markdown(self.grid, tables),
            json=stress.as_json(self.grid, tables),
            measured=[self.grid.out] if any(run.steps for run in self.figures) else [],
            complete=all(run.survived is not None for run in self.figures),
        )


def ended_before(run: GridRun) -> RunOutcome | None:
    """Return the outcome of a run of a stress test that an earlier call has ended."""
    path = run.folder.path / ENDED
    if not path.is_file():
        return None
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        state, why, steps = noted["state"], str(noted["why"]), noted["steps"]
    except (ValueError, LookupError, TypeError):
        state, why, steps = "", "", None
    if state not in ("finished", "stopped"):
        raise ValueError(f"{path} does not say how the run ended: remove {run.folder.path} to run it again")
    if steps != run.config.run.steps:
        asked = f"{run.config.run.steps} are asked for"
        raise ValueError(f"{path}: the run was one of {shown(steps)} steps, {asked}; choose another --out")
    return RunOutcome(run, state, why)


@contextmanager
def progress_bars(runs: list[GridRun], console: Console) -> Iterator[Watch]:
    """Show a bar for the whole and one for every running process; nothing without a terminal."""
    if not console.is_terminal:
        yield lambda running, outcomes: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        whole = progress.add_task("runs", total=len(runs))
        tasks: dict[str, TaskID] = {}

        def watch(running: list[GridRun], outcomes: list[RunOutcome]) -> None:
            progress.update(whole, completed=len(outcomes))
            for run in running:
                if run.name not in tasks:
                    tasks[run.name] = progress.add_task(f"  {run.name}", total=run.config.run.steps)
                progress.update(tasks[run.name], completed=run.last_step())
            # Bars of runs that have ended go, or dozens of them would push the others off the screen.
            for name in tasks.keys() - {run.name for run in running}:
                progress.remove_task(tasks.pop(name))

        yield watch
