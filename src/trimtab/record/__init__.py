"""The flight recorder's file format: write and read. See `open_run`, and docs/record.md."""

from trimtab.record.layout import (
    FOLDER,
    Manifest,
    RecordError,
    RecordWarning,
    Settings,
    StepInfo,
    UpdateInfo,
    read_step,
)
from trimtab.record.reader import Records, Step, Update, open_run
from trimtab.record.schema import SCHEMA, TABLES, Column
from trimtab.record.vocabulary import Vocabulary
from trimtab.record.writer import Recorder, StepData, rewind, write_step

__all__ = [
    "FOLDER",
    "SCHEMA",
    "TABLES",
    "Column",
    "Manifest",
    "RecordError",
    "RecordWarning",
    "Recorder",
    "Records",
    "Settings",
    "Step",
    "StepData",
    "StepInfo",
    "Update",
    "UpdateInfo",
    "Vocabulary",
    "open_run",
    "read_step",
    "rewind",
    "write_step",
]
