"""A run is a folder: `config.toml` (resolved), `metrics.jsonl` (the truth), `tokens/` (records), `checkpoints/`, the
trained `model/`.

`faults.jsonl` is there only if something was not finite: at which step, what, and which responses; `alarms.jsonl` only
if an alarm rang, and `alarms/` only if one asked for a checkpoint.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from trimtab import failpoints
from trimtab.config import AlarmsConfig, Config, load
from trimtab.files import append_json_lines, locked, read_json_lines, write_atomically

# What may differ between a run and its continuation: how long it goes on, what ends it, what is kept of it, and (with a
# warning) the threads and the device it runs on.
FREE = {
    "run.steps",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.loggers",
    "run.report",
    "run.patience",
    "run.threads",
    "run.device",
    "update.on_nonfinite",
    "rollout.kv_cache_memory",
    "rollout.vllm_gpu_memory_utilization",
    "rollout.vllm_options",
    "record.enabled",
    "record.every",
    "record.group_share",
    "record.max_megabytes",
    *(f"alarms.{key}" for key in AlarmsConfig.model_fields),
}


@dataclass(frozen=True)
class RunFolder:
    """The files of a run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are published."""
        return self.path / "checkpoints"

    @property
    def reference(self) -> Path:
        """The weights that the run started from, where a KL penalty compares with them."""
        return self.path / "reference"

    @property
    def metrics(self) -> Path:
        """One JSON line per step."""
        return self.path / "metrics.jsonl"

    @property
    def faults(self) -> Path:
        """One JSON line per update that was not taken."""
        return self.path / "faults.jsonl"

    def locked(self) -> AbstractContextManager[None]:
        """Hold the folder: no other process can run in it meanwhile."""
        return locked(self.path)

    @property
    def alarms(self) -> Path:
        """One JSON line per alarm that rang."""
        return self.path / "alarms.jsonl"

    @property
    def alarm_checkpoints(self) -> Path:
        """The checkpoints that alarms asked for."""
        return self.path / "alarms"

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
        changes = config_changes(load(self.path / "config.toml"), config)
        if changes:
            lines = "".join(f"\n  {line}" for line in changes)
            raise ValueError(f"{self.path} was run with another recipe; these keys differ:{lines}")
        write_atomically(self.path / "config.toml", resolved_toml(config))

    def append(self, record: dict[str, Any]) -> None:
        """Add a step's metrics; a number that does not exist (NaN) is left out."""
        append_json_lines(self.metrics, {name: value for name, value in record.items() if math.isfinite(value)})
        failpoints.failpoint("metrics.written")

    def append_fault(self, record: dict[str, Any]) -> None:
        """Add what was not finite."""
        append_json_lines(self.faults, record)
        failpoints.failpoint("fault.written")

    def append_alarm(self, record: dict[str, Any]) -> None:
        """Add an alarm."""
        append_json_lines(self.alarms, record)
        failpoints.failpoint("alarm.written")

    def settle(self) -> None:
        """Bring what was written to the disk for good: a checkpoint that is there after a power cut has its metrics."""
        for path in (self.metrics, self.faults, self.alarms):
            if path.exists():
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    def rewind(self, step: int) -> None:
        """Forget what was written after a checkpoint, and a line that was cut off."""
        for path in (self.metrics, self.faults, self.alarms):
            if path.exists():
                kept = [
                    json.dumps(record, sort_keys=True) for record in read_json_lines(path) if record["step"] <= step
                ]
                if kept:
                    write_atomically(path, "".join(f"{line}\n" for line in kept))
                else:
                    path.unlink()
        failpoints.failpoint("run.rewound")

    def records(self) -> list[dict[str, Any]]:
        """Every whole line of the metrics."""
        return read_json_lines(self.metrics)

    def fault_records(self) -> list[dict[str, Any]]:
        """Every update that was not taken, and why."""
        return read_json_lines(self.faults)

    def alarm_records(self) -> list[dict[str, Any]]:
        """Every alarm that rang."""
        return read_json_lines(self.alarms)


def resolved_toml(config: Config) -> str:
    """The whole configuration as TOML; keys that are not set are left out."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def config_fingerprint(config: Config) -> dict[str, Any]:
    """What shapes the course of a run, key by key; two runs that agree in it are the same run."""
    table: dict[str, Any] = {}
    for section, values in config.model_dump(mode="json").items():
        table |= {f"{section}.{key}": value for key, value in values.items() if f"{section}.{key}" not in FREE}
    return table


def config_changes(before: Config, now: Config) -> list[str]:
    """Return `key: before -> now` for every key whose change makes it another run."""
    old, new = config_fingerprint(before), config_fingerprint(now)
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return [f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in keys]
