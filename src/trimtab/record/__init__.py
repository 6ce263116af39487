"""The flight recorder: `Recorder` writes the steps of a run, `open_run` reads them. See docs/record.md."""

from trimtab.record.conversation import (
    Observation,
    RecordedCall,
    RecordedObservation,
    arguments_text,
)
from trimtab.record.inputs import RecordedResponse, UpdateRecord, join_ranks, update_record
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
from trimtab.record.recorder import Recorder
from trimtab.record.schema import SCHEMA, TABLES, Column
from trimtab.record.vocabulary import Vocabulary
from trimtab.record.writer import RecordWriter, StepData, rewind

__all__ = [
    "MANIFEST", "RECORDS_FOLDER", "SCHEMA", "TABLES", "Column", "Manifest", "Observation", "RecordError",
    "RecordSettings", "RecordWarning", "RecordWriter", "RecordedCall", "RecordedObservation", "RecordedResponse",
    "RecordedStep", "RecordedUpdate", "Recorder", "Records", "StepData", "StepInfo", "UpdateInfo", "UpdateRecord",
    "Vocabulary", "arguments_text", "join_ranks", "open_run", "read_step", "rewind", "update_record",
]  # fmt: skip
