"""The alarm monitor: runs every detector after each step and raises each alarm once per episode.

`replay_metrics` and `replay_run` run it over logged metrics: of a finished run, or of another trainer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trimtab import record
from trimtab.insight.alarms.detector_input import DetectorInput
from trimtab.insight.alarms.kinds import ALARM_KINDS, AlarmKind
from trimtab.text import PrintLine
from trimtab.trainer.config import Config, load_stored
from trimtab.trainer.train import Alarm


@dataclass
class Episode:
    """For how many steps a finding has been present or absent, and whether its alarm has rung."""

    present: int = 0
    absent: int = 0
    rung: bool = False

    def update(self, found: bool, hold: int, quiet: int) -> bool:
        """Count a step and return whether the alarm rings now: after `hold` steps, again after `quiet` without."""
        # Findings come and go with the noise: one must hold for a few steps, and be gone for many, before a new ring.
        self.present = self.present + 1 if found else 0
        self.absent = 0 if found else self.absent + 1
        if self.absent >= quiet:
            self.rung = False
        rings = not self.rung and self.present >= hold
        self.rung = self.rung or rings
        return rings


@dataclass
class AlarmMonitor:
    """Call it with the metric records of a run in order; it returns the alarms that ring.

    A detector that raises is reported once and disabled; the others go on.
    """

    run: DetectorInput = field(default_factory=DetectorInput)
    # Looked up when a monitor is made, so that a test can replace the table.
    kinds: Mapping[str, AlarmKind] = field(default_factory=lambda: ALARM_KINDS)
    warn: Callable[[str], object] = lambda text: None
    episodes: dict[str, Episode] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)

    def __call__(self, record: Mapping[str, float]) -> list[Alarm]:
        """Add a record and return the alarms that ring at its step."""
        step = self.run.add(record)
        limits = self.run.limits
        alarms: list[Alarm] = []
        if step < 1:  # the evaluation before the first step
            return alarms
        for name, kind in self.kinds.items():
            if name in self.broken:
                continue
            try:
                found = kind.detect(self.run)
                hold = 1 if kind.at_once else limits.hold_steps
                rings = self.episodes.setdefault(name, Episode()).update(found is not None, hold, limits.quiet_steps)
                if rings and found is not None:
                    alarms.append(Alarm(step, name, found.message, found.evidence, found.suggestion or kind.suggestion))
            except Exception as error:  # a bug in a detector must not stop the run or the other alarms
                self.broken.add(name)
                self.warn(f"warning: the alarm {name} failed and is off from here: {error!r:.300}")
        return alarms


def alarm_monitor(config: Config | None = None, warn: Callable[[str], object] = lambda text: None) -> AlarmMonitor:
    """Return the monitor of a run; without its configuration there is no entropy target, and rewards are 0 and 1."""
    if config is None:
        return AlarmMonitor(warn=warn)
    rewards = (config.reward.wrong, config.reward.correct)
    target = config.build_objective().entropy_target
    return AlarmMonitor(DetectorInput(entropy_target=target, rewards=rewards), warn=warn)


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
    """Read the finite numbers of a metrics file; lines without JSON or a step are left out with a warning."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give a run's folder, or a jsonl file of metrics")
    records = record.read_metrics(path, warn)
    if not records:
        raise ValueError(f"{path} has no line of JSON with a `step`: metrics are one such line per step")
    return records
