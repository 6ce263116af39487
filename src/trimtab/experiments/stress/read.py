"""Read a stress test back from its stress.json, which may be damaged or from another program."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from trimtab.experiments.compare import MAX_RUNS
from trimtab.experiments.stress.axis_table import AxisTable
from trimtab.experiments.stress.figures import RunFigures
from trimtab.experiments.stress.grid import Axis
from trimtab.files import read_bounded
from trimtab.text import shorten

NAME = "stress.json"
LARGEST = 200_000_000  # bytes: some ten thousand runs
MOST_CELLS = 10 * MAX_RUNS  # objectives times values


@dataclass(frozen=True)
class StoredStressTest:
    """A stress test as its file has it."""

    command: Sequence[str]
    recipe: str
    objectives: Sequence[str]
    tables: Sequence[AxisTable]


def _with_cell(run: Any) -> Any:
    """Gather the three keys that name a run's cell."""
    if not isinstance(run, Mapping):
        return run
    return {**run, "cell": {name: run.get(name) for name in ("objective", "axis", "value")}}


class _StoredAxis(BaseModel):
    key: str
    values: list[str] = Field(min_length=1)


class _StoredFile(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)  # holds for the numbers of its runs too

    command: list[str]
    recipe: str
    objectives: list[str] = Field(min_length=1)
    axes: list[_StoredAxis] = Field(min_length=1)
    runs: list[Annotated[RunFigures, BeforeValidator(_with_cell)]] = Field(max_length=MOST_CELLS)


def read_stress(path: Path) -> StoredStressTest:
    """Read the stress test of a folder or a file; margins are those of its runs, whatever else the file says."""
    path = path / NAME if path.is_dir() else path
    try:
        stored = _StoredFile.model_validate(json.loads(read_bounded(path, LARGEST)))
        if len(stored.objectives) * sum(len(axis.values) for axis in stored.axes) > MOST_CELLS:
            raise ValueError(f"it has more than {MOST_CELLS:,} settings")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path} holds no stress test: {shorten(where)}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} holds no stress test: {shorten(str(error), 300)}") from None
    tables = [_table(axis, stored) for axis in stored.axes]
    return StoredStressTest(stored.command, stored.recipe, stored.objectives, tables)


def _table(axis: _StoredAxis, stored: _StoredFile) -> AxisTable:
    runs = [run for run in stored.runs if run.cell.axis == axis.key and run.cell.value in axis.values]
    return AxisTable(Axis(axis.key, tuple(axis.values)), stored.objectives, runs)
