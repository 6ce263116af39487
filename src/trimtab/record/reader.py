"""Read the records of a run, step by step and column by column.

A step that is damaged, half-written or of another kind is skipped with a warning when one iterates over steps, and is
an error when it is requested by number; it never returns values.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.data import rollout_ids
from trimtab.record import layout
from trimtab.record.conversation import RecordedCall, RecordedObservation, read_calls, read_observations
from trimtab.record.layout import Manifest, RecordError, RecordWarning, StepInfo, UpdateInfo, open_table, read_columns
from trimtab.record.schema import Vocabulary

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa


def open_run(path: str | Path) -> Records:
    """Open the records of a run folder; the run may still be writing them."""
    folder = Path(path) / layout.RECORDS_FOLDER
    if not folder.is_dir():
        raise RecordError(f"{path} holds no records: {folder} is missing (is it a run, with record.enabled = true?)")
    return Records(folder, layout.read_manifest(folder))


@dataclass(frozen=True)
class Records:
    """The records of a run. Iterating yields its steps; one that cannot be read is skipped with a warning."""

    folder: Path
    manifest: Manifest

    @property
    def steps(self) -> list[int]:
        """List the steps recorded so far, in order."""
        return layout.recorded_steps(self.folder)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Read the bytes of every token id."""
        columns = _open_columns(self.folder / layout.VOCABULARY, self.manifest.vocabulary_sha256)
        return Vocabulary(columns["text"], columns["special"].tolist())

    def step(self, number: int) -> RecordedStep:
        """Open one step."""
        if not layout.step_folder(self.folder, number).exists():
            near = f"; the nearest is {min(self.steps, key=lambda n: abs(n - number))}" if self.steps else ""
            raise RecordError(f"step {number} is not recorded under {self.folder}{near}")
        return RecordedStep(self, *layout.read_step(self.folder, number)).checked()

    def select(self, first: int | None = None, last: int | None = None, every: int = 1) -> Iterator[RecordedStep]:
        """Yield the steps from `first` to `last` inclusive, or one in `every` of them; one at a time is in memory."""
        wanted = [n for n in self.steps if (first is None or n >= first) and (last is None or n <= last)]
        for number in wanted[::every]:
            try:
                # Checked here: a damaged step is skipped, and is not an error in the middle of the caller's work.
                yield self.step(number)
            except RecordError as error:
                warnings.warn(f"{error}; step {number} is left out", RecordWarning, stacklevel=2)

    def __iter__(self) -> Iterator[RecordedStep]:
        return self.select()

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step. Its tables are checked when first used, and columns are read when first used."""

    records: Records
    info: StepInfo
    files: Mapping[str, str]

    @property
    def number(self) -> int:
        """Return the step, as in metrics.jsonl."""
        return self.info.step

    @cached_property
    def tokens(self) -> TableColumns:
        """Return one value per token: `step.tokens["old_logp"]` is a NumPy array."""
        return self._columns("tokens", self.info.tokens)

    @cached_property
    def responses(self) -> TableColumns:
        """Return one value per response: numbers as a NumPy array, strings as a list."""
        return self._columns("responses", self.info.responses)

    @cached_property
    def offsets(self) -> list[int]:
        """Return where each response's tokens start, and the end of the last."""
        import numpy as np

        lengths, updates = self.responses["tokens"], self.info.updates
        ends = [0, *np.cumsum(lengths, dtype=np.int64).tolist()]
        firsts = np.cumsum([0, *(update.responses for update in updates)]).tolist()
        tokens = np.cumsum([0, *(update.tokens for update in updates)]).tolist()
        if (lengths < 0).any() or [ends[first] for first in firsts] != tokens:
            raise RecordError(f"{self.responses.name}: `tokens` does not add up to the tokens of the step's updates")
        return ends

    @cached_property
    def rollouts(self) -> list[int] | None:
        """Return an id of the agent's rollout that each response is a branch of; None if they are no branches."""
        if "branch" not in self.responses:
            return None
        return rollout_ids(self.responses["group"].tolist(), self.responses["sample"].tolist())

    @property
    def updates(self) -> list[RecordedUpdate]:
        """Return the step's updates in order, each with its rows of the tables."""
        out, token, response = [], 0, 0
        for info in self.info.updates:
            spans = slice(response, response + info.responses), slice(token, token + info.tokens)
            out.append(RecordedUpdate(self, info, *spans))
            token, response = token + info.tokens, response + info.responses
        return out

    def pieces(self, response: int) -> list[str]:
        """Decode the tokens of a response to one string each, special ones by name."""
        return self.records.vocabulary.pieces(self._ids(response))

    def text(self, response: int) -> str:
        """Decode a response to text without special tokens."""
        vocabulary = self.records.vocabulary
        return vocabulary.decode([token for token in self._ids(response) if not vocabulary.is_special(token)])

    def observations(self, response: int) -> list[RecordedObservation]:
        """Return what tools replied in a response, in order."""
        return read_observations(self.responses, response)

    def calls(self, response: int) -> list[RecordedCall]:
        """Return the calls that a response made, in order."""
        return read_calls(self.responses, response)

    def checked(self) -> RecordedStep:
        """Check both tables and return the step."""
        _ = self.tokens, self.responses, self.offsets
        return self

    def _ids(self, response: int) -> list[int]:
        return list(self.tokens["token"][self.offsets[response] : self.offsets[response + 1]].tolist())

    def _columns(self, table: str, rows: int) -> TableColumns:
        path = layout.step_folder(self.records.folder, self.number) / f"{table}.parquet"
        columns = _open_columns(path, self.files.get(path.name))
        if columns.file.metadata.num_rows != rows:
            raise RecordError(f"{path} has {columns.file.metadata.num_rows} rows instead of {rows}")
        return columns


@dataclass(frozen=True)
class RecordedUpdate:
    """One update of a step: which of the step's responses and tokens it trained on."""

    step: RecordedStep
    info: UpdateInfo
    responses: slice
    tokens: slice

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """Return this update's rows of a token column."""
        values: np.ndarray[Any, Any] = self.step.tokens[name][self.tokens]
        return values


@dataclass(frozen=True, eq=False)
class TableColumns(Mapping[str, Any]):
    """The columns of a table by name, each read when first used."""

    file: pa.parquet.ParquetFile
    name: str
    size: int  # bytes of the file
    _read: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, column: str) -> Any:
        if column not in self._read:
            self.load([column])
        return self._read[column]

    def load(self, columns: Sequence[str]) -> None:
        """Read several columns in one pass over the file."""
        missing = [column for column in columns if column not in self.file.schema_arrow.names]
        if missing:
            raise KeyError(f"{self.name} has no column {missing[0]!r}; it has {', '.join(self)}")
        wanted = [column for column in columns if column not in self._read]
        table = read_columns(self.file, wanted, self.name, self.size)
        for column in wanted:
            values = table.column(column)
            if str(values.type) in {"string", "binary"}:
                self._read[column] = values.to_pylist()
            else:  # booleans are packed bits in Arrow and cannot be shared with NumPy
                self._read[column] = values.combine_chunks().to_numpy(zero_copy_only=False)

    def table(self) -> pa.Table:
        """Read all columns as an Arrow table."""
        return read_columns(self.file, list(self), self.name, self.size)

    def __iter__(self) -> Iterator[str]:
        return iter(self.file.schema_arrow.names)

    def __len__(self) -> int:
        return len(self.file.schema_arrow.names)


def _open_columns(path: Path, sha256: str | None) -> TableColumns:
    data = layout.read_bytes(path)
    # Before parsing: a parquet file with a flipped bit may still parse, to other numbers.
    layout.check_digest(path, layout.digest(data), sha256)
    return TableColumns(open_table(path.stem, data, str(path)), str(path), len(data))
