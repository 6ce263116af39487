"""Alarms over logged metrics: of a finished run, or of another trainer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from trimtab import step_lines
from trimtab.insight.alarms.kinds import ALARM_KINDS
from trimtab.insight.alarms.monitor import AlarmMonitor, alarm_monitor
from trimtab.text import PrintLine
from trimtab.trainer.config import load_stored
from trimtab.trainer.train import Alarm


def replay_metrics(records: Iterable[Mapping[str, float]], monitor: AlarmMonitor | None = None) -> list[Alarm]:
    """Return the alarms that ring over records, in the order of their steps."""
    monitor = monitor or alarm_monitor()
    # Logs of other trainers, or of resumed runs, may be out of order.
    ordered = sorted(records, key=lambda record: record["step"])
    return [alarm for record in ordered for alarm in monitor(record)]


def replay_run(run: Path, warn: PrintLine = lambda problem: None) -> list[Alarm]:
    """Return the alarms of a run's folder, or of a single file of metrics; `warn` gets the lines that hold none."""
    # A metrics file alone may lie beside a config.toml that is not its own.
    if not run.is_dir():
        return replay_metrics(read_metrics(run, warn))
    config = run / "config.toml"
    monitor = alarm_monitor(load_stored(config) if config.exists() else None)
    return replay_metrics(read_metrics(run / "metrics.jsonl", warn), monitor)


def unchecked_alarms(run: Path) -> str:
    """Return which alarms could not look at another trainer's metrics, and what they lack; empty for our own runs."""
    if (run / "config.toml").exists():
        return ""
    metrics = run / "metrics.jsonl" if run.is_dir() else run
    there = {name for record in read_metrics(metrics) for name in record}
    lacking = {name: kind.metrics[0] for name, kind in ALARM_KINDS.items() if not there & set(kind.metrics[:1])}
    return ", ".join(f"{name} ({metric})" for name, metric in lacking.items())


def alarm_lines(alarms: Sequence[Alarm], as_json: bool = False) -> list[str]:
    """Return the lines that `trimtab alarms` prints."""
    if as_json:
        return [json.dumps(asdict(alarm), sort_keys=True) for alarm in alarms]
    lines = [f"step {each.step}  {each.alarm}: {each.message}\n    {each.suggestion}" for each in alarms]
    return lines or ["no alarm rang"]


def read_metrics(path: Path, warn: PrintLine = lambda problem: None) -> list[dict[str, float]]:
    """Read the finite numbers of a metrics file; lines that are no JSON or have no step are left out with a warning."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give a run's folder, or a jsonl file of metrics")
    records = step_lines.read_metrics(path, warn)
    if not records:
        raise ValueError(f"{path} has no line of JSON with a `step`: metrics are one such line per step")
    return records
