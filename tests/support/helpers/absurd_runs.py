"""Make the files of a run absurd: one value, column, line or file at a time, with all checksums made right again."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file

from trimtab.record.layout import digest, json_with_digest
from trimtab.trainer.train.checkpoints import write_manifest

GONE = object()
VALUES: list[Any] = [
    *(None, True, 0, -1, 1, 2**31, 10**18, 10**30, 10**400, -(10**30), 0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "\x1b[2J", "9" * 50, [], [1], {}, {"a": 1}),
]
CELLS: dict[str, list[Any]] = {
    "int16": [-1, 2**15 - 1, -(2**15)],
    "int32": [-1, 0, 2**31 - 1, -(2**31)],
    "int64": [-1, 2**63 - 1, -(2**63)],
    "float": [float("nan"), float("inf"), 1e38, -1e38, 0.0],
    "string": ["", "\x1b[2J", "x" * 100_000, "\u202e"],
    "binary": [b"", b"\xff\xfe", b"x" * 100_000],
    "bool": [True, False],
}
TOML = [
    *(
        "0",
        "-1",
        "1e308",
        "nan",
        "inf",
        "[]",
        "{}",
        "''",
        "'x'",
        "0x" + "f" * 5_000,
        "1" * 25,
        '"\\u001b"',
        "[" * 5_000,
    ),
    *("true", "1e-320"),
]


def absurd_json(table: Any, rng: random.Random) -> Any:
    """Return a copy of a JSON value with one part of it, at any depth, replaced or removed."""
    path = rng.choice(list(_paths(table)))
    value = rng.choice([*VALUES, GONE] if path else VALUES)
    return _replaced(table, path, value)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from _paths(each, (*path, key))


def _replaced(table: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = part = json.loads(json.dumps(table))
    for key in path[:-1]:
        part = part[key]
    if value is GONE:
        del part[path[-1]]
    else:
        part[path[-1]] = value
    return copy


def change_record_json(run: Path, rng: random.Random) -> None:
    """Change a value of a step's JSON or of the manifest of the records."""
    path = rng.choice([*sorted(run.glob("tokens/*/step.json")), run / "tokens/manifest.json"])
    table = json.loads(path.read_text())
    kept = {key: table.pop(key) for key in ("sha256", "columns") if key in table}
    changed = absurd_json(table, rng)
    _seal(path, {**changed, **kept} if isinstance(changed, dict) else changed)


def _seal(path: Path, table: Any) -> None:
    try:
        path.write_text(json_with_digest({key: value for key, value in table.items() if key != "sha256"}))
    except (ValueError, AttributeError):  # NaN, and what is no object, cannot be sealed
        path.write_text(json.dumps(table))


def change_record_table(run: Path, rng: random.Random) -> None:
    """Change a parquet file: a cell, a column, the number of rows, or a type."""
    path = rng.choice(sorted(run.glob("tokens/**/*.parquet")))
    table = pq.read_table(path)
    name = rng.choice(table.column_names)
    column, number = table.column(name), table.column_names.index(name)
    cells, cell = column.to_pylist(), rng.choice(CELLS[str(column.type)])
    kind = rng.choice(["cell", "cell", "cell", "column", "null", "text", "drop", "twice", "fewer", "more"])
    if kind in ("cell", "null"):
        cells[rng.randrange(len(cells))] = cell if kind == "cell" else None
        table = table.set_column(number, name, pa.array(cells, column.type))
    elif kind in ("column", "text"):
        values = pa.array([cell] * len(cells), column.type) if kind == "column" else pa.array(map(str, cells))
        table = table.set_column(number, name, values)
    elif kind == "drop":
        table = table.drop_columns([name])
    elif kind == "twice":
        table = table.append_column(name, column)
    else:
        table = table.slice(0, rng.randrange(len(cells))) if kind == "fewer" else pa.concat_tables([table, table])
    pq.write_table(table, path, store_schema=False)
    header = run / "tokens/manifest.json" if path.stem == "vocabulary" else path.parent / "step.json"
    facts = json.loads(header.read_text())
    if path.stem == "vocabulary":
        facts["vocabulary_sha256"] = digest(path.read_bytes())
    else:
        facts["files"][path.name] = digest(path.read_bytes())
        if rng.random() < 0.5:  # the step's JSON agrees with the new number of rows
            facts["updates"][0][path.stem] += len(table) - facts[path.stem]
            facts[path.stem] = len(table)
    _seal(header, facts)


def change_line(run: Path, rng: random.Random) -> None:
    """Change a line of the metrics, the alarms or the skipped updates."""
    path = run / rng.choice(["metrics.jsonl", "alarms.jsonl", "nonfinite.jsonl"])
    if not path.exists():
        path.write_text('{"step": 1, "alarm": "ratio", "evidence": {"a": 1}, "action": "save"}\n{"step": 2}\n')
    lines = path.read_text().splitlines()
    number = rng.randrange(len(lines))
    absurd = json.dumps(absurd_json(json.loads(lines[number]), rng))
    lines[number] = rng.choice(
        [absurd, absurd, absurd, "[" * 50_000, "x", lines[number][:20], '{"step": ' + "9" * 5_000 + "}"]
    )
    path.write_text("\n".join(lines) + "\n")


def change_config(run: Path, rng: random.Random) -> None:
    """Change a line of config.toml."""
    lines = (run / "config.toml").read_text().splitlines()
    number = rng.randrange(len(lines))
    key, equals, _ = lines[number].partition("=")
    lines[number] = f"{key}= {rng.choice(TOML)}" if equals else f"x{key}"
    (run / "config.toml").write_text("\n".join(lines))


def change_kind_of_file(run: Path, rng: random.Random) -> None:
    """Put something else in the place of a file: a pipe that nobody writes to, a folder, an endless device, ..."""
    path = rng.choice(sorted(path for path in run.rglob("*") if path.is_file()))
    data = path.read_bytes()
    path.unlink()
    replacements: list[Callable[[], object]] = [
        lambda: os.mkfifo(path),
        path.mkdir,
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.write_bytes(b""),
        lambda: path.write_bytes(rng.randbytes(500)),
        lambda: path.write_bytes(data[: len(data) // 2]),
    ]
    rng.choice(replacements)()


def change_checkpoints(run: Path, rng: random.Random) -> None:
    """Change a value of the state, or a tensor, of every checkpoint."""
    for folder in sorted(run.glob("checkpoints/step-*")):
        if rng.random() < 0.4:
            state = folder / "state.json"
            state.write_text(json.dumps(absurd_json(json.loads(state.read_text()), rng)))
        else:
            path = folder / rng.choice(["model.safetensors", "optimizer.safetensors", "optimizer.safetensors"])
            tensors = load_file(path) or {"0/step": torch.zeros(())}  # the first checkpoint's optimizer has no state
            change_tensor(tensors, rng.choice(sorted(tensors)), rng.choice(sorted(TENSORS)))
            save_file(tensors, path)
        seal_checkpoint(folder)


TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nan": lambda value: torch.full_like(value, torch.nan),
    "negative": lambda value: -value.abs() - 1,
    "huge": lambda value: torch.full_like(value, 3e38),
    "integers": lambda value: value.to(torch.int64),
    "booleans": lambda value: value.to(torch.bool),
    "other shape": lambda value: torch.zeros(3, 7),
    "gone": lambda value: value,
    "renamed": lambda value: value,
}


def change_tensor(tensors: dict[str, torch.Tensor], name: str, kind: str) -> None:
    """Change one tensor of a file, in a way that `TENSORS` names."""
    value = TENSORS[kind](tensors.pop(name))
    if kind != "gone":
        tensors[f"{name}x" if kind == "renamed" else name] = value


def seal_checkpoint(folder: Path) -> None:
    """Make the checksums of a checkpoint right again."""
    (folder / "manifest.json").unlink()
    write_manifest(folder)
