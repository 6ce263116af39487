"""Encode the tables of a record as parquet, and read them.

Byte-stream split for measured floats, dictionaries for constants, zstd for everything: about 25 bytes per token,
lossless. Pages carry checksums for other readers; ours checks the SHA-256 of the whole file first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from trimtab.record.layout import RecordError
from trimtab.record.schema import TABLES, arrow_schema, required

if TYPE_CHECKING:
    import pyarrow as pa

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
