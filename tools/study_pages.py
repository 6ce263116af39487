"""Tables and a picture of the stability study, from the results of `trimtab stress`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import fmean

from trimtab.compare import markdown_table
from trimtab.stress import AxisTable, read_stress
from trimtab.stress.figures import RunFigures
from trimtab.stress.tables import HEADS
from trimtab.text import percent

RESULTS = Path(__file__).parent.parent / "benchmarks/results"
CELL, ROW, LABELS, TOP = 92, 34, 150, 74  # pixels of the picture
GOOD, BAD = (33, 102, 172), (247, 247, 247)  # colours of full and of no accuracy


def axis_tables(name: str) -> Sequence[AxisTable]:
    """Return the tables of one result, by axis; none if it is not there."""
    path = RESULTS / f"stress-{name}.json"
    return read_stress(path).tables if path.exists() else []


def stress_tables(name: str) -> str:
    """The tables of one result: margins, and survivors by setting."""
    parts = []
    for table in axis_tables(name):
        parts += [f"Along `{table.axis.key}`:", markdown_table(HEADS, table.rows()), table.legend()]
        parts += ["Seeds that survive, and mean accuracy at the end:"]
        parts += [markdown_table(["objective", *table.values], table.grid())]
    return "\n\n".join(parts)


def heat_maps(results: Sequence[tuple[str, str]]) -> str:
    """A picture of several results: objectives by stress, the accuracy at the end as colour, the survivors as text."""
    panels = [(title, table) for title, name in results for table in axis_tables(name)[:1]]
    width = LABELS + sum(CELL * len(table.values) + 40 for _, table in panels)
    height = TOP + ROW * max((len(table.objectives) for _, table in panels), default=0) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="13" role="img" aria-label="Seeds that survive by objective and stress">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    left = LABELS
    for title, table in panels:
        parts += _panel(title, table, left, labels=left == LABELS)
        left += CELL * len(table.values) + 40
    legend = "n/n: seeds that survive; percentage and colour: mean held-out accuracy at the end; x: collapsed"
    parts.append(f'<text x="{LABELS}" y="{height - 12}" fill="#555" font-size="12">{legend}</text>')
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
