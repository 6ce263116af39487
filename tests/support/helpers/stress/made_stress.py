"""Made-up stress tests: a folder with the stress.json of runs whose curves rise or fall."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trimtab.experiments.grid import Axis, Grid, RunFigures
from trimtab.experiments.grid.plan import Cell
from trimtab.experiments.grid.stress import as_json, axis_tables

STEPS = 40
FELL = 12  # the step at which a run that breaks falls
OBJECTIVES = ("grpo", "sspo + s2t")
# By value of the axis: for every objective, which seeds survive; `?` has not finished, `-` never learned.
SURVIVORS = {"3e-4": ("111", "111"), "1e-3": ("110", "111"), "3e-3": ("000", "1?0")}


def made_run(cell: Cell, seed: int, ended: str) -> RunFigures:
    """Return a run that learns, or falls at step FELL and is ended early, or never learned, or never started."""
    survived = {"1": True, "0": False, "-": False, "?": None}[ended]
    if ended == "-":
        never = "never learned: accuracy 0.01 after 22 steps"
        return replace(made_run(cell, seed, "0"), end=never, collapse_step=None)
    end = {
        True: "survived",
        False: f"collapsed at step {FELL}: accuracy is 0.01; its best was 0.45",
        None: "failed: no",
    }
    steps = {True: STEPS, False: FELL + 10, None: 0}[survived]
    fallen = range(FELL, steps + 1) if survived is False else ()
    accuracy = [(step, 0.01 if step in fallen else 0.4 + 0.01 * step + 0.01 * seed) for step in range(0, steps + 1, 2)]
    entropy = [(step, 0.05 if step in fallen else 0.9 - 0.01 * step) for step in range(1, steps + 1)]
    return RunFigures(
        **asdict(cell), seed=seed, folder=f"{cell.objective}-{cell.value}-seed{seed}",
        state="failed" if survived is None else "finished", why="", survived=survived, end=end[survived],
        collapse_step=FELL if survived is False else None, steps=steps, accuracy_start=0.4,
        accuracy_end=accuracy[-1][1] if steps else None, entropy_end=entropy[-1][1] if steps else None,
        in_band=0.25, touched={"clipped": 0.01}, seconds=12.0,
        curves={"eval/accuracy": accuracy if steps else [], "policy/entropy": entropy},
    )  # fmt: skip


def made_stress(
    folder: Path,
    survivors: Mapping[str, tuple[str, ...]] = SURVIVORS,
    objectives: tuple[str, ...] = OBJECTIVES,
    key: str = "update.lr",
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write the stress.json of a test with these survivors; `changes` replaces parts of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = [
        made_run(Cell(name, key, value), seed, ended)
        for value, ends in survivors.items()
        for name, seeds in zip(objectives, ends, strict=True)
        for seed, ended in enumerate(seeds)
    ]
    test = Grid(objectives, folder, axes=(Axis(key, tuple(survivors)),))
    stored = json.loads(as_json(test, axis_tables(test, runs)))
    (folder / "stress.json").write_text(json.dumps({**stored, **(changes or {})}))
    return folder
