"""The flight recorder's file format: write and read. See `open_run`, and docs/record.md."""

from trimtab.record.layout import Manifest, RecordError, RecordWarning, Settings, StepInfo, UpdateInfo
from trimtab.record.reader import Records, Step, Update, open_run
from trimtab.record.schema import RESPONSES, SCHEMA, TABLES, TOKENS, VOCABULARY, Column
from trimtab.record.writer import Recorder, StepData, Vocabulary, rewind, write_step

__all__ = [
    "RESPONSES",
    "SCHEMA",
    "TABLES",
    "TOKENS",
    "VOCABULARY",
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
    "rewind",
    "write_step",
]
