"""What a comparison says: means and spreads over seeds, curves side by side, as a table, as Markdown and as JSON."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from trimtab.compare.runs import Comparison, Fleet, Job, Result, objectives_of, plain_numbers
from trimtab.console import STOPPED, outcome
from trimtab.files import write_atomically
from trimtab.text import ASCII_BARS, BARS, number, percent, sparkline

# Column, field of an Outcome, and how it is written.
COLUMNS: list[tuple[str, str, Callable[[float | None], str]]] = [
    ("held-out start", "accuracy_start", percent),
    ("held-out end", "accuracy_end", percent),
    ("reward", "reward_end", number),
    ("entropy", "entropy_end", number),
    ("silenced", "silenced", percent),
    ("clipped", "clipped", percent),
    ("seconds", "seconds", lambda value: number(value, 1)),
]
CURVES = {"held-out accuracy": "eval/accuracy", "entropy": "policy/entropy"}
CURVE_WIDTH = 28
LEGEND = (
    "Mean ± standard deviation over seeds. Reward and entropy: mean of the last steps. Silenced, clipped: share of "
    "tokens over the whole run. Seconds: sampling and updates, without warm start and evaluation."
)


@dataclass(frozen=True)
class Row:
    """One objective: its runs, and mean and spread of each column; the spread is None with fewer than two runs."""

    objective: str
    results: list[Result]
    mean: dict[str, float | None]
    spread: dict[str, float | None]
    curves: dict[str, dict[int, float]]

    @property
    def runs(self) -> str:
        """How many runs count, of how many."""
        return f"{sum(result.counts for result in self.results)}/{len(self.results)}"

    def cell(self, name: str, write: Callable[[float | None], str]) -> str:
        """Mean ± spread."""
        spread = self.spread[name]
        return write(self.mean[name]) + (f" ± {write(spread)}" if spread is not None else "")

    def notes(self) -> list[str]:
        """What is to be said about single runs."""
        return [f"{r.job.objective}, seed {r.job.seed}: {r.state}: {r.why}" for r in self.results if r.why]


def make_rows(results: Sequence[Result]) -> list[Row]:
    """A row for every objective."""
    return [
        _row(name, [result for result in results if result.job.objective == name])
        for name in objectives_of([result.job for result in results])
    ]


def _row(objective: str, results: list[Result]) -> Row:
    records = [result.job.folder.records() for result in results if result.counts]
    outcomes = [asdict(outcome(run)) for run in records]
    mean: dict[str, float | None] = {}
    spread: dict[str, float | None] = {}
    for _, name, _ in COLUMNS:
        values = [run[name] for run in outcomes if run[name] is not None]
        mean[name] = fmean(values) if values else None
        spread[name] = stdev(values) if len(values) > 1 else None
    curves = {name: _mean_curve(records, key) for name, key in CURVES.items()}
    return Row(objective, results, mean, spread, curves)


def _mean_curve(records: list[list[dict[str, Any]]], key: str) -> dict[int, float]:
    by_step: dict[int, list[float]] = {}
    for record in (record for run in records for record in run):
        if key in record and math.isfinite(record[key]):
            by_step.setdefault(record["step"], []).append(record[key])
    return {step: fmean(values) for step, values in sorted(by_step.items())}


def sparklines(rows: Sequence[Row], curve: str, bars: str = BARS) -> list[str]:
    """One curve for every row, all on the same scale, with its first and last value."""
    values = [list(row.curves[curve].values()) for row in rows]
    seen = [value for line in values for value in line]
    if not seen:
        return ["" for _ in rows]
    drawn = [sparkline(line, CURVE_WIDTH, min(seen), max(seen), bars) for line in values]
    return [
        f"{number(line[0], 2)} {spark} {number(line[-1], 2)}" if line else ""
        for spark, line in zip(drawn, values, strict=True)
    ]


def as_table(rows: Sequence[Row], bars: str = BARS) -> RenderableType:
    """For a terminal."""
    table = Table("objective", "runs", *(column for column, _, _ in COLUMNS), title="Comparison", title_justify="left")
    for row in rows:
        table.add_row(Text(row.objective), row.runs, *(row.cell(name, write) for _, name, write in COLUMNS))
    curves = Table("objective", *CURVES, title="Curves (one scale per column)", title_justify="left")
    lines = [sparklines(rows, curve, bars) for curve in CURVES]
    for position, row in enumerate(rows):
        curves.add_row(Text(row.objective), *(line[position] for line in lines))
    notes = [Text(note) for row in rows for note in row.notes()]
    return Group(table, Text(LEGEND, style="dim"), curves, *notes)


def as_markdown(comparison: Comparison, rows: Sequence[Row]) -> str:
    """For a file, with the command that made it."""
    heads = ["objective", "runs", *(column for column, _, _ in COLUMNS)]
    body = [[row.objective, row.runs, *(row.cell(name, write) for _, name, write in COLUMNS)] for row in rows]
    lines = [sparklines(rows, curve) for curve in CURVES]
    curves = [[row.objective, *(line[position] for line in lines)] for position, row in enumerate(rows)]
    notes = [f"- {note}" for row in rows for note in row.notes()]
    parts = [
        "# Comparison",
        f"```\n{shlex.join(comparison.command())}\n```",
        _markdown_table(heads, body),
        LEGEND,
        _markdown_table(["objective", *CURVES], curves),
        *(["\n".join(notes)] if notes else []),
    ]
    return "\n\n".join(parts) + "\n"


def as_json(comparison: Comparison, rows: Sequence[Row]) -> str:
    """For programs."""
    objectives = {
        row.objective: {
            "mean": row.mean,
            "spread": row.spread,
            "curves": row.curves,
            "runs": [_run_json(result) for result in row.results],
        }
        for row in rows
    }
    table = {"command": comparison.command(), "recipe": comparison.recipe, "objectives": objectives}
    return json.dumps(plain_numbers(table), indent=2) + "\n"


def _run_json(result: Result) -> dict[str, Any]:
    numbers = asdict(outcome(result.job.folder.records()))
    return {"seed": result.job.seed, "folder": result.job.name, "state": result.state, "why": result.why, **numbers}


def show_comparison(comparison: Comparison, jobs: list[Job], console: Console) -> int:
    """Run what is missing under a progress bar or with plain lines, show and write the table, give the exit code."""

    def say(text: str) -> None:
        with _unless_closed(console):
            console.print(Text(text), soft_wrap=True)

    with _bars(jobs, console) as watch:
        fleet = Fleet(jobs, comparison.jobs, say, watch)
        rows = make_rows(fleet.run())
    write_files(comparison, rows)
    bars = BARS if console.encoding.lower().startswith("utf") else ASCII_BARS
    if console.is_terminal:
        console.print(as_table(rows, bars))
    else:
        console.print(Text(as_markdown(comparison, rows)), soft_wrap=True)
    say(f"written: {comparison.out / 'compare.md'} and {comparison.out / 'compare.json'}")
    if fleet.interrupted:
        say("the same command goes on where this one stopped")
    return 0 if all(result.counts for row in rows for result in row.results) else STOPPED


@contextmanager
def _bars(jobs: list[Job], console: Console) -> Iterator[Callable[[list[Job], list[Result]], object]]:
    """A bar for the whole and one for every run under way; nothing where there is no terminal."""
    if not console.is_terminal:
        yield lambda running, results: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        whole = progress.add_task("runs", total=len(jobs))
        tasks: dict[str, TaskID] = {}

        def watch(running: list[Job], results: list[Result]) -> None:
            progress.update(whole, completed=len(results))
            for job in running:
                if job.name not in tasks:
                    tasks[job.name] = progress.add_task(f"  {job.name}", total=job.config.run.steps)
                progress.update(tasks[job.name], completed=job.last_step())
            for name in tasks.keys() - {job.name for job in running}:
                progress.remove_task(tasks.pop(name))

        yield _unless_closed(console)(watch)


@contextmanager
def _unless_closed(console: Console) -> Iterator[None]:
    """What is said to a terminal that was closed is lost; the runs are still to leave their checkpoints."""
    try:
        yield
    except OSError:
        console.quiet = True


def write_files(comparison: Comparison, rows: Sequence[Row]) -> None:
    """compare.json and compare.md."""
    comparison.out.mkdir(parents=True, exist_ok=True)
    write_atomically(comparison.out / "compare.json", as_json(comparison, rows))
    write_atomically(comparison.out / "compare.md", as_markdown(comparison, rows))


def _markdown_table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
