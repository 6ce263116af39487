"""Run a stress test: what is missing of a grid, or round by round of a search; print the tables and write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from trimtab.collapse import HOLD_STEPS, find_collapse
from trimtab.console import STOPPED
from trimtab.experiments.compare import CompareRun, ProcessPool, RunOutcome, progress_bars
from trimtab.experiments.stress.axis_table import AxisTable, axis_tables
from trimtab.experiments.stress.figures import RunFigures, run_figures, survivors
from trimtab.experiments.stress.grid import Cell, StressTest
from trimtab.experiments.stress.search import check_search, next_value, possible_values
from trimtab.experiments.stress.tables import as_json, as_markdown, as_table
from trimtab.files import locked, mark_folder, write_atomically
from trimtab.text import shown

ENDED = "ended.json"  # in the folder of a run that is not to be run again
GIVE_UP = 0.25  # of a run's steps after a collapse: some runs come back
WriteReport = Callable[[Path], Path | None]


@dataclass
class EarlyEnd:
    """Ends runs that have collapsed and had time to come back; called several times a second for each."""

    judged: dict[str, tuple[int, str]] = field(default_factory=dict)

    def __call__(self, run: CompareRun) -> str:
        """Return why a run needs no further step, empty if it does."""
        last = run.last_step()
        # The metrics are read once per step only.
        if self.judged.get(run.name, (0, ""))[0] != last:
            collapse, steps = find_collapse(run.folder.records()), run.config.run.steps
            long_ago = collapse and last - collapse.step >= max(HOLD_STEPS, GIVE_UP * steps)
            why = f"collapsed at step {collapse.step} of {steps}: {collapse.message}" if collapse and long_ago else ""
            self.judged[run.name] = last, why
        return self.judged.get(run.name, (0, ""))[1]

    def came_back(self, run: CompareRun) -> bool:
        """Return whether the step that a run finished while it was being stopped undid its collapse."""
        return bool(self.judged.get(run.name, (0, ""))[1]) and not find_collapse(run.folder.records())


def show_stress(test: StressTest, console: Console, write_report: WriteReport = lambda folder: None) -> int:
    """Run what is missing, print the tables and write them to files; return the exit code.

    `write_report` is called with the test's folder once a run has metrics.
    """

    def print_line(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    def note_end(outcome: RunOutcome) -> None:
        if not early_end.came_back(outcome.run):
            mark_ended(outcome)

    early_end = EarlyEnd()
    test.check()
    if test.search:
        for axis in test.axes:
            check_search(axis)
    planned = test.checked_runs(planned_cells(test))  # before the first one starts
    cells = first_cells(test)
    figures: list[RunFigures] = []
    stopped = urgent = False
    with locked(test.out):
        mark_folder(test.out, "stress", (run.name for _, run in planned))
        while cells and not stopped:
            planned = test.runs(cells)
            outcomes = {run.name: outcome for _, run in planned if (outcome := ended_before(run))}
            if outcomes:
                print_line(f"{len(outcomes)} of {len(planned)} runs have ended before")
            runs = [run for _, run in planned if run.name not in outcomes]
            with progress_bars(runs, console) as watch:
                pool = ProcessPool(runs, test.jobs, print_line, watch, early_end, note_end)
                outcomes |= {outcome.run.name: outcome for outcome in pool.run()}
            figures += [run_figures(cell, outcomes[run.name], early_end.came_back(run)) for cell, run in planned]
            stopped, urgent = bool(pool.stop_request), pool.stop_request.urgent
            cells = next_cells(test, figures) if test.search else []
        tables = axis_tables(test, figures)
        _write(test, tables)
        if console.is_terminal:
            console.print(as_table(tables))
        else:
            console.print(Text(as_markdown(test, tables)), soft_wrap=True)
        print_line(f"written: {test.out / 'stress.md'} and {test.out / 'stress.json'}")
        # Whoever sent SIGTERM or SIGHUP may not wait for a report.
        if any(run.steps for run in figures) and not urgent and (report := write_report(test.out)):
            print_line(f"written: {report}")
        if stopped:
            print_line("the same command resumes the stress test")
        return 0 if not stopped and all(run.survived is not None for run in figures) else STOPPED


def mark_ended(outcome: RunOutcome) -> None:
    """Note how a run has ended, and remove its weights: hundreds of runs would fill the disk with them."""
    folder = outcome.run.folder
    if outcome.counts:
        noted = {"state": outcome.state, "why": outcome.why, "steps": outcome.run.config.run.steps}
        write_atomically(folder.path / ENDED, json.dumps(noted) + "\n")
        folder.remove_weights()


def ended_before(run: CompareRun) -> RunOutcome | None:
    """Return the outcome of a run that an earlier call has ended."""
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


def planned_cells(test: StressTest) -> list[Cell]:
    """Return what can be known of the cells before the first run: the grid, or what a search may try."""
    if not test.search:
        return test.cells()
    return [
        Cell(name, axis.key, value) for axis in test.axes for value in possible_values(axis) for name in test.objectives
    ]


def first_cells(test: StressTest) -> list[Cell]:
    """Return what to run first: the whole grid, or the weakest stress of a search."""
    if not test.search:
        return test.cells()
    return [Cell(name, axis.key, axis.values[0]) for axis in test.axes for name in test.objectives]


def next_cells(test: StressTest, figures: list[RunFigures]) -> list[Cell]:
    """Return the next cell of every objective whose margin is not found yet."""
    cells = []
    for axis in test.axes:
        for name in test.objectives:
            mine = [run for run in figures if (run.cell.objective, run.cell.axis) == (name, axis.key)]
            # A run that failed has no verdict, so its search cannot go on.
            if any(run.survived is None for run in mine):
                continue
            value = next_value(axis, survivors(mine))
            cells += [Cell(name, axis.key, value)] if value is not None else []
    return cells


def _write(test: StressTest, tables: list[AxisTable]) -> None:
    write_atomically(test.out / "stress.json", as_json(test, tables))
    write_atomically(test.out / "stress.md", as_markdown(test, tables))
