"""The tables of a stress test: margins and prices, survivors per setting; for a terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from trimtab.experiments.compare import markdown_table
from trimtab.experiments.stress.axis_table import AxisTable
from trimtab.experiments.stress.grid import StressTest
from trimtab.experiments.stress.sentences import headline

HEADS = ["objective", "margin", "times the first", "accuracy", "collapse at step", "entropy in band", "touched", "s"]


def as_table(tables: Sequence[AxisTable]) -> RenderableType:
    """Return the tables for a terminal."""
    parts: list[RenderableType] = []
    for each in tables:
        title = f"Seeds that survive, and accuracy at the end, by {each.axis.key}"
        parts += [
            Text(headline(each)),
            _terminal_table(f"Margin along {each.axis.key}", HEADS, each.rows()),
            Text(each.legend(), style="dim"),
            _terminal_table(title, ["objective", *each.values], each.grid()),
        ]
    return Group(*parts, *(Text(note) for note in _notes(tables)))


def _terminal_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    # Text everywhere, since rich would read [..] in a name or value as markup.
    table = Table(*(Column(Text(head)) for head in heads), title=Text(title), title_justify="left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def as_markdown(test: StressTest, tables: Sequence[AxisTable]) -> str:
    """Return the tables as Markdown, with the command that made them."""
    sections = ["# Stress test", f"```\n{shlex.join(test.command())}\n```"]
    for each in tables:
        sections += [f"## {each.axis.key}", headline(each), markdown_table(HEADS, each.rows()), each.legend()]
        sections += ["Seeds that survive, and mean accuracy at the end:"]
        sections += [markdown_table(["objective", *each.values], each.grid())]
    notes = [f"- {note}" for note in _notes(tables)]
    return "\n\n".join([*sections, *(["\n".join(notes)] if notes else [])]) + "\n"


def as_json(test: StressTest, tables: Sequence[AxisTable]) -> str:
    """Return the test as JSON, with the figures and curves of every run, one run per line."""
    axes = [
        {
            "key": each.axis.key,
            "values": each.values,
            "stable": each.stable,
            "margins": {name: asdict(margin) for name, margin in each.margins.items()},
        }
        for each in tables
    ]
    head = {"command": test.command(), "recipe": test.recipe, "objectives": list(test.objectives), "axes": axes}
    lines = ",\n".join(json.dumps(run.as_json(), allow_nan=False) for each in tables for run in each.runs)
    text = json.dumps(head, indent=1, allow_nan=False).removesuffix("\n}")
    return f'{text},\n "runs": [\n{lines}\n]\n}}\n'


def _notes(tables: Sequence[AxisTable]) -> list[str]:
    """Return a line for every run that is missing in the figures."""
    return [f"{run.folder}: {run.end}" for each in tables for run in each.runs if run.survived is None]
