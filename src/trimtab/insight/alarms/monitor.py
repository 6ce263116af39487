"""The alarm monitor: runs every detector after each step and raises each alarm once per episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trimtab.insight.alarms.detector_input import DetectorInput
from trimtab.insight.alarms.kinds import ALARM_KINDS, AlarmKind
from trimtab.trainer.config import Config
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
        step, limits = self.run.add(record), self.run.limits
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
