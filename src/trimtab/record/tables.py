"""The tables of a record as parquet bytes, and back.

Measured floats are split into their bytes, constants become run lengths, everything is zstd: some 25 bytes a token, and
not a bit is lost. Pages carry checksums for readers that know them; ours checks the whole file before it believes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from trimtab.record.layout import RecordError
from trimtab.record.schema import TABLES, arrow_schema, required

if TYPE_CHECKING:
    import pyarrow as pa

_ENCODINGS = {"split": "BYTE_STREAM_SPLIT", "delta": "DELTA_BINARY_PACKED", "plain": "PLAIN"}
_LEVEL = 3  # zstd's; higher ones cost time and win a per cent


def encode(table: str, values: Mapping[str, Any]) -> memoryview:
    """The columns of a table as parquet; a column too many, or a required one too few, is a bug of the caller."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = arrow_schema(table, values)
    unknown, missing = set(values) - set(schema.names), set(required(table)) - set(values)
    if unknown or missing:
        raise ValueError(f"the table {table} has no columns {sorted(unknown)}, and lacks {sorted(missing)}")
    arrays = [pa.array(values[field.name], type=field.type) for field in schema]
    sink = pa.BufferOutputStream()
    held = [column for column in TABLES[table] if column.name in values]
    pq.write_table(
        pa.Table.from_arrays(arrays, schema=schema),
        sink,
        compression="zstd",
        compression_level=_LEVEL,
        use_dictionary=[column.name for column in held if column.encoding == "dictionary"],
        column_encoding={c.name: _ENCODINGS[c.encoding] for c in held if c.encoding != "dictionary"},
        write_statistics=False,
        store_schema=False,
        write_page_checksum=True,
    )
    return memoryview(sink.getvalue())


def open_table(table: str, data: bytes, name: str) -> pa.parquet.ParquetFile:
    """A table's file, after a look at its columns; `name` is what errors call it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # It is in memory already: reading ahead would only hand it to a thread that lets go of it some time later.
        file = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False)
        found = file.schema_arrow
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RecordError(f"{name} cannot be read: {error!r:.200}") from None
    wanted = arrow_schema(table, found.names)
    missing = set(required(table)) - set(found.names)
    if missing:
        raise RecordError(f"{name} lacks the columns {', '.join(sorted(missing))}")
    wrong = [field.name for field in wanted if found.field(field.name).type != field.type]
    if wrong:
        raise RecordError(f"{name}: column {wrong[0]} is {found.field(wrong[0]).type}")
    return file


def read_columns(file: pa.parquet.ParquetFile, names: Iterable[str], name: str) -> pa.Table:
    """Some columns of a table."""
    import pyarrow as pa

    try:
        return file.read(columns=list(names), use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RecordError(f"{name} cannot be read: {error!r:.200}") from None
