"""The tables of a comparison, means and spreads over seeds and curves, for a terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from trimtab.compare.processes import ProcessPool, Watch
from trimtab.compare.runs import CompareRun, Comparison, RunOutcome
from trimtab.console import END_WINDOW, STOPPED, summarize_metrics
from trimtab.files import locked, write_atomically
from trimtab.text import BARS, bars_for, number, percent, sparkline

# Column, field of a RunSummary, and how it is formatted.
COLUMNS: list[tuple[str, str, Callable[[float | None], str]]] = [
    ("held-out start", "accuracy_start", percent),
    ("held-out end", "accuracy_end", percent),
    ("score start", "score_start", number),
    ("score end", "score_end", number),
    ("reward", "reward_end", number),
    ("entropy", "entropy_end", number),
    ("silenced", "silenced", percent),
    ("clipped", "clipped", percent),
    ("seconds", "seconds", lambda value: number(value, 1)),
]
HEADS = ["objective", "runs", *(column for column, _, _ in COLUMNS)]
CURVES = {"held-out accuracy": "eval/accuracy", "held-out score": "eval/score", "entropy": "policy/entropy"}
CURVE_WIDTH = 28
LEGEND = (
    f"Mean ± standard deviation over seeds. Reward and entropy: mean over {END_WINDOW}. Silenced, clipped: share of "
    "tokens over the whole run. Seconds: sampling and updates, without warm start and evaluation."
)


@dataclass(frozen=True)
class ObjectiveRow:
    """One objective: its runs, and mean and spread of each column; the spread is None with fewer than two runs."""

    objective: str
    outcomes: list[RunOutcome]
    mean: dict[str, float | None]
    spread: dict[str, float | None]
    curves: dict[str, dict[int, float]]

    def cells(self) -> list[str]:
        """Return the row of the table: the objective, how many of its runs count, and mean ± spread of each column."""
        cells = [self.objective, f"{sum(outcome.counts for outcome in self.outcomes)}/{len(self.outcomes)}"]
        for _, name, form in COLUMNS:
            spread = self.spread[name]
            cells.append(form(self.mean[name]) + ("" if spread is None else f" ± {form(spread)}"))
        return cells

    def notes(self) -> list[str]:
        """Return a line for every run that did not simply finish."""
        return [f"{o.run.objective}, seed {o.run.seed}: {o.state}: {o.why}" for o in self.outcomes if o.why]


def make_rows(outcomes: Sequence[RunOutcome]) -> list[ObjectiveRow]:
    """Return a row for every objective, in the order they were given."""
    objectives = dict.fromkeys(outcome.run.objective for outcome in outcomes)
    return [_row(name, [outcome for outcome in outcomes if outcome.run.objective == name]) for name in objectives]


def _row(objective: str, outcomes: list[RunOutcome]) -> ObjectiveRow:
    records = [outcome.run.folder.records() for outcome in outcomes if outcome.counts]
    summaries = [asdict(summarize_metrics(run)) for run in records]
    # Some objectives silence or clip nothing, and a run without evaluation has no accuracy.
    values = {name: [run[name] for run in summaries if run[name] is not None] for _, name, _ in COLUMNS}
    mean = {name: fmean(column) if column else None for name, column in values.items()}
    spread = {name: stdev(column) if len(column) > 1 else None for name, column in values.items()}
    curves = {name: _mean_curve(records, key) for name, key in CURVES.items()}
    return ObjectiveRow(objective, outcomes, mean, spread, curves)


def _mean_curve(records: list[list[dict[str, Any]]], key: str) -> dict[int, float]:
    by_step: dict[int, list[float]] = {}
    for record in (record for run in records for record in run):
        if key in record and math.isfinite(record[key]):
            by_step.setdefault(record["step"], []).append(record[key])
    return {step: fmean(values) for step, values in sorted(by_step.items())}


def sparklines(rows: Sequence[ObjectiveRow], curve: str, bars: str) -> list[str]:
    """Return one curve for every row, all on the same scale, with its first and last value."""
    values = [list(row.curves[curve].values()) for row in rows]
    # One scale for all rows: otherwise every objective would seem to go from bottom to top.
    seen = [value for line in values for value in line] or [0.0]
    low, high = min(seen), max(seen)
    return [
        f"{number(line[0], 2)} {sparkline(line, CURVE_WIDTH, low, high, bars)} {number(line[-1], 2)}" if line else ""
        for line in values
    ]


def _curve_cells(rows: Sequence[ObjectiveRow], bars: str) -> list[list[str]]:
    columns = [[row.objective for row in rows], *(sparklines(rows, curve, bars) for curve in CURVES)]
    return [list(row) for row in zip(*columns, strict=True)]


def as_table(rows: Sequence[ObjectiveRow], bars: str) -> RenderableType:
    """Return the tables for a terminal."""
    table = Table(*HEADS, title="Comparison", title_justify="left")
    for row in rows:
        table.add_row(*map(Text, row.cells()))  # Text, since rich would read [..] in a name as markup
    curves = Table("objective", *CURVES, title="Curves (one scale per column)", title_justify="left")
    for cells in _curve_cells(rows, bars):
        curves.add_row(*map(Text, cells))
    notes = [Text(note) for row in rows for note in row.notes()]
    return Group(table, Text(LEGEND, style="dim"), curves, *notes)


def as_markdown(comparison: Comparison, rows: Sequence[ObjectiveRow]) -> str:
    """Return the tables as Markdown, with the command that made them."""
    notes = [f"- {note}" for row in rows for note in row.notes()]
    sections = [
        "# Comparison",
        f"```\n{shlex.join(comparison.command())}\n```",
        markdown_table(HEADS, [row.cells() for row in rows]),
        LEGEND,
        markdown_table(["objective", *CURVES], _curve_cells(rows, BARS)),
        *(["\n".join(notes)] if notes else []),
    ]
    return "\n\n".join(sections) + "\n"


def as_json(comparison: Comparison, rows: Sequence[ObjectiveRow]) -> str:
    """Return the comparison as JSON."""
    objectives = {}
    for row in rows:
        runs = [_run_json(outcome) for outcome in row.outcomes]
        objectives[row.objective] = {"mean": row.mean, "spread": row.spread, "curves": row.curves, "runs": runs}
    table = {"command": comparison.command(), "recipe": comparison.recipe, "objectives": objectives}
    return json.dumps(table, indent=2, allow_nan=False) + "\n"


def _run_json(outcome: RunOutcome) -> dict[str, Any]:
    run, summary = outcome.run, asdict(summarize_metrics(outcome.run.folder.records()))
    return {"seed": run.seed, "folder": run.name, "state": outcome.state, "why": outcome.why, **summary}


def show_comparison(
    comparison: Comparison,
    runs: list[CompareRun],
    console: Console,
    write_report: Callable[[list[Path]], Path | None] = lambda folders: None,
) -> int:
    """Run what is missing, print the tables and write them to files; return the exit code.

    `write_report` is called with the folders of all runs that have metrics.
    """

    def print_line(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    # Two comparisons in one folder would write each other's logs and tables.
    with locked(comparison.out):
        with progress_bars(runs, console) as watch:
            pool = ProcessPool(runs, comparison.jobs, print_line, watch)
            rows = make_rows(pool.run())
        write_atomically(comparison.out / "compare.json", as_json(comparison, rows))
        write_atomically(comparison.out / "compare.md", as_markdown(comparison, rows))
        if console.is_terminal:
            console.print(as_table(rows, bars_for(console.encoding)))
        else:
            console.print(Text(as_markdown(comparison, rows)), soft_wrap=True)
        print_line(f"written: {comparison.out / 'compare.md'} and {comparison.out / 'compare.json'}")
        started = [run.folder.path for run in runs if run.folder.records()]
        # Whoever sent SIGTERM or SIGHUP may not wait for a report.
        if started and not pool.stop_request.urgent and (report := write_report(started)):
            print_line(f"written: {report}")
        if pool.stop_request:
            print_line("the same command resumes the comparison")
        return 0 if all(outcome.counts for row in rows for outcome in row.outcomes) else STOPPED


@contextmanager
def progress_bars(runs: list[CompareRun], console: Console) -> Iterator[Watch]:
    """Show a bar for the whole and one for every running process; nothing where there is no terminal."""
    if not console.is_terminal:
        yield lambda running, outcomes: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        whole = progress.add_task("runs", total=len(runs))
        tasks: dict[str, TaskID] = {}

        def watch(running: list[CompareRun], outcomes: list[RunOutcome]) -> None:
            progress.update(whole, completed=len(outcomes))
            for run in running:
                if run.name not in tasks:
                    tasks[run.name] = progress.add_task(f"  {run.name}", total=run.config.run.steps)
                progress.update(tasks[run.name], completed=run.last_step())
            # Bars of runs that have ended go, or dozens of them would push the others off the screen.
            for name in tasks.keys() - {run.name for run in running}:
                progress.remove_task(tasks.pop(name))

        yield watch


def markdown_table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *body]
    # A bar in a cell, as in an error message, would end it.
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
