"""Where records lie, and the small JSON files that say what they are.

`RUN/tokens/` holds `manifest.json`, `vocabulary.parquet` and one folder per recorded step, `step-00000040/`, with
`tokens.parquet`, `responses.parquet` and `step.json`. A step's folder is written under a temporary name and renamed,
and `step.json` has the SHA-256 of the other two: what is there is whole, or is known not to be.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trimtab.record.schema import SCHEMA, TABLES

LARGEST_JSON = 1 << 24  # bytes; ours are a few thousand
FOLDER = "tokens"
MANIFEST = "manifest.json"
VOCABULARY = "vocabulary.parquet"
STEP = "step.json"


class RecordError(ValueError):
    """A record that is missing, damaged, half-written or of something else."""


class RecordWarning(UserWarning):
    """A file among the records that was passed over, and why."""


@dataclass(frozen=True)
class Settings:
    """What is recorded: every so many steps, which share of the groups, and how much of the disk it may take."""

    every: int = 1
    share: float = 1.0
    max_megabytes: float = 2000.0


@dataclass(frozen=True)
class Manifest:
    """What a run's records are of. `stride` is 1 until the size budget thins them: then every so many are kept."""

    objective: dict[str, Any]
    advantage: str
    settings: Settings = Settings()
    vocabulary: int = 0
    vocabulary_sha256: str = ""
    stride: int = 1
    versions: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA


@dataclass(frozen=True)
class UpdateInfo:
    """One update of a step: its share of the tables, in order, and how its forward passes were cut.

    `taken` is false where something was not finite, and the weights were left alone. `parts` are the responses of each
    forward pass: a plan with `scope = "micro"` depends on them.
    """

    update: int
    responses: int
    tokens: int
    taken: bool = True
    parts: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class StepInfo:
    """What a recorded step has besides its tables.

    `observed_entropy` is what controllers looked at before the step's first plan, `controllers` their state then.
    `sampled` counts all responses of the step; a record with fewer cannot give the exact plan again. `device` and
    `threads` are what sums were made with: their last bit depends on it.
    """

    step: int
    responses: int
    tokens: int
    sampled: int
    updates: list[UpdateInfo]
    observed_entropy: float | None = None
    controllers: dict[str, dict[str, float]] = field(default_factory=dict)
    device: str = "cpu"
    threads: int = 1

    @property
    def complete(self) -> bool:
        """Whether every response of the step is in the record."""
        return self.responses == self.sampled


def step_folder(folder: Path, step: int) -> Path:
    """Where a step's record is."""
    return folder / f"step-{step:08d}"


def recorded_steps(folder: Path) -> list[int]:
    """The steps that look recorded, in order."""
    names = [path.name for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,12}", path.name)]
    return sorted(int(name.removeprefix("step-")) for name in names)


def manifest_text(manifest: Manifest) -> str:
    """A manifest as JSON, with every column and its meaning beside it."""
    columns = {
        name: {column.name: {"type": column.type, "meaning": column.meaning} for column in table}
        for name, table in TABLES.items()
    }
    return sealed({**asdict(manifest), "columns": columns})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a run's records."""
    path = folder / MANIFEST
    table = unsealed(path)
    _check_schema(path, table)
    try:
        known = {key: table[key] for key in Manifest.__dataclass_fields__}
        return Manifest(**{**known, "settings": Settings(**table["settings"])})
    except (KeyError, TypeError) as error:
        raise RecordError(f"{path} is no manifest of records: {error!r:.200}") from None


def step_text(info: StepInfo, files: Mapping[str, str]) -> str:
    """A step's JSON; `files` has the SHA-256 of each of its tables."""
    return sealed({"schema": SCHEMA, **asdict(info), "files": dict(files)})


def read_step(folder: Path, step: int) -> tuple[StepInfo, dict[str, str]]:
    """A step's JSON, and the SHA-256 that its tables must have."""
    path = step_folder(folder, step) / STEP
    table = unsealed(path)
    _check_schema(path, table)
    try:
        known = {key: table[key] for key in StepInfo.__dataclass_fields__}
        info = StepInfo(**{**known, "updates": [UpdateInfo(**update) for update in table["updates"]]})
        files = {str(name): str(digest) for name, digest in table["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{path} is no record of a step: {error!r:.200}") from None
    if info.step != step:
        raise RecordError(f"{path} is of step {info.step}")
    return info, files


def sealed(table: Mapping[str, Any]) -> str:
    """A table as JSON that tells when it has been changed."""
    text = json.dumps(table, sort_keys=True, allow_nan=False)
    return json.dumps({**table, "sha256": digest(text.encode())}, sort_keys=True, allow_nan=False, indent=1) + "\n"


def unsealed(path: Path) -> dict[str, Any]:
    """What `sealed` wrote, or an error that names the file."""
    try:
        table = json.loads(read_bytes(path, LARGEST_JSON))
        claimed = table.pop("sha256")
        whole = digest(json.dumps(table, sort_keys=True, allow_nan=False).encode()) == claimed
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RecordError(f"{path} cannot be read: {error!r:.200}") from None
    if not whole:
        raise RecordError(f"{path} is damaged: it is not what was written")
    return dict(table)


def read_bytes(path: Path, largest: int | None = None) -> bytes:
    """A file's bytes; anything that is no plain file, or too large to be ours, is an error."""
    try:
        if not path.is_file():  # opening a pipe would wait for ever
            raise RecordError(f"{path} is missing")
        if largest is not None and path.stat().st_size > largest:
            raise RecordError(f"{path} is too large to be ours")
        return path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error}") from None


def digest(data: bytes | memoryview) -> str:
    """The SHA-256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def size_of(paths: Sequence[Path]) -> int:
    """Bytes of the files in some folders."""
    return sum(file.stat().st_size for path in paths for file in path.iterdir())


def _check_schema(path: Path, table: Mapping[str, Any]) -> None:
    found = table.get("schema")
    if not isinstance(found, int) or found > SCHEMA:
        raise RecordError(f"{path} has schema {found!r:.40}; this trimtab reads up to {SCHEMA}: use a newer one")
