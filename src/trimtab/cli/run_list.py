"""`trimtab runs`: the runs below a folder, how far each came, and which settings set them apart."""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.own_parts import own_names
from trimtab.record import find_fall
from trimtab.text import one_line, printable, shorten, shown
from trimtab.trainer.config import parse_toml
from trimtab.trainer.train import SavedRun, load_run

WIDTH = 80
DEEPEST = 3  # folders: those of comparisons and stress tests hold their runs
MOST_SETTINGS = 8  # of a run
INDENT = "    "


def run_lines(folder: Path) -> list[str]:
    """Return the lines about all runs below a folder, the newest first; none is longer than 80 characters."""
    runs = sorted(find_runs(folder), key=_last_change, reverse=True)
    if not runs:
        raise ValueError(f"{shown(str(folder), 300)} has no runs: a run is a folder with config.toml")
    settings = [_settings(run) for run in runs]
    lines = []
    for run, mine in zip(runs, _differences(settings), strict=True):
        state = _state(run)
        name = one_line(str(run.path.relative_to(folder)))
        room = WIDTH - len(state) - 2
        lines.append(f"{name if len(name) <= room else f'{name[: room - 3]}...':<{room}}  {state}")
        lines += textwrap.wrap(mine, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False)
    return lines


def find_runs(folder: Path) -> Iterator[SavedRun]:
    """Yield the runs in a folder and in the folders below it."""
    for path, folders, files in os.walk(folder):
        here = Path(path)
        if "config.toml" in files:
            yield load_run(here)
            folders.clear()
        elif len(here.relative_to(folder).parts) >= DEEPEST:
            folders.clear()
        folders[:] = [name for name in folders if not name.startswith(".")]


def _last_change(run: SavedRun) -> float:
    files = [run.path / name for name in ("metrics.jsonl", "config.toml")]
    return next(file.stat().st_mtime for file in files if file.exists())


def _state(run: SavedRun) -> str:
    try:
        last = run.config.run.steps
        state = run.state
    except (ValueError, OSError) as error:
        return shorten(printable(f"unreadable: {error}".replace("\n", " ")), 40)
    if state == "finished":
        low = find_fall(run.metrics) is not None
        return f"finished {last} steps{', and ended below half of its best' * low}"
    if state == "collapsed" and (collapse := run.collapse) is not None:
        return f"collapsed at step {collapse.step} of {last}"
    return f"{state} {'after' if state == 'failed' else 'at'} step {run.step} of {last}"


def _settings(run: SavedRun) -> dict[str, str]:
    """Return the settings of a run as text by key; none if they cannot be read."""
    try:
        table = run.config.model_dump(mode="json")
        stored = parse_toml((run.path / "config.toml").read_text("utf-8"))
    except (ValueError, OSError):
        return {}
    # The configuration has no part of the user's own, because none is loaded to list runs.
    table |= {section: values for section, values in stored.items() if own_names(values) and isinstance(values, dict)}
    return {
        f"{section}.{key}": shorten(printable(str(value)), 40)
        for section, values in table.items()
        for key, value in values.items()
    }


def _differences(settings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the settings in which each run differs from most of the runs; of two runs, those in which they differ."""
    read = [each for each in settings if each]
    keys = dict.fromkeys(key for each in read for key in each)
    usual = {}
    for key in keys:
        counts = Counter(each.get(key) for each in read)
        (value, times), *others = counts.most_common()
        # No value is the usual one if it is not more than half of the runs' own: then every run shows its own.
        usual[key] = value if 2 * times > len(read) or not others else None
    for each in settings:
        mine = [f"{key}={value}" for key, value in each.items() if value != usual[key]]
        more = [f"and {len(mine) - MOST_SETTINGS} more"] if len(mine) > MOST_SETTINGS else []
        yield ", ".join(mine[:MOST_SETTINGS] + more)
