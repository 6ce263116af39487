"""What the adapters share: which version of an engine they were tested with, the objective that a user names, the state
of its controllers in the engine's checkpoints, and metrics over all processes.
"""

from __future__ import annotations

import importlib.metadata
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab import __version__
from trimtab.config import build_objective
from trimtab.files import write_atomically
from trimtab.objectives import Comm, Objective, gather_rows, merge_metrics

TESTED = {"trl": "1.16.0", "verl": "0.9.1"}
STATE_FILE = "trimtab.json"  # beside the engine's own files in a checkpoint
STATE_FORMAT = 1

# What the loss of a part tells; a process whose part has no tokens has no extremes.
LOSS_METRICS = ("update/ratio_mean", "update/approx_kl", "update/clip_share", "update/ratio_min", "update/ratio_max")


def missing_engine(engine: str, error: ImportError) -> ImportError:
    """The error for an engine that cannot be imported: not installed, or another than the adapter knows."""
    try:
        found = importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        return ImportError(
            f"trimtab.engines.{engine} needs {engine}, which is not installed: pip install 'trimtab[{engine}]' "
            f"(tested with {engine} {TESTED[engine]})"
        )
    return ImportError(
        f"trimtab.engines.{engine} cannot use {engine} {found}: {error}. It was tested with {engine} "
        f"{TESTED[engine]}: pip install {engine}=={TESTED[engine]}"
    )


def check_version(engine: str) -> None:
    """One warning where an engine is of another version than the tested one."""
    found, tested = importlib.metadata.version(engine), TESTED[engine]
    if found != tested:
        warnings.warn(
            f"trimtab.engines.{engine} was tested with {engine} {tested}; this is {found}. If it misbehaves: "
            f"pip install {engine}=={tested}",
            stacklevel=2,
        )


def objective_table(option: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """What a user gave as `objective`, as the table that builds it: `name`, and options beside it."""
    if isinstance(option, str) and option:
        return {"name": option}
    if isinstance(option, Mapping) and isinstance(option.get("name"), str):
        return dict(option)
    raise ValueError(
        f"objective={option!r:.200} names no objective: give a name ('stapo', 'sspo + s2t') or a table with a name and "
        "its options ({'name': 'stapo', 'tau_p': 0.001}); `trimtab methods` lists them"
    )


def make_objective(table: Mapping[str, Any]) -> Objective:
    """The objective of a table."""
    return build_objective(table)


def announcement(objective: Objective) -> str:
    """The line that says that trimtab is at work, and with what."""
    return f"trimtab {__version__}: {objective.explain().splitlines()[0]}"


def save_state(folder: Path, objective: Objective, **numbers: int) -> None:
    """Put the controllers' state, and what else must outlive the process, into a checkpoint's folder."""
    state = {
        "format": STATE_FORMAT,
        "objective": objective.name,
        "controllers": objective.state_dict(),
        "numbers": numbers,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / STATE_FILE, json.dumps(state, sort_keys=True, allow_nan=False) + "\n")


def load_state(folder: Path, objective: Objective) -> dict[str, int]:
    """Restore what `save_state` put there; the numbers come back. A checkpoint of another trainer has nothing of it."""
    path = folder / STATE_FILE
    if not path.is_file():
        if objective.controllers:
            warnings.warn(f"{folder} has no {STATE_FILE}: the controllers of {objective.name} start anew", stacklevel=2)
        return {}
    try:
        state = json.loads(path.read_text())
        if state["format"] != STATE_FORMAT:
            raise ValueError(f"format {state['format']!r:.40}")
        objective.load_state_dict(state["controllers"])
        return {str(name): int(value) for name, value in state["numbers"].items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} does not fit {objective.name}: {error}. Resume with the objective that was saved, or remove the "
            "file to let the controllers start anew"
        ) from None


def over_ranks(parts: Sequence[Mapping[str, Tensor]], names: Sequence[str], comm: Comm | None) -> dict[str, float]:
    """The metrics `names` of an update, from those of its parts on all ranks: `_max` and `_min`, else sums."""
    merged = merge_metrics([dict(part) for part in parts])
    like = next(iter(merged.values()))
    mine = torch.stack([merged[name].to(torch.float64) if name in merged else _none(name, like) for name in names])
    if comm is not None:
        all_ranks = merge_metrics([dict(zip(names, row, strict=True)) for row in gather_rows(comm, mine)])
        mine = torch.stack([all_ranks[name] for name in names])
    values = dict(zip(names, mine.tolist(), strict=True))
    return {name: value for name, value in values.items() if abs(value) != torch.inf}


def _none(name: str, like: Tensor) -> Tensor:
    """What a rank without tokens adds to a metric: nothing."""
    value = -torch.inf if name.endswith("_max") else torch.inf if name.endswith("_min") else 0.0
    return torch.full((), value, dtype=torch.float64, device=like.device)
