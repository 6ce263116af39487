"""The flight recorder: `Recorder` writes the steps of a run, `open_run` reads them. See docs/record.md."""

from trimtab.record.collapse import (
    COLLAPSE_DEFINITION,
    COLLAPSE_METRICS,
    HOLD_STEPS,
    LOW,
    MIN_BEST,
    Collapse,
    CollapseDetector,
    find_collapse,
    find_fall,
    merge_curves,
    start_values,
)
from trimtab.record.conversation import RecordedCall, RecordedObservation
from trimtab.record.growing_lines import GrowingLines
from trimtab.record.layout import (
    MANIFEST,
    RECORDS_FOLDER,
    Manifest,
    RecordError,
    RecordSettings,
    RecordWarning,
    StepInfo,
    UpdateInfo,
    read_step,
)  # fmt: skip
from trimtab.record.reader import RecordedStep, RecordedUpdate, Records, open_run
from trimtab.record.recorder import Recorder, UpdateRecord, join_ranks, update_record
from trimtab.record.schema import SCHEMA, TABLES, Vocabulary
from trimtab.record.step_lines import (
    LARGEST_METRIC,
    LAST_STEP,
    is_finite_number,
    iter_step_lines,
    last_step,
    read_metrics,
)
from trimtab.record.writer import RecordWriter, StepData, rewind

__all__ = [
    "COLLAPSE_DEFINITION", "COLLAPSE_METRICS", "HOLD_STEPS", "LARGEST_METRIC", "LAST_STEP", "LOW", "MANIFEST",
    "MIN_BEST", "RECORDS_FOLDER", "SCHEMA", "TABLES", "Collapse", "CollapseDetector", "GrowingLines", "Manifest",
    "RecordError", "RecordSettings", "RecordWarning", "RecordWriter", "RecordedCall", "RecordedObservation",
    "RecordedStep", "RecordedUpdate", "Recorder", "Records", "StepData", "StepInfo", "UpdateInfo", "UpdateRecord",
    "Vocabulary", "find_collapse", "find_fall", "is_finite_number", "iter_step_lines", "join_ranks", "last_step",
    "merge_curves", "open_run", "read_metrics", "read_step", "rewind", "start_values", "update_record",
]  # fmt: skip
