"""The output of `trimtab replay`: tables in the terminal, and JSON."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from trimtab.insight.replay.replay import replay
from trimtab.insight.replay.stats import CLIPPED, ObjectiveStats, Replay, TokenOverlap
from trimtab.insight.replay.variants import RECORDED, parse_sweep
from trimtab.record import RecordWarning, open_run
from trimtab.text import NOTHING, percent, printable

REASONS = ("silenced", "boosted", "damped", "masked", "dropped", "penalized", "reshaped", "corrected", CLIPPED)
SHOWN_PAIRS = 12  # six objectives have 15 pairs
LEGEND = (
    "Share of tokens (and their share of the gradient before the objective acts). Entropy: predicted first-order "
    "change per unit of step size, mean over updates."
)


def show_replay(
    run: Path, objectives: Sequence[str], sweeps: Sequence[str], steps: str | None, out: Path | None, console: Console
) -> None:
    """Run `trimtab replay`: show a progress bar, print two tables, and write a JSON file if asked for."""
    first, last = parse_span(steps)
    sweep = parse_sweep(sweeps)
    count = sum((first is None or n >= first) and (last is None or n <= last) for n in open_run(run).steps)
    # On stderr, since stdout may go to a file; warnings are printed when the bar is gone.
    with Progress(console=Console(stderr=True), transient=True) as bar, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RecordWarning)
        task = bar.add_task("replaying", total=count)
        names = list(objectives) or [RECORDED]
        result = replay(run, names, sweep=sweep, first=first, last=last, on_step=lambda step: bar.advance(task))
    for warning in caught:
        _print_text(f"warning: {warning.message}", console)
    print_replay(result, console)
    if out is not None:
        out.write_text(json.dumps(to_json(result), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def parse_span(text: str | None) -> tuple[int | None, int | None]:
    """Parse `20:40` into the first and the last step, both included; either may be left out."""
    if text is None:
        return None, None
    bounds = text.split(":") if ":" in text else [text, text]
    if len(bounds) != 2 or not all(bound.strip().isdecimal() or not bound.strip() for bound in bounds):
        raise ValueError(f"--steps {text!r}: write first:last, for example 20:40, or 20: for all from the 20th")
    first, last = (int(bound) if bound.strip() else None for bound in bounds)
    return first, last


def print_replay(result: Replay, console: Console) -> None:
    """Print what each objective does to which share of tokens and gradient, and how far objectives agree."""
    title = f"{result.run}: steps {result.steps[0].step} to {result.steps[-1].step}, {result.stats[0].tokens} tokens"
    reasons = shown_reasons(result)
    table = Table("objective", *reasons, "entropy", title=_plain(title), title_justify="left")
    for label, stats in zip(result.objectives, result.stats, strict=True):
        table.add_row(_plain(label), *(reason_cell(stats, name) for name in reasons), entropy_cell(stats))
    console.print(table)
    _print_text(LEGEND, console)
    if result.overlaps:
        console.print(_overlap_table(result))
    for note in result.notes:
        _print_text(f"Note: {note}.", console)


def to_json(result: Replay) -> dict[str, Any]:
    """Return a replay as plain values; NaN becomes None."""
    table = {
        **asdict(result),
        "exact": result.exact,
        "summary": {
            label: {
                "touched_share": stats.touched / max(stats.tokens, 1),
                "entropy_change_per_update": stats.entropy_change_per_update,
                "reasons": {
                    name: {
                        "share": stats.share(name),
                        "mass": stats.mass(name),
                        "mass_after": stats.mass_after(name),
                    }
                    for name in stats.reasons
                },
            }
            for label, stats in zip(result.objectives, result.stats, strict=True)
        },
        "agreement": [
            {
                "objectives": [result.objectives[overlap.first], result.objectives[overlap.second]],
                "jaccard": overlap.jaccard,
                "agreement": overlap.agreement,
            }
            for overlap in result.overlaps
        ],
    }
    plain: dict[str, Any] = _without_nan(table)
    return plain


def _overlap_table(result: Replay) -> Table:
    table = Table("touch the same tokens", "", "Jaccard", "same reason", title_justify="left")
    for overlap in sorted(result.overlaps, key=_distance)[:SHOWN_PAIRS]:
        names = (_plain(result.objectives[n]) for n in (overlap.first, overlap.second))
        table.add_row(*names, jaccard_cell(overlap.jaccard), percent(overlap.agreement))
    if len(result.overlaps) > SHOWN_PAIRS:
        table.caption = f"the nearest {SHOWN_PAIRS} of {len(result.overlaps)} pairs"
    return table


def _print_text(text: str, console: Console) -> None:
    console.print(_plain(text), highlight=False)


def _plain(text: str) -> Text:
    """Return text without control sequences, which rich does not parse as markup."""
    # A label or a path may hold anything, even escape sequences.
    return Text(printable(text))


def _distance(overlap: TokenOverlap) -> float:
    # NaN has no order: pairs without touched tokens come last.
    return 0.0 if math.isnan(overlap.jaccard) else -overlap.jaccard


def reason_cell(stats: ObjectiveStats, reason: str) -> str:
    """Write the share of tokens with a reason, and their share of the gradient mass before the objective's rules."""
    if reason not in stats.reasons:
        return NOTHING
    return f"{percent(stats.share(reason))} ({percent(stats.mass(reason))})"


def entropy_cell(stats: ObjectiveStats) -> str:
    """Write the predicted entropy change per update."""
    value = stats.entropy_change_per_update
    return NOTHING if math.isnan(value) else f"{value:+.3g}"


def jaccard_cell(value: float) -> str:
    """Write a Jaccard index."""
    return NOTHING if math.isnan(value) else f"{value:.3f}"


def shown_reasons(result: Replay) -> list[str]:
    """Return the reasons that occur, in the order of the table."""
    return [name for name in REASONS if any(name in stats.reasons for stats in result.stats)]


def _without_nan(value: Any) -> Any:
    # JSON has no NaN: json.dumps would write a token that other parsers reject.
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
