"""The controllers' state beside verl's checkpoints: `global_step_N/trimtab.json`, plain numbers."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import trimtab as tt
from trimtab.engines.verl.options import Options

FILE = "trimtab.json"

logger = logging.getLogger(__name__)


def save(folder: Path, options: Options, objective: tt.Objective) -> None:
    """Write the state into a checkpoint's folder, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"version": tt.__version__, "objective": options.objective, "controllers": objective.state_dict()}
    temporary = folder / f".{FILE}"
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(folder / FILE)


def restore(folder: Path, options: Options, objective: tt.Objective) -> None:
    """Take the state up again. A checkpoint of another trainer has none: controllers then start as new, with a word."""
    path = folder / FILE
    if not path.is_file():
        if objective.controllers:
            logger.warning("trimtab: %s is missing, the controllers of %s start anew", path, objective.name)
        return
    try:
        objective.load_state_dict(json.loads(path.read_text(encoding="utf-8"))["controllers"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} does not fit {options.objective}: {error!s:.300}. Remove the file to start its controllers anew"
        ) from None
