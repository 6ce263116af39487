"""Rows of a parquet file, read in pieces: a few kilobytes of a dictionary may stand for terabytes of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trimtab.data.problems import optional_module

LEAST_LIMIT = 256 << 20  # bytes that any file may decode to
MOST_GROWTH = 100  # bytes for a byte of a larger file
ROW_BYTES = 100  # of a row in Python, at least
BATCH = 1024  # rows
SHARED_BEGINNINGS = "DELTA_BYTE_ARRAY"  # an encoding: a few bytes stand for a text that begins like the one before


def parquet_rows(path: Path, on_error: Callable[[str], None] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`FILE, row N`, the row); text that is not UTF-8 raises ValueError or, with `on_error`, is skipped."""
    parquet = optional_module("pyarrow.parquet", f"reading {path}", "pyarrow")
    limit, decoded, number = max(LEAST_LIMIT, MOST_GROWTH * path.stat().st_size), 0, 0
    try:
        with parquet.ParquetFile(path) as file:
            texts = _texts(file)
        # Texts stay in the dictionaries that they are stored in until their size is known.
        with parquet.ParquetFile(path, read_dictionary=texts) as file:
            _check_counts(path, file, limit)
            for batch in file.iter_batches(_batch_size(file.metadata, limit)):
                decoded += ROW_BYTES * batch.num_rows + sum(map(_decoded_bytes, batch.columns))
                _check_size(path, decoded, limit)
                for row in _rows(batch):
                    number += 1
                    place = f"{path}, row {number}"
                    if not isinstance(row, UnicodeDecodeError):
                        yield place, row
                        continue
                    problem = f"{place}: text that is not UTF-8 (byte {row.start + 1} of it); mend or remove the row"
                    if on_error is None:
                        raise BadTextError(problem)
                    on_error(problem)
    except BadTextError as error:
        raise ValueError(str(error)) from None
    except (ValueError, OSError) as error:  # pyarrow's own errors are subclasses of these
        raise ValueError(f"{path}: not a readable parquet file ({error}); write it again") from None


class BadTextError(ValueError):
    """A file that can be read, but not all that it holds."""


def _texts(file: Any) -> list[str]:
    """Return the paths of the columns of texts, also inside of lists and objects, that can stay in dictionaries."""
    # pyarrow cannot keep those in dictionaries whose texts share their beginnings.
    shared = {number for number, chunk in _chunks(file.metadata) if SHARED_BEGINNINGS in chunk.encodings}
    columns = [file.schema.column(number) for number in range(len(file.schema)) if number not in shared]
    return [c.path for c in columns if c.physical_type == "BYTE_ARRAY" and c.logical_type.type != "DECIMAL"]


def _chunks(metadata: Any) -> Iterator[tuple[int, Any]]:
    """Yield the number of a column and its values in a group of rows."""
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for number in range(group.num_columns):
            yield number, group.column(number)


def _check_counts(path: Path, file: Any, limit: int) -> None:
    """Raise if the file says itself that it has too much: a list in one row, or one text, may have any size."""
    for number, chunk in _chunks(file.metadata):
        _check_size(path, max(8, file.schema.column(number).length) * chunk.num_values, limit)
        _check_size(path, chunk.total_uncompressed_size, limit)


def _batch_size(metadata: Any, limit: int) -> int:
    """Return how many rows to read at a time: a text may be as long as all that its column holds."""
    chunks = [chunk for _, chunk in _chunks(metadata) if SHARED_BEGINNINGS in chunk.encodings]
    longest = max((chunk.total_uncompressed_size for chunk in chunks), default=0)
    return max(1, min(BATCH, limit // max(longest, 1)))


def _check_size(path: Path, size: int, limit: int) -> None:
    if size > limit:
        raise BadTextError(
            f"{path}: its rows have more than {limit >> 20:,} MB, and the file {path.stat().st_size:,} bytes; if you "
            "trust it, write it as .jsonl"
        )


def _decoded_bytes(array: Any) -> int:
    """Return the bytes of an array with its texts written out."""
    arrow = optional_module("pyarrow", "reading parquet", "pyarrow")
    compute = optional_module("pyarrow.compute", "reading parquet", "pyarrow")
    if isinstance(array, arrow.DictionaryArray):
        lengths = compute.binary_length(array.dictionary).cast(arrow.int64())
        return int(compute.sum(lengths.take(array.indices)).as_py() or 0)
    if isinstance(array, arrow.StructArray):
        return sum(map(_decoded_bytes, array.flatten()))
    if isinstance(array, arrow.ListArray | arrow.LargeListArray):
        return _decoded_bytes(array.flatten())
    return int(array.nbytes)


def _rows(batch: Any) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """Yield the rows of a batch; in place of one with bytes that are not UTF-8 the error."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:  # before the first row: the list was not finished
        for number in range(batch.num_rows):
            try:
                (row,) = batch.slice(number, 1).to_pylist()
            except UnicodeDecodeError as error:
                row = error
            yield row
