"""Alarms: a run's metrics are watched as they come, and what looks wrong is said in plain words, once per episode.

`Watchman` is shown one record after the other; `replay` shows it those of a run that is over, of ours or of any other
trainer whose metrics have the same names. What rings depends on the metrics alone.
"""

from trimtab.insight.alarms.kinds import KINDS, Kind
from trimtab.insight.alarms.replays import read_metrics, replay, replay_run
from trimtab.insight.alarms.thresholds import Thresholds, reasons
from trimtab.insight.alarms.view import Finding, View
from trimtab.insight.alarms.watching import Watchman, watchman

__all__ = [
    "KINDS",
    "Finding",
    "Kind",
    "Thresholds",
    "View",
    "Watchman",
    "read_metrics",
    "reasons",
    "replay",
    "replay_run",
    "watchman",
]
