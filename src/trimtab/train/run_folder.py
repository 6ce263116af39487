"""A run is a folder: `config.toml` (resolved), `metrics.jsonl` (the truth), `checkpoints/`, the trained `model/`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from trimtab.train import faults
from trimtab.train.config import Config, load

# What may differ between a run and its continuation: how long it goes on and what is kept of it.
FREE = {"run.steps", "run.checkpoint_every", "run.keep_checkpoints", "run.sinks", "run.patience"}


@dataclass(frozen=True)
class RunFolder:
    """The files of a run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are published."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One JSON line per step."""
        return self.path / "metrics.jsonl"

    def create(self, config: Config) -> None:
        """Start a run; a folder that holds one already is left alone."""
        if (self.path / "config.toml").exists():
            raise ValueError(f"{self.path} already holds a run: add --resume to go on with it, or choose another --out")
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / "config.toml", resolved_toml(config))

    def reopen(self, config: Config) -> None:
        """Go on with a run; a recipe that would change its course is refused."""
        if not (self.path / "config.toml").exists():
            raise ValueError(f"{self.path} holds no run to resume")
        before, now = _flat(load(self.path / "config.toml")), _flat(config)
        changed = sorted(
            key for key in before.keys() | now.keys() if before.get(key) != now.get(key) and key not in FREE
        )
        if changed:
            lines = [f"  {key}: {before.get(key)!r} -> {now.get(key)!r}" for key in changed]
            raise ValueError(f"{self.path} was run with another recipe; these keys differ:\n" + "\n".join(lines))
        write_atomically(self.path / "config.toml", resolved_toml(config))

    def append(self, record: dict[str, Any]) -> None:
        """Add a step's metrics."""
        line = json.dumps(record, sort_keys=True) + "\n"
        with self.metrics.open("a", encoding="utf-8") as file:
            if faults.point("metrics.torn"):
                file.write(line[: len(line) // 2])
                file.flush()
                os._exit(9)
            file.write(line)
        faults.point("metrics.written")

    def rewind(self, step: int) -> None:
        """Forget the metrics of steps after a checkpoint, and a line that was cut off."""
        kept = [json.dumps(record, sort_keys=True) for record in self.records() if record["step"] <= step]
        if self.metrics.exists():
            write_atomically(self.metrics, "".join(f"{line}\n" for line in kept))

    def records(self) -> list[dict[str, Any]]:
        """Every whole line of the metrics."""
        records = []
        if self.metrics.exists():
            for line in self.metrics.read_text(encoding="utf-8").splitlines():
                try:
                    records.append(json.loads(line))
                except json.JSONDecodeError:
                    continue
        return records


def resolved_toml(config: Config) -> str:
    """The whole configuration as TOML; keys that are not set are left out."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def write_atomically(path: Path, text: str) -> None:
    """All of the text or what was there before."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _flat(config: Config) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for section, values in config.model_dump().items():
        table |= {f"{section}.{key}": value for key, value in values.items()}
    return table
