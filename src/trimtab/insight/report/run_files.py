"""A run's folder as a report reads it: whatever is missing, damaged or foreign is named, and the rest is shown."""

from __future__ import annotations

import json
import math
import tomllib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.insight.report.embed import Array, shortened
from trimtab.record import RecordError, Records, open_run

MOST_METRICS = 400  # names; a run of ours has some thirty
MOST_ALARMS = 1_000
LONGEST_LINE = 1 << 20
LONGEST_CONFIG = 1 << 20
LAST_STEP = 2**31 - 1


@dataclass(frozen=True)
class Curve:
    """One metric over the steps at which it was measured."""

    steps: Array
    values: Array


@dataclass(frozen=True)
class Alarm:
    """One alarm as it was raised; everything but the step is text."""

    step: int
    alarm: str
    message: str = ""
    evidence: str = ""
    suggestion: str = ""
    action: str = ""


@dataclass(frozen=True)
class RunFiles:
    """What a folder holds. `notes` say what it does not, or what could not be read."""

    name: str
    config: dict[str, Any]
    config_text: str
    curves: dict[str, Curve]
    alarms: list[Alarm]
    skipped: int
    records: Records | None
    notes: list[str] = field(default_factory=list)

    @property
    def objective(self) -> dict[str, Any]:
        """The table that names the objective: of the configuration, else of the records; empty where neither is."""
        table = self.config.get("objective")
        if isinstance(table, dict) and "name" in table:
            return table
        return dict(self.records.manifest.objective) if self.records else {}

    @property
    def label(self) -> str:
        """The objective with its options, in one line."""
        options = [f"{key}={value}" for key, value in self.objective.items() if key != "name"]
        name = str(self.objective.get("name", "unknown objective"))
        return shortened(f"{name} ({', '.join(options)})" if options else name, 200)

    @property
    def seed(self) -> int | None:
        """The run's seed."""
        run = self.config.get("run")
        seed = run.get("seed") if isinstance(run, dict) else None
        return seed if isinstance(seed, int) else None

    @property
    def last_step(self) -> int:
        """The last step that anything is known of."""
        ends = [int(curve.steps[-1]) for curve in self.curves.values() if len(curve.steps)]
        return max([*ends, *(self.records.steps[-1:] if self.records else [])], default=0)


def read_run(path: Path) -> RunFiles:
    """Everything of a run but its tokens, which are read later and step by step."""
    if not path.is_dir():
        raise ValueError(f"{path} is no run: {'a run is a folder' if path.exists() else 'there is no such folder'}")
    notes: list[str] = []
    config, text = _read_config(path / "config.toml", notes)
    curves = _read_metrics(path / "metrics.jsonl", notes)
    alarms = _read_alarms(path / "alarms.jsonl", notes)
    skipped = sum(1 for _ in _lines(path / "nonfinite.jsonl", notes))
    records = None
    try:
        records = open_run(path)
        if not records.steps:
            notes.append("tokens: no step is recorded, so there are no planes and no microscope")
    except RecordError as error:
        notes.append(f"tokens: {error}. Without records there are no planes and no microscope.")
    name = path.resolve().name or str(path.resolve())
    return RunFiles(name, config, text, curves, alarms, skipped, records, [shortened(note, 500) for note in notes])


def _read_config(path: Path, notes: list[str]) -> tuple[dict[str, Any], str]:
    try:
        if path.stat().st_size > LONGEST_CONFIG:
            raise ValueError("it is too large to be a configuration")
        text = path.read_bytes().decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        notes.append(f"config.toml is missing or cannot be read: {_why(error)}")
        return {}, ""
    try:
        return tomllib.loads(text), text
    except (ValueError, RecursionError) as error:
        notes.append(f"config.toml is no TOML: {error}")
        return {}, text


def _read_metrics(path: Path, notes: list[str]) -> dict[str, Curve]:
    if not path.is_file():
        notes.append("metrics.jsonl is missing: there are no curves")
        return {}
    found: dict[str, tuple[array[int], array[float]]] = {}
    left_out: set[str] = set()
    for record in _lines(path, notes):
        for name, value in record.items():
            if name == "step" or not _is_number(value):
                continue
            if name not in found and len(found) >= MOST_METRICS:
                left_out |= {name[:80]} if len(left_out) < MOST_METRICS else set()
                continue
            steps, values = found.setdefault(name, (array("i"), array("d")))
            steps.append(record["step"])
            values.append(float(value))
    if left_out:
        notes.append(f"metrics.jsonl has more than {MOST_METRICS} metrics: {len(left_out)} or more are left out")
    if not found:
        notes.append("metrics.jsonl holds no metrics: there are no curves")
    return {name: _in_order(*pair) for name, pair in found.items()}


def _in_order(steps: array[int], values: array[float]) -> Curve:
    """By step; of several values for one step the last counts, as in a run that was resumed."""
    numbers = np.frombuffer(steps, dtype=np.int32)
    _, last = np.unique(numbers[::-1], return_index=True)
    kept = len(numbers) - 1 - last
    return Curve(numbers[kept], np.frombuffer(values, dtype=np.float64)[kept].astype(np.float32))


def _read_alarms(path: Path, notes: list[str]) -> list[Alarm]:
    alarms: list[Alarm] = []
    for record in _lines(path, notes):
        if len(alarms) == MOST_ALARMS:
            notes.append(f"alarms.jsonl: only the first {MOST_ALARMS} alarms are shown")
            break
        words = {key: _words(record.get(key)) for key in ("message", "evidence", "suggestion", "action")}
        alarms.append(Alarm(record["step"], shortened(_words(record.get("alarm")) or "unnamed", 200), **words))
    return alarms


def _lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The whole lines of a JSON-lines file that are objects with a step; a file that is not there has none."""
    if not path.is_file():
        return
    bad = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(LONGEST_LINE):
                record = _record(line)
                if record is None:
                    bad += bool(line.strip())
                else:
                    yield record
    except OSError as error:
        notes.append(f"{path.name} cannot be read to its end: {_why(error)}")
    if bad:
        notes.append(f"{path.name}: {bad} {'line is' if bad == 1 else 'lines are'} damaged or foreign and left out")


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    good = isinstance(step, int) and not isinstance(step, bool) and 0 <= step <= LAST_STEP
    return record if good else None


def _is_number(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _words(value: Any) -> str:
    """A field of an alarm as text: `name value` pairs of a table, else as it is."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        value = ", ".join(f"{key} {_words(item)}" for key, item in value.items())
    if isinstance(value, float):
        value = f"{value:.4g}"
    return shortened(str(value), 2_000)


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
