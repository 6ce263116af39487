"""Which recorded steps a report reads: evenly spaced ones, and those that metrics or alarms point to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.insight.report.run_files import RunFiles
from trimtab.record import read_step

MOST_STEPS = 160  # evenly spaced
MOST_TOKENS = 8_000_000  # in evenly spaced steps, as long as that leaves FEWEST_STEPS
FEWEST_STEPS = 8
MOST_HIGHLIGHTED = 24  # steps that one metric, or the alarms, add


@dataclass(frozen=True)
class StepSelection:
    """`evenly_spaced` steps go into the statistics; `highlighted` ones only offer responses to the microscope."""

    evenly_spaced: list[int]
    highlighted: list[int]


def select_steps(run: RunFiles, requested: Sequence[int] = ()) -> StepSelection:
    """Return the recorded steps to read, all of them in a short run."""
    assert run.records is not None
    steps = run.records.steps
    even = _evenly_spaced(steps, _affordable_steps(run, steps))
    if len(even) == len(steps):
        return StepSelection(even, [])
    highlighted = {_nearest(steps, alarm.step) for alarm in run.alarms[:MOST_HIGHLIGHTED]}
    highlighted |= {_nearest(steps, step) for step in requested}
    for name in ("tokens/silenced_share", "update/grad_norm", "update/clip_share"):
        if name in run.curves:
            # The recorded steps at which the metric is highest.
            rows, recorded = np.argsort(-run.curves[name].values, kind="stable"), set(steps)
            highest = [step for step in run.curves[name].steps[rows].tolist() if step in recorded]
            highlighted |= set(highest[:MOST_HIGHLIGHTED])
    return StepSelection(even, sorted(highlighted - set(even)))


def unrecorded_steps(run: RunFiles, requested: Sequence[int]) -> list[str]:
    """Return a note for each of the first requested steps that are not recorded, with the step that is shown."""
    steps = run.records.steps if run.records else []
    missing = sorted(set(requested) - set(steps))[:5]
    if not steps:
        return [f"step {step} is not recorded: no step is" for step in missing]
    recorded = f"the nearest of the {len(steps)} recorded steps, {steps[0]} to {steps[-1]}, is"
    return [f"step {step} is not recorded: {recorded} {_nearest(steps, step)}" for step in missing]


def _affordable_steps(run: RunFiles, steps: Sequence[int]) -> int:
    assert run.records is not None
    try:
        tokens = read_step(run.records.folder, steps[len(steps) // 2])[0].tokens  # the middle step stands for all
    except (ValueError, IndexError):
        return MOST_STEPS
    return max(FEWEST_STEPS, min(MOST_STEPS, MOST_TOKENS // max(tokens, 1)))


def _evenly_spaced(steps: Sequence[int], count: int) -> list[int]:
    if len(steps) <= count:
        return list(steps)
    rows = np.unique(np.linspace(0, len(steps) - 1, count).round().astype(int))
    return [steps[row] for row in rows]


def _nearest(steps: Sequence[int], step: int) -> int:
    return min(steps, key=lambda number: abs(number - step))
