"""Alarms over a run's metrics: each problem is reported in plain words, once per episode.

`AlarmMonitor` is called with every record of metrics as it is logged; `replay_metrics` runs it over a finished run, of
trimtab or of any trainer that logs the same metric names. Which alarms ring depends only on the metrics.
"""

from trimtab.insight.alarms.detector_input import DetectorInput, Thresholds, threshold_reasons
from trimtab.insight.alarms.kinds import ALARM_KINDS, AlarmKind
from trimtab.insight.alarms.monitor import (
    AlarmMonitor,
    alarm_lines,
    alarm_monitor,
    read_metrics,
    replay_metrics,
    replay_run,
    unchecked_alarms,
)

__all__ = [
    "ALARM_KINDS", "AlarmKind", "AlarmMonitor", "DetectorInput", "Thresholds", "alarm_lines",
    "alarm_monitor", "read_metrics", "replay_metrics", "replay_run", "threshold_reasons", "unchecked_alarms",
]  # fmt: skip
