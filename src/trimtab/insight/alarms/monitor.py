"""The alarm monitor: runs every detector after each step and raises each alarm once per episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trimtab.config import Config
from trimtab.insight.alarms.detector_input import DetectorInput
from trimtab.insight.alarms.kinds import ALARM_KINDS, AlarmKind
from trimtab.insight.alarms.thresholds import Thresholds
from trimtab.objectives import EntropyGate, Objective
from trimtab.train import Alarm


@dataclass
class Episode:
    """For how many steps a finding has been present or absent, and whether its alarm has rung."""

    present: int = 0
    absent: int = 0
    rung: bool = False

    def update(self, found: bool, limits: Thresholds) -> bool:
        """Count a step and return whether the alarm rings now."""
        # Findings come and go with the noise: one must hold for a few steps, and be gone for many, before a new ring.
        self.present = self.present + 1 if found else 0
        self.absent = 0 if found else self.absent + 1
        if self.absent >= limits.quiet_steps:
            self.rung = False
        rings = not self.rung and self.present >= limits.hold_steps
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
        step = self.run.history.add(record)
        alarms: list[Alarm] = []
        if step < 1:  # the evaluation before the first step
            return alarms
        for name, kind in self.kinds.items():
            if name in self.broken:
                continue
            try:
                found = kind.detect(self.run)
                rings = self.episodes.setdefault(name, Episode()).update(found is not None, self.run.limits)
                if rings and found is not None:
                    alarms.append(Alarm(step, name, found.message, found.evidence, kind.suggestion))
            except Exception as error:  # a bug in a detector must not stop the run or the other alarms
                self.broken.add(name)
                self.warn(f"warning: the alarm {name} failed and is off from here: {error!r:.300}")
        return alarms


def alarm_monitor(config: Config | None = None, warn: Callable[[str], object] = lambda text: None) -> AlarmMonitor:
    """Return the monitor of a run; without its configuration there is no entropy target, and rewards are 0 and 1."""
    if config is None:
        return AlarmMonitor(warn=warn)
    rewards = (config.reward.wrong, config.reward.correct)
    target = entropy_target(config.build_objective())
    return AlarmMonitor(DetectorInput(entropy_target=target, rewards=rewards), warn=warn)


def entropy_target(objective: Objective) -> float | None:
    """Return the target of the objective's entropy controller, if it has one."""
    gates = objective.controllers.values()
    return next((gate.target for gate in gates if isinstance(gate, EntropyGate)), None)
