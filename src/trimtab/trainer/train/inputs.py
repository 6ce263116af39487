"""What a run is made of besides its recipe: the rows of its data and the contents of its models, as hashes.

They are kept in `inputs.json` in the run's folder, so that a run does not go on with other ones unnoticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.data import FixedTask, Problem, Task
from trimtab.files import write_atomically
from trimtab.private_cache import content_digest, folder_digest
from trimtab.trainer.config import Config, model_digest
from trimtab.trainer.train.build import INPUTS, build_tasks

HELD_OUT = "held-out data"
Tasks = tuple[Task, Task | None]


def run_inputs(config: Config, tasks: Tasks) -> dict[str, str]:
    """Return the hashes of a run's inputs by name; what the recipe generates, or the hub has, is left out."""
    model, warm = config.model, config.warm_start
    found = {
        "data": _rows_digest(tasks[0]),
        HELD_OUT: _rows_digest(tasks[1]),
        "model": model_digest(model.path),
        "reference model": model_digest(model.reference) if model.reference not in (None, "start") else "",
        "solutions of the warm start": path_digest(warm.path) if warm.steps else "",
    }
    return {name: digest for name, digest in found.items() if digest}


@dataclass
class InputReader:
    """Finds the inputs of several recipes, and reads data that they have in common once."""

    seen: dict[str, Tasks] = field(default_factory=dict)

    def inputs(self, config: Config) -> dict[str, str]:
        """Return the hashes of a recipe's inputs."""
        key = json.dumps([config.task.model_dump(mode="json"), config.run.eval_problems], sort_keys=True)
        if key not in self.seen:
            self.seen = {key: build_tasks(config)}  # only the last: data may be large
        return run_inputs(config, self.seen[key])


def path_digest(path: str | None) -> str:
    """Return a hash of the contents of a file or folder; empty if it is not on this machine."""
    where = None if path is None else Path(path).expanduser()
    if where is None or not where.exists():
        return ""
    return folder_digest(where) if where.is_dir() else content_digest(where)


def _rows_digest(task: Task | None) -> str:
    if not isinstance(task, FixedTask):
        return ""
    # Of the rows, not of the file: the same rows in another place or format are the same data.
    digest = hashlib.sha256()
    for problem in task.problems:
        digest.update(json.dumps(_row(problem), sort_keys=True, default=repr).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def _row(problem: Problem) -> list[Any]:
    return [
        list(map(dict, problem.prompt)),
        problem.answer,
        problem.rule,
        problem.source,
        problem.solution,
        dict(problem.extra),
    ]


def write_inputs(run: Path, inputs: Mapping[str, str]) -> None:
    """Write the hashes of a run's inputs into its folder."""
    write_atomically(run / INPUTS, json.dumps(dict(inputs), indent=1, sort_keys=True) + "\n")


def input_changes(before: Mapping[str, str], now: Mapping[str, str], config: Config) -> list[str]:
    """Return a line for every input that has other contents than before."""
    places = {
        "data": config.task.arguments.get("path"),
        HELD_OUT: config.task.arguments.get("eval_path"),
        "model": config.model.path,
        "reference model": config.model.reference,
        "solutions of the warm start": config.warm_start.path,
    }
    changed = [name for name in sorted(before.keys() & now.keys()) if before[name] != now[name]]
    return [f"{name}{f' ({places[name]})' if places.get(name) else ''}: the contents are others" for name in changed]
