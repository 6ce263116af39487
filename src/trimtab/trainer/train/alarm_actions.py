"""Why a run ends, and what it does when an alarm is raised: print it, write it to a file, save a checkpoint, stop.

The trainer implements no alarm. It passes the metrics of every step to a `Monitor` from the caller, and the recipe's
`[alarms]` section maps the alarms that the monitor returns to actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from trimtab.record import iter_step_lines
from trimtab.trainer.config import AlarmsConfig
from trimtab.trainer.train.run_folder import RunFolder

STEPS_AROUND = 3  # recorded steps before and after an alarm that the size limit of records deletes last


# Exit codes: 2 as for a wrong command line; 3 is a run that ended early with a checkpoint. A run that a signal ends at
# once has the code that shells report for it, 130 for Ctrl-C. 5 is a run whose last checkpoint could not be written.
INVALID, STOPPED, UNSAVED = 2, 3, 5


class StopReason(StrEnum):
    """Why a run ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    NO_SIGNAL = "no learning signal"
    NO_BETTER = "no better held-out score"
    NONFINITE = "not finite"
    NOT_SAVED = "not saved"
    FOLDER_GONE = "folder gone"
    ALARM = "alarm"
    RULES = "rules failed"


class RunStoppedError(RuntimeError):
    """A run ended before its last step; the message is a diagnosis."""

    def __init__(self, reason: StopReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Alarm:
    """An alarm at a step: a message, the numbers behind it, and what to try."""

    step: int
    alarm: str
    message: str
    evidence: dict[str, Any] = field(default_factory=dict)
    suggestion: str = ""


# Called with the metrics of every step (and `step`) in order. The alarms it returns must depend only on these records:
# a resumed run passes the earlier ones to a new monitor, which then continues as if the run had never stopped.
Monitor = Callable[[Mapping[str, float]], Sequence[Alarm]]


@dataclass
class AlarmHandler:
    """Passes records to a monitor and carries out the alarms; a monitor that raises is dropped with a warning."""

    monitor: Monitor | None
    config: AlarmsConfig
    folder: RunFolder
    message: Callable[[str], None]

    def replay(self, records: Iterable[Mapping[str, float]]) -> None:
        """Pass the records of earlier steps to the monitor; their alarms were handled then."""
        for record in records:
            self._alarms(record)

    def handle(self, record: Mapping[str, float]) -> dict[str, list[Alarm]]:
        """Print and write the alarms of a step; return them by the action that the recipe asks for."""
        by_action: dict[str, list[Alarm]] = {"save": [], "stop": []}
        for alarm in self._alarms(record):
            action = self.config.action(alarm.alarm)
            if action == "off":
                continue
            self.message(f"alarm: step {alarm.step}: {alarm.message}. {alarm.suggestion}".rstrip())
            try:
                self.folder.append(self.folder.alarms, {**asdict(alarm), "action": action})
            except (OSError, ValueError) as error:
                self.message(f"warning: {self.folder.alarms} could not be written: {error}")
            by_action.setdefault(action, []).append(alarm)
        return by_action

    def steps_to_keep(self) -> list[int]:
        """Return the steps around the run's earlier alarms with a checkpoint, whose records are to be kept."""
        lines = iter_step_lines(self.folder.alarms, self.message)
        return [step for line in lines if line.get("action") in ("save", "stop") for step in steps_around(line["step"])]

    def _alarms(self, record: Mapping[str, float]) -> Sequence[Alarm]:
        if self.monitor is None or not self.config.enabled:
            return []
        try:
            return self.monitor(record)
        except Exception as error:  # a bug in an alarm must not end the run that it monitors
            self.monitor = None
            self.message(f"warning: the alarms failed and are off from here: {error!r:.300}")
            return []


def steps_around(step: int) -> range:
    """Return the steps whose records show how an alarm came about, and what followed."""
    return range(max(1, step - STEPS_AROUND), step + STEPS_AROUND + 1)
