"""The files of a record and their JSON headers.

`RUN/tokens/` holds `manifest.json`, `vocabulary.parquet` and one folder per recorded step, `step-00000040/`, with
`tokens.parquet`, `responses.parquet` and `step.json`. A step's folder is written under a temporary name and renamed,
and `step.json` has the SHA-256 of the two tables, so a reader knows whether it has all of what was written.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from trimtab.record.schema import SCHEMA, TABLES, arrow_schema, required

if TYPE_CHECKING:
    import pyarrow as pa

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
    # Sorted keys make the text, and so the digest, a function of the contents only.
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


def on_disk(size: int) -> int:
    """Return what a file of so many bytes takes on the disk, which gives whole blocks."""
    return -(-size // BLOCK) * BLOCK


def disk_use(path: Path) -> int:
    """Return what a file or folder takes on the disk, what is in a folder not included."""
    found = path.lstat()
    # A file system that delays allocation, or keeps folders in memory, reports no blocks yet; others give larger ones.
    return max(512 * found.st_blocks, on_disk(found.st_size), BLOCK)


# Encode the tables of a record as parquet, and read them.
#
# Byte-stream split for measured floats, dictionaries for constants, zstd for everything: about 25 bytes per token,
# lossless. Pages carry checksums for other readers; ours checks the SHA-256 of the whole file first.

_ENCODINGS = {"split": "BYTE_STREAM_SPLIT", "delta": "DELTA_BINARY_PACKED", "plain": "PLAIN"}
# Values that are all equal take nearly no bytes in a file and all of theirs in memory. A recorded token takes 25 bytes.
_MANY_ROWS = 1 << 20
# And a text that is stored once may stand in every row.
_LEAST_LIMIT = 256 << 20
_MOST_GROWTH = 100
_ZSTD_LEVEL = 3  # higher levels cost time and save a per cent


def encode(table: str, values: Mapping[str, Any]) -> memoryview:
    """Return a table as parquet bytes; unknown or missing columns are an error."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = arrow_schema(table, values)
    unknown, missing = set(values) - set(schema.names), set(required(table)) - set(values)
    if unknown or missing:
        raise ValueError(f"table {table}: unknown columns {sorted(unknown)}, missing columns {sorted(missing)}")
    arrays = [pa.array(values[field.name], type=field.type) for field in schema]
    sink = pa.BufferOutputStream()  # in memory, because the digest is needed before anything is published
    columns = [column for column in TABLES[table] if column.name in values]
    pq.write_table(
        pa.Table.from_arrays(arrays, schema=schema),
        sink,
        compression="zstd",
        compression_level=_ZSTD_LEVEL,
        use_dictionary=[column.name for column in columns if column.encoding == "dictionary"],
        column_encoding={c.name: _ENCODINGS[c.encoding] for c in columns if c.encoding != "dictionary"},
        # Statistics and Arrow's own copy of the schema take space, and nothing here reads them.
        write_statistics=False,
        store_schema=False,
        write_page_checksum=True,
    )
    return memoryview(sink.getvalue())


def open_table(table: str, data: bytes, name: str) -> pa.parquet.ParquetFile:
    """Open a table and check its columns; `name` is the file's name in errors."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # The bytes are in memory already; pre-buffering would give them to a thread that frees them some time later.
        file = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False)
        found = file.schema_arrow
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RecordError(f"{name} cannot be read: {error!r:.200}") from None
    rows = file.metadata.num_rows
    if rows > max(_MANY_ROWS, len(data)):
        raise RecordError(f"{name} has {rows:,} rows in {len(data):,} bytes: no run has recorded that")
    wanted = arrow_schema(table, found.names)
    if len(set(found.names)) < len(found.names):
        raise RecordError(f"{name} has a column twice")
    missing = set(required(table)) - set(found.names)
    if missing:
        raise RecordError(f"{name} lacks the columns {', '.join(sorted(missing))}")
    wrong = [field.name for field in wanted if found.field(field.name).type != field.type]
    if wrong:
        raise RecordError(f"{name}: column {wrong[0]} is {found.field(wrong[0]).type}")
    groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
    _check_size(name, sum(g.column(n).total_uncompressed_size for g in groups for n in range(g.num_columns)), len(data))
    # Texts stay in the dictionaries that they are stored in until their size is known.
    texts = [field.name for field in wanted if field.type in (pa.string(), pa.binary())]
    return pq.ParquetFile(pa.BufferReader(data), pre_buffer=False, read_dictionary=texts)


def read_columns(file: pa.parquet.ParquetFile, names: Iterable[str], name: str, size: int = 0) -> pa.Table:
    """Read some columns of a table, which is stored in so many bytes."""
    import pyarrow as pa

    try:
        table = file.read(columns=list(names), use_threads=False)
        texts = [field.name for field in table.schema if pa.types.is_dictionary(field.type)]
        _check_size(name, sum(_text_bytes(table.column(text)) for text in texts), size)
        for text in texts:
            number = table.schema.get_field_index(text)
            plain = table.field(number).with_type(table.field(number).type.value_type)
            table = table.set_column(number, plain, table.column(number).cast(plain.type))
    except RecordError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RecordError(f"{name} cannot be read: {error!r:.200}") from None
    nulls = [column for column in table.column_names if table.column(column).null_count]
    if nulls:
        raise RecordError(f"{name}: column {nulls[0]} has nulls")
    return table


def _text_bytes(column: pa.ChunkedArray) -> int:
    """Return the bytes of a column's texts written out, which are in dictionaries."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths = (pc.binary_length(chunk.dictionary).cast(pa.int64()).take(chunk.indices) for chunk in column.chunks)
    return sum(pc.sum(each).as_py() or 0 for each in lengths)


def _check_size(name: str, size: int, stored: int) -> None:
    if size > max(_LEAST_LIMIT, _MOST_GROWTH * stored):
        raise RecordError(f"{name} has {size:,} bytes of values in {stored:,} bytes: no run has recorded that")
