"""Who watches a run: the protocol of a watcher, and what a run does when it raises an alarm.

The trainer knows no alarm. It shows every record of its metrics to a `Watcher` that the caller gives it; the answer is
written to `alarms.jsonl` and said, and may cost a checkpoint or end the run, as the recipe's `[alarms]` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trimtab.config import AlarmsConfig
from trimtab.train.run_folder import RunFolder

AROUND = 3  # recorded steps before and after an alarm that the size budget does not take


@dataclass(frozen=True)
class Alarm:
    """What rang at a step: in words, with the numbers behind it, and what to try."""

    step: int
    alarm: str
    message: str
    evidence: dict[str, Any] = field(default_factory=dict)
    suggestion: str = ""


# Called with every record of metrics (`step` among them) in order. What it answers depends on those records alone, so
# that one who is shown the records of a run again goes on as if the run had never ended.
Watcher = Callable[[Mapping[str, float]], Sequence[Alarm]]


@dataclass
class Watch:
    """A run's watcher and what its recipe wants done. A watcher that fails is said to have, and not asked again."""

    watcher: Watcher | None
    config: AlarmsConfig
    folder: RunFolder
    say: Callable[[str], None]

    def catch_up(self, records: Iterable[Mapping[str, float]]) -> None:
        """Show the watcher what was before; what it says about that was said then."""
        for record in records:
            self._ask(record)

    def look(self, record: Mapping[str, float]) -> dict[str, list[Alarm]]:
        """Show the watcher a step; its alarms, written and said, by what is to be done about them."""
        wanted: dict[str, list[Alarm]] = {"save": [], "stop": []}
        for alarm in self._ask(record):
            action = self.config.action(alarm.alarm)
            if action == "off":
                continue
            self.say(f"alarm: step {alarm.step}: {alarm.message}. {alarm.suggestion}".rstrip())
            self._write({**asdict(alarm), "action": action})
            wanted.setdefault(action, []).append(alarm)
        return wanted

    def kept_steps(self) -> list[int]:
        """The steps around the alarms that were to be saved, of this run so far."""
        rung = [record["step"] for record in self.folder.alarm_records() if record.get("action") in ("save", "stop")]
        return [step for centre in rung for step in around(centre)]

    def _ask(self, record: Mapping[str, float]) -> Sequence[Alarm]:
        if self.watcher is None or not self.config.enabled:
            return []
        try:
            return self.watcher(record)
        except Exception as error:  # an alarm that is broken must not end what it watches over
            self.watcher = None
            self.say(f"warning: the alarms have a fault of their own and are off from here: {error!r:.300}")
            return []

    def _write(self, record: dict[str, Any]) -> None:
        try:
            self.folder.append_alarm(record)
        except (OSError, ValueError) as error:
            self.say(f"warning: {self.folder.alarms} could not be written: {error}")


def around(step: int) -> range:
    """The steps whose records show how an alarm came about, and what came of it."""
    return range(max(1, step - AROUND), step + AROUND + 1)
