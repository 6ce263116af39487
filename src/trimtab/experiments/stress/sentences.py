"""A stress test in sentences, for someone who sees one for the first time."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.experiments.stress.axis_table import AxisTable
from trimtab.experiments.stress.figures import RunFigures, median_of, survivors


def headline(table: AxisTable) -> str:
    """Say what was pushed and who held longest."""
    key, values, found = table.axis.key, table.values, table.margins
    judged = [run for run in table.runs if run.survived is not None]
    if not judged:
        return f"{key}: no run has finished yet."
    pushed = f"{key} was pushed from {values[0]} to {values[-1]}" if len(values) > 1 else f"{key} was {values[0]}"
    ranks = {name: -1 if (value := found[name].value) is None else values.index(value) for name in table.objectives}
    best = max(ranks.values())
    if best < 0:
        return f"{pushed}: no objective survived any of it{_without_collapse(judged)}."
    longest = [name for name, rank in ranks.items() if rank == best]
    others = [
        f"{name} {f'up to {values[rank]}' if rank >= 0 else 'not at all'}"
        for name, rank in ranks.items()
        if rank < best
    ]
    if others:
        outcome = f"{_list(longest)} held longest, up to {values[best]}; {_list(others)}."
    elif len(longest) == 1:
        outcome = f"{longest[0]} held up to {values[best]}."
    else:
        outcome = f"{_list(longest)} held equally long, up to {values[best]}."
    return f"{pushed}: {outcome}{' Nothing stronger was tried.' if best == len(values) - 1 else ''}"


def describe(table: AxisTable, objective: str) -> str:
    """Say how far one objective can be pushed, and what happens beyond."""
    margin, first = table.margins[objective], table.objectives[0]
    mine = [run for run in table.runs if run.cell.objective == objective]
    lived = survivors(mine)
    if not lived:
        return f"{objective}: no run has finished yet."
    if margin.value is None:
        text = f"{objective} survives none of the values."
    else:
        seeds, low, high = _seeds(table, objective, margin.value), margin.low or "none", margin.high or "none"
        interval = f", 95 % interval {low} to {high}" if low != high else ""
        text = f"{objective} holds up to {table.axis.key} = {margin.value} ({seeds}{interval})"
        if margin.multiple and objective != first:
            text += f", {f'{margin.multiple:.2g} times' if margin.multiple != 1 else 'the same as'} {first}'s"
        text += "."
    start = 0 if margin.value is None else table.values.index(margin.value) + 1
    broken = next((value for value in table.values[start:] if lived.get(value) is False), None)
    if broken is None:
        return f"{text} Nothing stronger was tried."
    runs = table.cell(objective, broken)
    step = median_of(runs, lambda run: run.collapse_step)
    after = f", and collapses are at step {step:.0f} (median)" if step is not None else ""
    return f"{text} At {broken}, {_seeds(table, objective, broken)}{after}{_without_collapse(runs)}."


def _without_collapse(runs: Sequence[RunFigures]) -> str:
    """Say how many runs broke without a collapse; nothing if none did."""
    low, count = sum(run.ended_low for run in runs), sum(run.never_learned for run in runs)
    if count and count == len(runs):
        return "; no run collapsed, but none learned"
    fell = f"; {low} of {len(runs)} ended below half of their best" if low else ""
    return f"{fell}; {count} of {len(runs)} never learned" if count else fell


def _seeds(table: AxisTable, objective: str, value: str) -> str:
    runs = table.cell(objective, value)
    return f"{sum(bool(run.survived) for run in runs)} of {len(runs)} seeds survive"


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
