"""Tables and a picture of the stability study, from the results of `trimtab stress`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from trimtab.experiments.grid import AxisTable, RunFigures, read_stress
from trimtab.experiments.grid.stress import HEADS
from trimtab.experiments.intervals import t_quantile
from trimtab.text import markdown_table, percent

RESULTS = Path(__file__).parent.parent / "benchmarks/results"
CELL, ROW, LETTER, TOP = 92, 34, 7, 74  # pixels of the picture
LAST = 10  # steps whose mean is a run's entropy at the end
MOST_EXAMPLES = 12
GOOD, BAD = (33, 102, 172), (247, 247, 247)  # colours of full and of no accuracy


def axis_tables(name: str) -> Sequence[AxisTable]:
    """Return the tables of one result, by axis; none if it is not there."""
    path = RESULTS / f"stress-{name}.json"
    return read_stress(path).tables if path.exists() else []


def stress_tables(name: str) -> str:
    """The tables of one result: margins, and survivors by setting."""
    parts = []
    for found in axis_tables(name):
        run = {each.objective for each in found.runs}
        table = replace(found, objectives=[each for each in found.objectives if each in run])  # no empty rows
        parts += [f"Along `{table.axis.key}`:", markdown_table(HEADS, table.rows()), table.legend()]
        parts += ["Seeds that survive, and mean accuracy at the end:"]
        parts += [markdown_table(["objective", *table.values], table.grid())]
    return "\n\n".join(parts)


def entropies(name: str, value: str) -> str:
    """The entropy of every run at one value of the first axis, over its last steps, and the mean with its interval."""
    table = axis_tables(name)[0]
    seeds = sorted({run.seed for run in table.runs})
    rows = []
    for objective in table.objectives:
        ends = {run.seed: _last_entropy(run) for run in table.cell(objective, value)}
        shown = [f"{ends[seed]:.3f}" if seed in ends else "-" for seed in seeds]
        rows.append([objective, *shown, _with_interval(list(ends.values()))])
    return markdown_table(["objective", *(f"seed {seed}" for seed in seeds), "mean, 95 %"], rows)


def fact(name: str, objective: str, value: str, figure: str) -> str:
    """One figure of a result at one value of its first axis: `seeds` that survive, or mean `accuracy` or `entropy`."""
    runs = [run for table in axis_tables(name)[:1] for run in table.cell(objective, value)]
    if not runs:
        return "(not run yet)"
    if figure == "seeds":
        return f"{sum(bool(run.survived) for run in runs)} of {len(runs)}"
    if figure == "accuracy":
        return percent(fmean(run.accuracy_end or 0.0 for run in runs))
    return f"{fmean(map(_last_entropy, runs)):.2f}"


def _last_entropy(run: RunFigures) -> float:
    return fmean(value for _, value in run.curves["policy/entropy"][-LAST:])


def _with_interval(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else "-"
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    # An entropy is not negative, so neither is the interval of its mean.
    return f"{fmean(values):.2f} [{max(0.0, fmean(values) - half):.2f}, {fmean(values) + half:.2f}]"


def silenced() -> str:
    """What STAPO silenced in a run: shares by kind, and examples."""
    path = RESULTS / "silenced-h200.json"
    if not path.exists():
        return ""
    run = json.loads(path.read_text())["runs"][0]
    kinds = ", ".join(f"{name} {percent(count / run['silenced'])}" for name, count in run["by_kind"].items())
    head = f"{run['silenced']:,} of {run['tokens']:,} tokens ({percent(run['share'])}): {kinds}."
    every = max(1, len(run["examples"]) // MOST_EXAMPLES)
    rows = [_example(each) for each in run["examples"][::every]]
    return head + "\n\n" + markdown_table(["step", "text, and the silenced token", "p", "entropy"], rows)


def _example(each: dict[str, Any]) -> list[str]:
    def code(text: str) -> str:
        # Text of a model in a cell of a table: one line, as code, without the two signs that would end it.
        return f"`{' '.join(text.split()).replace('`', chr(39)).replace('|', '/')}`"

    token = code(each["token"]) if each["token"].strip() else "(space)"
    probability = f"{each['probability']:.1g}" if each["probability"] else "< 1e-6"
    return [
        str(each["step"]),
        f"{code('... ' + each['before'][-35:])} **{token}**",
        probability,
        f"{each['entropy']:.2f}",
    ]


def heat_maps(results: Sequence[tuple[str, str]]) -> str:
    """A picture of several results: objectives by stress, the accuracy at the end as colour, the survivors as text."""
    panels = [(title, table) for title, name in results for table in axis_tables(name)[:1]]
    labels = 20 + LETTER * max((len(objective) for _, table in panels for objective in table.objectives), default=0)
    width = labels + sum(CELL * len(table.values) + 40 for _, table in panels)
    height = TOP + ROW * max((len(table.objectives) for _, table in panels), default=0) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="13" role="img" aria-label="Seeds that survive by objective and stress">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    left = labels
    for title, table in panels:
        parts += _panel(title, table, left, labels=left == labels)
        left += CELL * len(table.values) + 40
    legend = "n/n: seeds that survive; %, colour: mean accuracy at the end; x: does not hold; empty: not run"
    parts.append(f'<text x="{labels}" y="{height - 12}" fill="#555" font-size="12">{legend}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(title: str, table: AxisTable, left: int, labels: bool) -> list[str]:
    best = max((run.accuracy_end or 0.0 for run in table.runs), default=1.0) or 1.0
    parts = [f'<text x="{left}" y="22" font-weight="bold">{escape(title)}</text>']
    for column, value in enumerate(table.values):
        x = left + CELL * column
        head = f"{table.axis.key.rpartition('.')[2]} {value}"
        parts.append(f'<text x="{x + CELL / 2}" y="{TOP - 10}" text-anchor="middle">{escape(head)}</text>')
        for row, objective in enumerate(table.objectives):
            parts += _cell(table.cell(objective, value), x, TOP + ROW * row, best)
    if labels:
        for row, objective in enumerate(table.objectives):
            y = TOP + ROW * row + ROW / 2 + 4
            parts.append(f'<text x="{left - 10}" y="{y}" text-anchor="end">{escape(objective)}</text>')
    return parts


def _cell(runs: Sequence[RunFigures], x: float, y: float, best: float) -> list[str]:
    if not runs:
        return [f'<rect x="{x}" y="{y}" width="{CELL - 3}" height="{ROW - 3}" fill="none" stroke="#ddd"/>']
    accuracy, lived = fmean(run.accuracy_end or 0.0 for run in runs), sum(bool(run.survived) for run in runs)
    share = accuracy / best
    red, green, blue = (round(bad + (good - bad) * share) for good, bad in zip(GOOD, BAD, strict=True))
    ink = "white" if share > 0.6 else "#222"
    text = f"{lived}/{len(runs)}  {percent(accuracy)}" + ("" if 3 * lived >= 2 * len(runs) else " x")
    return [
        f'<rect x="{x}" y="{y}" width="{CELL - 3}" height="{ROW - 3}" fill="rgb({red},{green},{blue})"/>',
        f'<text x="{x + CELL / 2}" y="{y + ROW / 2 + 3}" text-anchor="middle" fill="{ink}">{text}</text>',
    ]
