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

from trimtab.files import write_atomically
from trimtab.insight.replay.replay import CLIPPED, RECORDED, Replay, TokenOverlap, parse_sweep, replay
from trimtab.record import RecordWarning, open_run
from trimtab.text import NOTHING, number, percent, printable

REASONS = ("silenced", "boosted", "damped", "masked", "dropped", "penalized", "reshaped", "corrected", CLIPPED)
WEIGHED = ("boosted", "damped")  # reasons whose mean weight is shown
SHOWN_PAIRS = 12  # six objectives have 15 pairs
LEGEND = (
    "Share of tokens (and their share of the gradient before the objective acts) x mean weight. Entropy: predicted "
    "first-order change per unit of step size, mean over updates."
)


def show_replay(
    run: Path, objectives: Sequence[str], sweeps: Sequence[str], steps: str | None, out: Path | None, console: Console
) -> None:
    """Run `trimtab replay`: show a progress bar, print two tables, and write a JSON file if asked for."""
    if out is not None:
        check_overwritten(out)
    first, last = parse_span(steps)
    sweep = parse_sweep(sweeps)
    count = sum((first is None or n >= first) and (last is None or n <= last) for n in open_run(run).steps)
    caught: list[warnings.WarningMessage] = []
    try:
        # On stderr, since stdout may go to a file; warnings are printed when the bar is gone.
        with (
            Progress(console=Console(stderr=True), transient=True) as bar,
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always", RecordWarning)
            task = bar.add_task("replaying", total=count)
            names = list(objectives) or [RECORDED]
            result = replay(run, names, sweep=sweep, first=first, last=last, on_step=lambda step: bar.advance(task))
    finally:  # also before an error: that no step is left is explained by why each was left out
        for warning in caught:
            _print_text(f"warning: {warning.message}", console)
    print_replay(result, console)
    if out is not None:
        write_atomically(out, json.dumps(to_json(result), indent=1, allow_nan=False) + "\n", named=True)


def check_overwritten(path: Path) -> None:
    """Raise if there is a file in the place of the results that does not hold results of a replay."""
    if not path.is_file():
        return
    try:
        known = json.loads(path.read_bytes()).keys() >= {"exact", "summary", "agreement"}
    except (ValueError, AttributeError, RecursionError):
        known = False
    if not known:
        raise ValueError(f"{path} does not hold the results of a replay and is not overwritten: choose another --json")


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
    reasons, rows = objective_rows(result)
    table = Table("objective", *reasons, "entropy", title=_plain(title), title_justify="left")
    for row in rows:
        table.add_row(*map(_plain, row))
    console.print(table)
    _print_text(LEGEND, console)
    if result.overlaps:
        pairs = Table("touch the same tokens", "", "Jaccard", "same reason", title_justify="left")
        # NaN has no order: pairs without touched tokens come last.
        nearest = sorted(result.overlaps, key=lambda pair: 0.0 if math.isnan(pair.jaccard) else -pair.jaccard)
        for overlap in nearest[:SHOWN_PAIRS]:
            pairs.add_row(*map(_plain, overlap_row(result, overlap)))
        if len(nearest) > SHOWN_PAIRS:
            pairs.caption = f"the nearest {SHOWN_PAIRS} of {len(nearest)} pairs"
        console.print(pairs)
    for note in result.notes:
        _print_text(f"Note: {note}.", console)


def objective_rows(result: Replay) -> tuple[list[str], list[list[str]]]:
    """Return the reasons that occur, and a row per objective: label, shares for each reason, entropy change."""
    reasons = [name for name in REASONS if any(name in stats.reasons for stats in result.stats)]
    rows = []
    for label, stats in zip(result.objectives, result.stats, strict=True):
        shares = {name: f"{percent(stats.share(name))} ({percent(stats.mass(name))})" for name in stats.reasons}
        shares |= {name: f"{shares[name]} x{stats.weight(name):.3g}" for name in WEIGHED if name in shares}
        change = stats.entropy_change_per_update
        entropy = NOTHING if math.isnan(change) else f"{change:+.3g}"
        rows.append([label, *(shares.get(name, NOTHING) for name in reasons), entropy])
    return reasons, rows


def overlap_row(result: Replay, overlap: TokenOverlap) -> list[str]:
    """Return the labels of two objectives, the Jaccard index of the tokens they touch, and their agreement."""
    labels = [result.objectives[overlap.first], result.objectives[overlap.second]]
    return [*labels, number(overlap.jaccard), percent(overlap.agreement)]


def to_json(result: Replay) -> dict[str, Any]:
    """Return a replay as plain values; NaN becomes None."""
    summary = {}
    for label, stats in zip(result.objectives, result.stats, strict=True):
        summary[label] = {
            "touched_share": stats.touched / max(stats.tokens, 1),
            "entropy_change_per_update": stats.entropy_change_per_update,
            "reasons": {
                name: {
                    "share": stats.share(name),
                    "mass": stats.mass(name),
                    "mass_after": stats.mass_after(name),
                    "weight": stats.weight(name),
                }
                for name in stats.reasons
            },
        }
    agreement = [
        {
            "objectives": [result.objectives[overlap.first], result.objectives[overlap.second]],
            "jaccard": overlap.jaccard,
            "agreement": overlap.agreement,
        }
        for overlap in result.overlaps
    ]
    table = {**asdict(result), "exact": result.exact, "summary": summary, "agreement": agreement}
    return {key: _without_nan(value) for key, value in table.items()}


def _print_text(text: str, console: Console) -> None:
    console.print(_plain(text), highlight=False)


def _plain(text: str) -> Text:
    """Return text without control sequences, which rich does not parse as markup."""
    # A label or a path may hold anything, even escape sequences.
    return Text(printable(text))


def _without_nan(value: Any) -> Any:
    # JSON has no NaN: json.dumps would write a token that other parsers reject.
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
