"""A replay for people and for programs: tables in the terminal, and JSON."""

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

from trimtab.insight.replay.replay import RECORDED, parse_sweep, replay
from trimtab.insight.replay.values import CLIPPED, Overlap, Replay, Treatment
from trimtab.record import RecordWarning, open_run
from trimtab.text import NOTHING, percent, printable

REASONS = ("silenced", "boosted", "damped", "masked", "dropped", "penalized", "reshaped", "corrected", CLIPPED)
SHOWN_PAIRS = 12
LEGEND = (
    "Share of tokens (and of the gradient mass they would have had). Entropy: predicted first-order change per unit of "
    "step size, mean over updates."
)


def show_replay(
    run: Path, objectives: Sequence[str], sweeps: Sequence[str], steps: str | None, out: Path | None, console: Console
) -> None:
    """`trimtab replay`: a progress bar, two tables, and a JSON file where asked for."""
    first, last = parse_span(steps)
    sweep = parse_sweep(sweeps)
    count = sum((first is None or n >= first) and (last is None or n <= last) for n in open_run(run).steps)
    with Progress(console=Console(stderr=True), transient=True) as bar, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RecordWarning)
        task = bar.add_task("replaying", total=count)
        names = list(objectives) or [RECORDED]
        result = replay(run, names, sweep=sweep, first=first, last=last, on_step=lambda step: bar.advance(task))
    for warning in caught:
        _say(f"warning: {warning.message}", console)
    print_replay(result, console)
    if out is not None:
        out.write_text(json.dumps(to_json(result), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def parse_span(text: str | None) -> tuple[int | None, int | None]:
    """`20:40` as first and last step, both included; either may be left out."""
    if text is None:
        return None, None
    words = text.split(":") if ":" in text else [text, text]
    if len(words) != 2 or not all(word.strip().isdecimal() or not word.strip() for word in words):
        raise ValueError(f"--steps {text!r}: write first:last, for example 20:40, or 20: for all from the 20th")
    first, last = (int(word) if word.strip() else None for word in words)
    return first, last


def print_replay(result: Replay, console: Console) -> None:
    """Who does what to which share of the tokens and of the gradient, and how far they agree."""
    title = (
        f"{result.run}: steps {result.steps[0].step} to {result.steps[-1].step}, {result.treatments[0].tokens} tokens"
    )
    reasons = shown_reasons(result)
    table = Table("objective", *reasons, "entropy", title=_plain(title), title_justify="left")
    for label, treatment in zip(result.objectives, result.treatments, strict=True):
        table.add_row(_plain(label), *(cell(treatment, name) for name in reasons), change(treatment))
    console.print(table)
    _say(LEGEND, console)
    if result.overlaps:
        console.print(_overlap_table(result))
    for note in result.notes:
        _say(f"Note: {note}.", console)


def to_json(result: Replay) -> dict[str, Any]:
    """A replay as plain values; a number that does not exist is null."""
    table = {
        **asdict(result),
        "exact": result.exact,
        "summary": {
            label: {
                "touched_share": treatment.touched / max(treatment.tokens, 1),
                "entropy_change_per_update": treatment.entropy_change_per_update,
                "reasons": {
                    name: {
                        "share": treatment.share(name),
                        "mass": treatment.mass(name),
                        "mass_after": treatment.mass_after(name),
                    }
                    for name in treatment.reasons
                },
            }
            for label, treatment in zip(result.objectives, result.treatments, strict=True)
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
    for overlap in sorted(result.overlaps, key=_nearest)[:SHOWN_PAIRS]:
        names = (_plain(result.objectives[n]) for n in (overlap.first, overlap.second))
        table.add_row(*names, number(overlap.jaccard), percent(overlap.agreement))
    if len(result.overlaps) > SHOWN_PAIRS:
        table.caption = f"the nearest {SHOWN_PAIRS} of {len(result.overlaps)} pairs"
    return table


def _say(text: str, console: Console) -> None:
    console.print(_plain(text), highlight=False)


def _plain(text: str) -> Text:
    """Text that can neither steer the terminal nor be taken for markup."""
    return Text(printable(text))


def _nearest(overlap: Overlap) -> float:
    return 0.0 if math.isnan(overlap.jaccard) else -overlap.jaccard


def cell(treatment: Treatment, reason: str) -> str:
    """The share of tokens with a reason, and of the gradient mass that they would have had."""
    if reason not in treatment.reasons:
        return NOTHING
    return f"{percent(treatment.share(reason))} ({percent(treatment.mass(reason))})"


def change(treatment: Treatment) -> str:
    """The predicted change of the entropy per update."""
    value = treatment.entropy_change_per_update
    return NOTHING if math.isnan(value) else f"{value:+.3g}"


def number(value: float) -> str:
    """A share as a number."""
    return NOTHING if math.isnan(value) else f"{value:.3f}"


def shown_reasons(result: Replay) -> list[str]:
    """The reasons that occur, in the order of the table."""
    return [name for name in REASONS if any(name in treatment.reasons for treatment in result.treatments)]


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
