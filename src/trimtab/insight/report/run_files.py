"""Read a run's folder for the report; what is missing or damaged becomes a note, and the rest is shown.

`select_steps` says which recorded steps are read: evenly spaced ones, and those that metrics or alarms point to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.files import read_bounded
from trimtab.insight.report.curve_store import MOST_METRICS, CurveStore, MetricCurve
from trimtab.insight.report.embed import truncated
from trimtab.record import RecordError, Records, iter_step_lines, open_run, read_step
from trimtab.trainer.config import LARGEST_RECIPE, parse_toml

MOST_ALARMS = 1_000
CONTENTS = ("config.toml", "metrics.jsonl", "alarms.jsonl", "tokens")  # a run's folder has one of them at least

MOST_STEPS = 160  # evenly spaced
MOST_TOKENS = 8_000_000  # in evenly spaced steps, as long as that leaves FEWEST_STEPS
FEWEST_STEPS = 8
MOST_HIGHLIGHTED = 24  # steps that one metric, or the alarms, add


@dataclass(frozen=True)
class AlarmRecord:
    """A line of alarms.jsonl; everything but the step is text."""

    step: int
    alarm: str
    message: str = ""
    evidence: str = ""
    suggestion: str = ""
    action: str = ""


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run's folder; `notes` name what is missing or could not be read."""

    name: str
    config: dict[str, Any]
    config_text: str
    curves: Mapping[str, MetricCurve]
    alarms: list[AlarmRecord]
    skipped_updates: int
    records: Records | None
    notes: list[str] = field(default_factory=list)

    @property
    def objective(self) -> dict[str, Any]:
        """Return the objective's name and options from the configuration, else from the records, else nothing."""
        table = self.config.get("objective")
        if isinstance(table, dict) and "name" in table:
            return table
        return dict(self.records.manifest.objective) if self.records else {}

    @property
    def label(self) -> str:
        """Return the objective with its options in one line."""
        options = [f"{key}={value}" for key, value in self.objective.items() if key != "name"]
        name = str(self.objective.get("name", "unknown objective"))
        return truncated(f"{name} ({', '.join(options)})" if options else name, 200)

    @property
    def seed(self) -> int | None:
        """Return the run's seed."""
        run = self.config.get("run")
        seed = run.get("seed") if isinstance(run, dict) else None
        return seed if isinstance(seed, int) else None

    @property
    def last_step(self) -> int:
        """Return the last step in the metrics or the records."""
        ends = [int(curve.steps[-1]) for curve in self.curves.values() if len(curve.steps)]
        return max([*ends, *(self.records.steps[-1:] if self.records else [])], default=0)


def read_run(path: Path) -> RunFiles:
    """Read all of a run but its tokens, which are read later, step by step."""
    if not path.is_dir():
        raise ValueError(f"{path} is no run: {'a run is a folder' if path.exists() else 'there is no such folder'}")
    if not holds_run(path):
        inside = sorted(child.name for child in path.iterdir() if child.is_dir() and holds_run(child))
        named = "; it holds the runs " + ", ".join(inside) + ": name one or several of them" if inside else ""
        raise ValueError(f"{path} is no run: it has none of {', '.join(CONTENTS)}{named}")
    notes: list[str] = []
    config: dict[str, Any] = {}
    text = ""
    if (path / "config.toml").exists() or not made_inside_an_engine(path):
        config, text = read_config(path / "config.toml", notes)
    curves = _read_metrics(path / "metrics.jsonl", notes)
    alarms = _read_alarms(path / "alarms.jsonl", notes)
    skipped = sum(1 for _ in _step_lines(path / "nonfinite.jsonl", notes))
    records = None
    try:
        records = open_run(path)
        if not records.steps:
            notes.append("tokens: no step is recorded, so there are no heat maps and no microscope")
    except RecordError as error:
        notes.append(f"tokens: {error}. Without records there are no heat maps and no microscope.")
    name = path.resolve().name or str(path.resolve())
    return RunFiles(name, config, text, curves, alarms, skipped, records, [truncated(note, 500) for note in notes])


def made_inside_an_engine(path: Path) -> bool:
    """Return whether TRL or verl made the records: they keep their settings themselves, and write no config.toml."""
    try:
        return bool({"trl", "verl"} & set(open_run(path).manifest.versions))
    except RecordError:
        return False


def holds_run(folder: Path) -> bool:
    """Return whether a folder has any of a run's files."""
    return any((folder / name).exists() for name in CONTENTS)


def read_config(path: Path, notes: list[str]) -> tuple[dict[str, Any], str]:
    """Return a configuration as a table and as its text; what is wrong with it becomes a note."""
    try:
        text = read_bounded(path, LARGEST_RECIPE).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        notes.append(f"config.toml is missing or cannot be read: {_reason(error)}")
        return {}, ""
    try:
        return parse_toml(text), text
    except ValueError as error:
        notes.append(f"config.toml is no TOML: {error}")
        return {}, text


def _read_metrics(path: Path, notes: list[str]) -> Mapping[str, MetricCurve]:
    if not path.is_file():
        notes.append("metrics.jsonl is missing: there are no curves")
        return {}
    store = CurveStore()
    for record in _step_lines(path, notes):
        store.add(record)
    notes += metric_notes(store)
    return store


def metric_notes(store: CurveStore) -> list[str]:
    """Return what the metrics of a run lack."""
    more = f"metrics.jsonl has more than {MOST_METRICS} metrics: {len(store.left_out)} or more are left out"
    empty = "metrics.jsonl holds no metrics: there are no curves"
    return [more] * bool(store.left_out) + [empty] * (not store)


def _read_alarms(path: Path, notes: list[str]) -> list[AlarmRecord]:
    alarms: list[AlarmRecord] = []
    for record in _step_lines(path, notes):
        if len(alarms) == MOST_ALARMS:
            notes.append(f"alarms.jsonl: only the first {MOST_ALARMS} alarms are shown")
            break
        alarms.append(alarm_record(record))
    return alarms


def alarm_record(record: Mapping[str, Any]) -> AlarmRecord:
    """Return a line of alarms.jsonl, which may hold anything besides its step."""
    texts = {key: _as_text(record.get(key)) for key in ("message", "evidence", "suggestion", "action")}
    return AlarmRecord(record["step"], truncated(_as_text(record.get("alarm")) or "unnamed", 200), **texts)


def _step_lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file that have a step; a missing file has none."""
    if not path.is_file():
        return
    try:
        yield from iter_step_lines(path, notes.append)
    except OSError as error:
        notes.append(f"{path.name} cannot be read to its end: {_reason(error)}")


def _as_text(value: Any) -> str:
    """Return a field of an alarm as text; a table becomes `name value` pairs."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        value = ", ".join(f"{key} {_as_text(item)}" for key, item in value.items())
    if isinstance(value, float):
        value = f"{value:.4g}"
    return truncated(str(value), 2_000)


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


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
            rows = np.argsort(-run.curves[name].values, kind="stable")
            recorded = set(steps)
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
