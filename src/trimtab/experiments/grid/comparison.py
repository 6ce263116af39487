"""The tables of a comparison, means and spreads over seeds and curves, for a terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trimtab.experiments.grid.plan import Grid, RunOutcome
from trimtab.experiments.intervals import SeedDifference, seed_difference
from trimtab.text import BARS, NOTHING, markdown_table, number, percent, sparkline
from trimtab.trainer.train import END_WINDOW, summarize_metrics

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
SHOWN = [name for _, name, _ in COLUMNS]
COSTS = ["silenced", "clipped", "seconds"]  # a separate table in a terminal
DIFFERENCE_HEADS = ["objective", "figure", "difference", "95 % interval", "same sign"]
OPTIONAL = {"score_start", "score_end"}  # columns that are left out if no run has them
DIFFERENCES = {
    "accuracy_end": "held-out, points",
    "score_end": "score",
    "reward_end": "reward",
    "entropy_end": "entropy",
}
WIDTH = 80  # columns that a terminal has at least
OBJECTIVE_WIDTH = 22  # a longer name is wrapped
CURVES = {"held-out accuracy": "eval/accuracy", "held-out score": "eval/score", "entropy": "policy/entropy"}
CURVE_WIDTH = 28  # in Markdown
LEGEND = (
    f"Mean ± standard deviation over seeds. Reward and entropy: mean over {END_WINDOW}. Silenced, clipped: share of "
    "tokens over the whole run. Seconds: sampling and updates, without warm start and evaluation. Differences: mean "
    "over the seeds that both have, with its 95 % interval (Student's t), and in how many of them it has this sign."
)


@dataclass(frozen=True)
class ObjectiveRow:
    """One objective: its runs, and mean and spread of each column; the spread is None with fewer than two runs."""

    objective: str
    outcomes: list[RunOutcome]
    seeds: dict[str, dict[int, float]]  # the runs' numbers
    mean: dict[str, float | None]
    spread: dict[str, float | None]
    curves: dict[str, dict[int, float]]

    def cells(self, names: Collection[str] = SHOWN) -> list[str]:
        """Return the row of the table: the objective, how many of its runs count, and mean ± spread of each column."""
        cells = [self.objective, f"{sum(outcome.counts for outcome in self.outcomes)}/{len(self.outcomes)}"]
        for _, name, form in COLUMNS:
            spread = self.spread[name]
            if name in names:
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
    records = {outcome.run.seed: outcome.run.folder.records() for outcome in outcomes if outcome.counts}
    summaries = {seed: asdict(summarize_metrics(run)) for seed, run in records.items()}
    # Some objectives silence or clip nothing, and a run without evaluation has no accuracy.
    seeds = {
        name: {seed: run[name] for seed, run in summaries.items() if run[name] is not None} for _, name, _ in COLUMNS
    }
    mean = {name: fmean(column.values()) if column else None for name, column in seeds.items()}
    spread = {name: stdev(column.values()) if len(column) > 1 else None for name, column in seeds.items()}
    curves = {name: _mean_curve(list(records.values()), key) for name, key in CURVES.items()}
    return ObjectiveRow(objective, outcomes, seeds, mean, spread, curves)


def differences(rows: Sequence[ObjectiveRow]) -> dict[str, dict[str, SeedDifference]]:
    """Return how each objective differs from the first, paired by seed: by its name and that of the figure."""
    first, *others = rows
    found = {
        row.objective: {name: seed_difference(row.seeds[name], first.seeds[name]) for name in DIFFERENCES}
        for row in others
    }
    return {name: {key: each for key, each in row.items() if each is not None} for name, row in found.items()}


def _difference_cells(rows: Sequence[ObjectiveRow]) -> list[list[str]]:
    cells = []
    for objective, figures in differences(rows).items():
        for name, found in figures.items():
            factor, digits = (100, 1) if name == "accuracy_end" else (1, 3)
            mean, low, high = (f"{factor * value:+.{digits}f}" for value in (found.mean, found.low, found.high))
            pairs = f"{found.agree} of {found.pairs}" + (f", {found.unpaired} unpaired" if found.unpaired else "")
            interval = f"{low} to {high}" if found.pairs > 1 else NOTHING
            cells.append([objective, DIFFERENCES[name], mean, interval, pairs])
    return cells


def _mean_curve(records: list[list[dict[str, Any]]], key: str) -> dict[int, float]:
    by_step: dict[int, list[float]] = {}
    for record in (record for run in records for record in run):
        if key in record and math.isfinite(record[key]):
            by_step.setdefault(record["step"], []).append(record[key])
    return {step: fmean(values) for step, values in sorted(by_step.items())}


def sparklines(rows: Sequence[ObjectiveRow], curve: str, bars: str, width: int = CURVE_WIDTH) -> list[str]:
    """Return one curve for every row, all on the same scale, with its first and last value."""
    values = [list(row.curves[curve].values()) for row in rows]
    # One scale for all rows: otherwise every objective would seem to go from bottom to top.
    seen = [value for line in values for value in line] or [0.0]
    low, high = min(seen), max(seen)
    return [
        f"{number(line[0], 2)} {sparkline(line, width, low, high, bars)} {number(line[-1], 2)}" if line else ""
        for line in values
    ]


def _curve_cells(rows: Sequence[ObjectiveRow], bars: str, width: int = CURVE_WIDTH) -> list[list[str]]:
    columns = [[row.objective for row in rows], *(sparklines(rows, curve, bars, width) for curve in _curves(rows))]
    return [list(row) for row in zip(*columns, strict=True)]


def _curves(rows: Sequence[ObjectiveRow]) -> list[str]:
    scored = any(row.curves["held-out score"] for row in rows)
    return [name for name in CURVES if scored or name != "held-out score"]


def _names(rows: Sequence[ObjectiveRow]) -> list[str]:
    """Return the columns of the table that these rows have."""
    return [name for name in SHOWN if name not in OPTIONAL or any(row.seeds[name] for row in rows)]


def _heads(names: Collection[str]) -> list[str]:
    return ["objective", "runs", *(column for column, name, _ in COLUMNS if name in names)]


def as_table(rows: Sequence[ObjectiveRow], bars: str) -> RenderableType:
    """Return the tables for a terminal of 80 columns."""
    names = _names(rows)
    scores = [name for name in names if name in OPTIONAL]
    results = [name for name in names if name not in (*scores, *COSTS)]
    groups = {"Comparison": results, "Held-out scores": scores, "Tokens and time": COSTS}
    tables = [
        _terminal_table(title, _heads(group), [row.cells(group) for row in rows])
        for title, group in groups.items()
        if group
    ]
    if cells := _difference_cells(rows):
        tables.append(_terminal_table(f"Differences to {rows[0].objective}, paired by seed", DIFFERENCE_HEADS, cells))
    curves = _curves(rows)
    # Beside the curve stand its first and its last value.
    width = (WIDTH - OBJECTIVE_WIDTH) // len(curves) - len(" 0.00  0.00  ")
    cells = _curve_cells(rows, bars, width)
    tables.append(_terminal_table("Curves (one scale per column)", ["objective", *curves], cells))
    notes = [Text(note) for row in rows for note in row.notes()]
    return Group(*tables, Text(LEGEND, style="dim"), *notes)


def _terminal_table(title: str, heads: Sequence[str], body: Sequence[Sequence[str]]) -> Table:
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for n, head in enumerate(heads):
        # Only names may be wrapped: a number broken over two lines is misread.
        if n == 0:
            table.add_column(head, max_width=OBJECTIVE_WIDTH, overflow="fold")
        else:
            table.add_column(head, no_wrap=" " not in head)
    for cells in body:
        tight = [cell.replace("% ± ", "±").replace(" ± ", "±") for cell in cells]
        table.add_row(*map(Text, tight))  # Text, since rich would read [..] in a name as markup
    return table


def as_markdown(grid: Grid, rows: Sequence[ObjectiveRow]) -> str:
    """Return the tables as Markdown, with the command that made them."""
    notes = [f"- {note}" for row in rows for note in row.notes()]
    cells = _difference_cells(rows)
    sections = [
        "# Comparison",
        f"```\n{shlex.join(grid.command())}\n```",
        markdown_table(_heads(_names(rows)), [row.cells(_names(rows)) for row in rows]),
        LEGEND,
        *([f"Differences to {rows[0].objective}, paired by seed:"] if cells else []),
        *([markdown_table(DIFFERENCE_HEADS, cells)] if cells else []),
        markdown_table(["objective", *_curves(rows)], _curve_cells(rows, BARS)),
        *(["\n".join(notes)] if notes else []),
    ]
    return "\n\n".join(sections) + "\n"


def as_json(grid: Grid, rows: Sequence[ObjectiveRow]) -> str:
    """Return the comparison as JSON."""
    paired = differences(rows)
    objectives = {
        row.objective: {
            "mean": row.mean,
            "spread": row.spread,
            "differences": {name: _difference_json(each) for name, each in paired.get(row.objective, {}).items()},
            "curves": row.curves,
            "runs": [_run_json(outcome) for outcome in row.outcomes],
        }
        for row in rows
    }
    table = {"command": grid.command(), "recipe": grid.recipe, "objectives": objectives}
    return json.dumps(table, indent=2, allow_nan=False) + "\n"


def _difference_json(found: SeedDifference) -> dict[str, Any]:
    return {key: value if math.isfinite(value) else None for key, value in found._asdict().items()}


def _run_json(outcome: RunOutcome) -> dict[str, Any]:
    run = outcome.run
    summary = asdict(summarize_metrics(run.folder.records()))
    return {"seed": run.seed, "folder": run.name, "state": outcome.state, "why": outcome.why, **summary}
