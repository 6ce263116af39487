"""Reading records: a run's, a step's, a column's, each only when it is asked for.

What is damaged, half-written or foreign is named in a warning and passed over when steps are gone through, and is an
error when it is asked for by number; in no case does it give numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.record import layout
from trimtab.record.layout import Manifest, RecordError, RecordWarning, StepInfo, UpdateInfo
from trimtab.record.tables import open_table, read_columns
from trimtab.record.vocabulary import Vocabulary

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa


def open_run(path: str | Path) -> Records:
    """The records of a run, by its folder. The run may still be going on."""
    folder = Path(path) / layout.FOLDER
    if not folder.is_dir():
        raise RecordError(f"{path} holds no records: {folder} is missing (is it a run, with record.enabled = true?)")
    return Records(folder, layout.read_manifest(folder))


@dataclass(frozen=True)
class Records:
    """A run's records. Iterating gives the steps one by one; what cannot be read is warned of and left out."""

    folder: Path
    manifest: Manifest

    @property
    def steps(self) -> list[int]:
        """The steps recorded so far, in order."""
        return layout.recorded_steps(self.folder)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The text of every token id."""
        path = self.folder / layout.VOCABULARY
        data = layout.read_bytes(path)
        if layout.digest(data) != self.manifest.vocabulary_sha256:
            raise RecordError(f"{path} is damaged: it is not what was written")
        table = read_columns(open_table("vocabulary", data, str(path)), ["text", "special"], str(path))
        return Vocabulary(table.column("text").to_pylist(), table.column("special").to_pylist())

    def step(self, number: int) -> Step:
        """One step, or an error that says what is wrong with it."""
        if number not in self.steps:
            near = f"; the nearest is {min(self.steps, key=lambda n: abs(n - number))}" if self.steps else ""
            raise RecordError(f"step {number} is not recorded under {self.folder}{near}")
        return self._step(number)

    def select(self, first: int | None = None, last: int | None = None, every: int = 1) -> Iterator[Step]:
        """The steps from `first` up to `last`, both included, or every so many of them; at most one is held."""
        wanted = [n for n in self.steps if (first is None or n >= first) and (last is None or n <= last)]
        for number in wanted[::every]:
            try:
                yield self._step(number).checked()
            except RecordError as error:
                warnings.warn(f"{error}; step {number} is left out", RecordWarning, stacklevel=2)

    def _step(self, number: int) -> Step:
        return Step(self, *layout.read_step(self.folder, number))

    def __iter__(self) -> Iterator[Step]:
        return self.select()

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class Step:
    """A recorded step. `tokens` and `responses` are read and checked when first touched, column by column."""

    records: Records
    info: StepInfo
    files: Mapping[str, str]

    @property
    def number(self) -> int:
        """The step, as in metrics.jsonl."""
        return self.info.step

    @cached_property
    def tokens(self) -> Columns:
        """One value per token: `step.tokens["old_logp"]` is a NumPy array."""
        return self._columns("tokens", self.info.tokens)

    @cached_property
    def responses(self) -> Columns:
        """One value per response: numbers as a NumPy array, texts as a list."""
        return self._columns("responses", self.info.responses)

    @cached_property
    def offsets(self) -> list[int]:
        """Where each response's tokens start, and the end of the last."""
        import numpy as np

        return [0, *np.cumsum(self.responses["tokens"]).tolist()]

    @property
    def updates(self) -> list[Update]:
        """The step's updates in order, each with its share of the tables."""
        out, token, response = [], 0, 0
        for info in self.info.updates:
            spans = slice(response, response + info.responses), slice(token, token + info.tokens)
            out.append(Update(self, info, *spans))
            token, response = token + info.tokens, response + info.responses
        return out

    def pieces(self, response: int) -> list[str]:
        """A response's tokens as text, one piece each, special ones by name."""
        return self.records.vocabulary.pieces(self._ids(response))

    def text(self, response: int) -> str:
        """A response as text, its special tokens left out."""
        words = self.records.vocabulary
        return words.decode([token for token in self._ids(response) if not words.is_special(token)])

    def checked(self) -> Step:
        """The step, once both its tables are known to be whole."""
        _ = self.tokens, self.responses, self.offsets
        return self

    def _ids(self, response: int) -> list[int]:
        ids: list[int] = self.tokens["token"][self.offsets[response] : self.offsets[response + 1]].tolist()
        return ids

    def _columns(self, table: str, rows: int) -> Columns:
        path = layout.step_folder(self.records.folder, self.number) / f"{table}.parquet"
        data = layout.read_bytes(path)
        if layout.digest(data) != self.files.get(path.name):
            raise RecordError(f"{path} is damaged: it is not what was written")
        file = open_table(table, data, str(path))
        if file.metadata.num_rows != rows:
            raise RecordError(f"{path} has {file.metadata.num_rows} rows instead of {rows}")
        return Columns(file, str(path))


@dataclass(frozen=True)
class Update:
    """One update of a step: which of the step's responses and tokens it trained on."""

    step: Step
    info: UpdateInfo
    responses: slice
    tokens: slice

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """A token column of this update alone."""
        values: np.ndarray[Any, Any] = self.step.tokens[name][self.tokens]
        return values


@dataclass(frozen=True, eq=False)
class Columns(Mapping[str, Any]):
    """A table, column by column, each read when first asked for."""

    file: pa.parquet.ParquetFile
    name: str
    _read: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, column: str) -> Any:
        if column not in self._read:
            self.load([column])
        return self._read[column]

    def load(self, columns: Sequence[str]) -> None:
        """Read several columns at one go."""
        missing = [column for column in columns if column not in self.file.schema_arrow.names]
        if missing:
            raise KeyError(f"{self.name} has no column {missing[0]!r}; it has {', '.join(self)}")
        wanted = [column for column in columns if column not in self._read]
        table = read_columns(self.file, wanted, self.name)
        for column in wanted:
            values = table.column(column)
            plain = str(values.type) in {"string", "binary"}
            self._read[column] = values.to_pylist() if plain else values.combine_chunks().to_numpy(zero_copy_only=False)

    def table(self) -> pa.Table:
        """All columns as an Arrow table."""
        return read_columns(self.file, list(self), self.name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.file.schema_arrow.names)

    def __len__(self) -> int:
        return len(self.file.schema_arrow.names)
