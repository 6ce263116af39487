"""The files of a record and their JSON headers.

`RUN/tokens/` holds `manifest.json`, `vocabulary.parquet` and one folder per recorded step, `step-00000040/`, with
`tokens.parquet`, `responses.parquet` and `step.json`. A step's folder is written under a temporary name and renamed,
and `step.json` has the SHA-256 of the two tables, so a reader knows whether it has all of what was written.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from trimtab.record.schema import SCHEMA, TABLES

T = TypeVar("T")

# Checksums prove that a file was not damaged, not that its numbers make sense.
Count = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Interval = Annotated[int, Field(strict=True, ge=1, le=10**18)]
Finite = Annotated[float, Field(allow_inf_nan=False)]

LARGEST_JSON = 1 << 24  # bytes; a step's JSON has a few thousand, and a larger file is not read into memory
RECORDS_FOLDER = "tokens"  # in the folder of a run
MANIFEST = "manifest.json"
VOCABULARY = "vocabulary.parquet"
STEP = "step.json"
STEP_FILES = ("tokens.parquet", "responses.parquet", STEP)  # all of a step's folder
BLOCK = 4096  # bytes that most file systems give at once


class RecordError(ValueError):
    """A record is missing, damaged, half-written or of another kind."""


class RecordWarning(UserWarning):
    """A record was skipped, and why."""


@dataclass(frozen=True)
class RecordSettings:
    """How much is recorded: one step in `every`, a share of its groups, and the size limit of all records."""

    every: Interval = 1
    group_share: Finite = 1.0
    max_megabytes: Finite = 2000.0


@dataclass(frozen=True)
class Manifest:
    """What a run's records were made with. `stride` doubles whenever the records reach their size limit."""

    objective: dict[str, Any]
    advantage: str
    settings: RecordSettings = RecordSettings()
    vocabulary: Count = 0  # how many token ids it has
    vocabulary_sha256: str = ""
    stride: Interval = 1
    versions: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA


@dataclass(frozen=True)
class UpdateInfo:
    """One update of a step: how many rows of the tables belong to it.

    `taken` is false for an update that was skipped because something was not finite. `micro_batches` is how many
    responses each forward pass held; a plan with `scope = "micro"` depends on it.
    """

    update: Count
    responses: Count
    tokens: Count
    taken: bool = True
    micro_batches: list[Count] = field(default_factory=list)


@dataclass(frozen=True)
class StepInfo:
    """The facts of a recorded step besides its tables.

    `observed_entropy` is what the controllers observed before the step's first plan, `controllers` their state then.
    `sampled` counts all responses of the step; from a record of fewer the exact plan cannot be made again.
    """

    step: Count
    responses: Count
    tokens: Count
    sampled: Count
    updates: list[UpdateInfo]
    observed_entropy: Finite | None = None
    controllers: dict[str, dict[str, Finite]] = field(default_factory=dict)
    # The order of summation, and with it the last bit of a sum, depends on the device and the number of threads.
    device: str = "cpu"
    # At most as many as `run.threads` may be: a replay uses as many.
    threads: Annotated[int, Field(strict=True, ge=0, le=1024)] = 1

    @property
    def complete(self) -> bool:
        """Return whether every response of the step is in the record."""
        return self.responses == self.sampled


# Made once: each takes milliseconds.
_MANIFEST, _STEP_INFO, _FILES = TypeAdapter(Manifest), TypeAdapter(StepInfo), TypeAdapter(dict[str, str])


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of a step's record."""
    return folder / f"step-{step:08d}"


def recorded_steps(folder: Path) -> list[int]:
    """List the recorded steps in order, by the names of their folders."""
    # A strict pattern, since people may put other files here.
    names = [path.name for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,12}", path.name)]
    return sorted(int(name.removeprefix("step-")) for name in names)


def manifest_text(manifest: Manifest) -> str:
    """Return a manifest as JSON, with the type and meaning of every column."""
    columns = {
        name: {column.name: {"type": column.type, "meaning": column.meaning} for column in table}
        for name, table in TABLES.items()
    }
    return json_with_digest({**asdict(manifest), "columns": columns})


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a run's records."""
    path = folder / MANIFEST
    table = read_json(path)
    manifest = _validated(_MANIFEST, table, path, "manifest of records")
    if not isinstance(manifest.objective.get("name"), str):
        raise RecordError(f"{path} is no manifest of records: its objective has no name")
    return manifest


def step_text(info: StepInfo, files: Mapping[str, str]) -> str:
    """Return a step's JSON; `files` has the SHA-256 of each of its tables."""
    return json_with_digest({"schema": SCHEMA, **asdict(info), "files": dict(files)})


def read_step(folder: Path, step: int) -> tuple[StepInfo, dict[str, str]]:
    """Read a step's JSON: its facts, and the SHA-256 that its tables must have."""
    path = step_folder(folder, step) / STEP
    table = read_json(path)
    info = _validated(_STEP_INFO, table, path, "record of a step")
    files = _validated(_FILES, table.get("files"), path, "record of a step")
    if info.step != step:
        raise RecordError(f"{path} is of step {info.step}")
    for rows in ("responses", "tokens"):
        of_updates, of_step = sum(getattr(update, rows) for update in info.updates), getattr(info, rows)
        if of_updates != of_step:
            raise RecordError(f"{path} is no record of a step: its updates have {of_updates} {rows}, it has {of_step}")
    return info, files


def _validated(adapter: TypeAdapter[T], table: Any, path: Path, name: str) -> T:
    """Return the JSON as the adapter's type; fields that a later version adds under the same schema are left out."""
    try:
        return adapter.validate_python(table)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RecordError(f"{path} is no {name}: `{where:.100}` is {first['input']!r:.60}: {first['msg']}") from None


def json_with_digest(table: Mapping[str, Any]) -> str:
    """Return a table as JSON with the SHA-256 of its own contents."""
    # Sorted keys make the text, and so the digest, a function of the contents alone.
    text = json.dumps(table, sort_keys=True, allow_nan=False)
    return json.dumps({**table, "sha256": digest(text.encode())}, sort_keys=True, allow_nan=False, indent=1) + "\n"


def read_json(path: Path) -> dict[str, Any]:
    """Read what `json_with_digest` returned, and check its SHA-256 and schema."""
    try:
        table = json.loads(read_bytes(path, LARGEST_JSON))
        expected = table.pop("sha256")
        found = digest(json.dumps(table, sort_keys=True, allow_nan=False).encode())
    # Whatever a foreign or damaged file makes json and the lines above raise; RecursionError for deep nesting.
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RecordError(f"{path} cannot be read: {error!r:.200}") from None
    check_digest(path, found, expected)
    schema = table.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA:
        raise RecordError(f"{path} has schema {schema!r:.40}; this trimtab reads up to {SCHEMA}: use a newer one")
    return dict(table)


def check_digest(path: Path, found: str, expected: str | None) -> None:
    """Raise an error if a file's SHA-256 is not the one it was written with."""
    if found != expected:
        raise RecordError(f"{path} is damaged: its SHA-256 is not the one it was written with")


def read_bytes(path: Path, largest: int | None = None) -> bytes:
    """Read a regular file of at most `largest` bytes."""
    try:
        if not path.is_file():  # opening a named pipe would block
            raise RecordError(f"{path} is missing")
        if largest is not None and path.stat().st_size > largest:
            raise RecordError(f"{path} is larger than {largest} bytes: no such file is written here")
        return path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error}") from None


def digest(data: bytes | memoryview) -> str:
    """Return the SHA-256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def size_of(paths: Sequence[Path]) -> int:
    """Return the bytes in the files of some folders."""
    return sum(file.stat().st_size for path in paths for file in path.iterdir())


def on_disk(size: int) -> int:
    """Return what a file of so many bytes takes on the disk, which gives whole blocks."""
    return -(-size // BLOCK) * BLOCK


def disk_use(path: Path) -> int:
    """Return what a file or folder takes on the disk, what is in a folder not included."""
    found = path.lstat()
    # A file system that delays allocation, or keeps folders in memory, reports no blocks yet; others give larger ones.
    return max(512 * found.st_blocks, on_disk(found.st_size), BLOCK)
