"""Alarms: a run's metrics are watched as they come, and what looks wrong is said in plain words, once per episode.

`Watchman` is shown one record after the other; `replay` shows it those of a run that is over, of ours or of any other
trainer whose metrics have the same names. What rings depends on the metrics alone.
"""

from trimtab.insight.alarms.detector_input import Finding, View
from trimtab.insight.alarms.kinds import KINDS, Kind
from trimtab.insight.alarms.monitor import Watchman, watchman
from trimtab.insight.alarms.offline import alarm_lines, read_metrics, replay, replay_run
from trimtab.insight.alarms.thresholds import Thresholds, reasons

__all__ = [
    "KINDS",
    "Finding",
    "Kind",
    "Thresholds",
    "View",
    "Watchman",
    "alarm_lines",
    "read_metrics",
    "reasons",
    "replay",
    "replay_run",
    "watchman",
]
