"""Alarms over metrics that are there already: of a run that is over, or of another trainer's."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trimtab.config import load
from trimtab.insight.alarms.monitor import Watchman, watchman
from trimtab.train import Alarm

LONGEST_LINE = 1 << 20  # characters; a line of metrics has a few thousand


def replay(records: Iterable[Mapping[str, float]], by: Watchman | None = None) -> list[Alarm]:
    """The alarms that ring over records in the order of their steps."""
    by = by or watchman()
    ordered = sorted(records, key=lambda record: record["step"])
    return [alarm for record in ordered for alarm in by(record)]


def replay_run(run: Path) -> list[Alarm]:
    """The alarms of a run's folder, or of a file of metrics alone."""
    folder = run if run.is_dir() else run.parent
    path = run / "metrics.jsonl" if run.is_dir() else run
    config = folder / "config.toml"
    return replay(read_metrics(path), watchman(load(config) if run.is_dir() and config.exists() else None))


def alarm_lines(alarms: Sequence[Alarm], as_json: bool = False) -> list[str]:
    """Alarms for people, or for programs."""
    if as_json:
        return [json.dumps(asdict(alarm), sort_keys=True) for alarm in alarms]
    told = [f"step {each.step}  {each.alarm}: {each.message}\n    {each.suggestion}" for each in alarms]
    return told or ["no alarm rang"]


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The records of a metrics file, their numbers alone; lines that are cut off or without a step are passed over."""
    if not path.is_file():
        raise ValueError(f"{path} is not there: give a run's folder, or a jsonl file of metrics")
    records = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            record = _numbers(line) if len(line) <= LONGEST_LINE else {}
            if "step" in record:
                records.append(record)
    if not records:
        raise ValueError(f"{path} has no line of JSON with a `step`: metrics are one such line per step")
    return records


def _numbers(line: str) -> dict[str, float]:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(record, dict):
        return {}
    return {name: value for name, value in record.items() if isinstance(value, int | float) and math.isfinite(value)}
