"""The watchman: asks every detector after each step, and rings once per episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trimtab.config import Config
from trimtab.insight.alarms.detector_input import View
from trimtab.insight.alarms.kinds import KINDS, Kind
from trimtab.insight.alarms.thresholds import Thresholds
from trimtab.objectives import EntropyGate
from trimtab.train import Alarm


@dataclass
class Episode:
    """How long a finding has held, or been away, and whether its alarm has rung."""

    held: int = 0
    away: int = 0
    rung: bool = False

    def note(self, found: bool, limits: Thresholds) -> bool:
        """Take in a step; whether the alarm rings now."""
        self.held = self.held + 1 if found else 0
        self.away = 0 if found else self.away + 1
        if self.away >= limits.quiet:
            self.rung = False
        rings = not self.rung and self.held >= limits.hold
        self.rung = self.rung or rings
        return rings


@dataclass
class Watchman:
    """A `Watcher`: shown the records of a run in order, he answers with the alarms that ring.

    A detector that fails is said to have, once, and is not asked again; the others go on.
    """

    view: View = field(default_factory=View)
    kinds: Mapping[str, Kind] = field(default_factory=lambda: KINDS)
    say: Callable[[str], object] = lambda text: None
    episodes: dict[str, Episode] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)

    def __call__(self, record: Mapping[str, float]) -> list[Alarm]:
        """The alarms that ring at a record's step."""
        step = self.view.history.add(record)
        if step < 1:  # what was measured before the first step is no step
            return []
        return [alarm for name in self.kinds if (alarm := self._ask(name, step)) is not None]

    def _ask(self, name: str, step: int) -> Alarm | None:
        if name in self.broken:
            return None
        kind = self.kinds[name]
        try:
            found = kind.detect(self.view)
            if not self.episodes.setdefault(name, Episode()).note(found is not None, self.view.limits):
                return None
            assert found is not None
            return Alarm(step, name, found.message, found.evidence, kind.suggestion)
        except Exception as error:  # a fault of ours must cost this alarm and nothing else
            self.broken.add(name)
            self.say(f"warning: the alarm {name} has a fault of its own and is off from here: {error!r:.300}")
            return None


def watchman(config: Config | None = None, say: Callable[[str], object] = lambda text: None) -> Watchman:
    """The watchman of a run; without its configuration he knows no target of the entropy, and rewards of 0 and 1."""
    if config is None:
        return Watchman(say=say)
    rewards = (config.reward.wrong, config.reward.correct)
    return Watchman(View(entropy_target=entropy_target(config), rewards=rewards), say=say)


def entropy_target(config: Config) -> float | None:
    """The entropy that the run's objective steers for, if it does."""
    gates = config.build_objective().controllers.values()
    return next((gate.target for gate in gates if isinstance(gate, EntropyGate)), None)
