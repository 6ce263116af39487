"""Find the model of a run, wherever a recipe or command names one: `RUN`, `RUN@STEP`, `RUN@best`, a checkpoint."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from trimtab.files import content_digest, folder_digest, short_digest
from trimtab.text import shown
from trimtab.trainer.config.loading import load_stored
from trimtab.trainer.config.recipe import Config
from trimtab.trainer.config.sections import DEMO_MODELS, MODEL_NAMES

BEST = "best"  # the folder of the checkpoint with the best held-out score, and its name as RUN@best
CHECKPOINT_FOLDERS = ("checkpoints", "alarms", BEST)  # of a run; alarms keep checkpoints of their own
LONGEST_CHAIN = 20  # runs that start from runs; a folder that names itself must not be followed for ever


@dataclass(frozen=True)
class RunModel:
    """The weights of a run: those of a checkpoint or, if `checkpoint` is None, of its finished model."""

    run: Path
    checkpoint: Path | None

    @property
    def folder(self) -> Path:
        """The folder that holds the weights."""
        return self.checkpoint or self.run / "model"

    def config(self) -> Config:
        """Return the run's configuration, without parts of its own: naming a run as a model runs no code of it."""
        return load_stored(self.run / "config.toml")


def find_run_model(path: str) -> RunModel | None:
    """Return the weights of the run that a path names; None if the path is that of a model."""
    where = Path(os.path.expanduser(path))
    if path in MODEL_NAMES:  # the models of that name, whatever is in the current folder
        return None
    if _is_checkpoint(where):
        return RunModel(where.parent.parent, where)
    if _is_run(where):
        model = where / "model"
        # The finished model of a LoRA run is the adapter alone; its newest checkpoint has the same weights.
        whole = model.is_dir() and not (model / "adapter_config.json").exists()
        return RunModel(where, None if whole else find_checkpoint(path).folder)
    run, at, _ = path.rpartition("@")
    if at and not os.path.exists(where) and _is_run(Path(os.path.expanduser(run))):
        return find_checkpoint(path)
    return None


def find_checkpoint(path: str) -> RunModel:
    """Return a checkpoint by its folder, as RUN@STEP or RUN@best, or as RUN: that run's newest."""
    where = Path(os.path.expanduser(path))
    if _is_checkpoint(where):
        return RunModel(where.parent.parent, where)
    name, step = path, ""
    if not _is_run(where) and "@" in path:
        name, _, step = path.rpartition("@")
    run = Path(os.path.expanduser(name))
    if not _is_run(run):
        raise ValueError(f"{shown(path, 300)} is neither a run (a folder with config.toml) nor one of its checkpoints")
    found = {int(each.name.removeprefix("step-")): each for each in run_checkpoints(run)}
    if not found:
        raise ValueError(f"the run {run} has neither a finished model nor a checkpoint yet")
    if not step:
        return RunModel(run, list_checkpoints(run / CHECKPOINT_FOLDERS[0])[-1])
    if step == BEST:
        best = list_checkpoints(run / BEST)
        if not best:
            raise ValueError(f"the run {run} has kept no best checkpoint: run.keep_best = true keeps one")
        return RunModel(run, best[-1])
    if not re.fullmatch(r"\d{1,12}", step) or int(step) not in found:
        kept = ", ".join(map(str, sorted(found)))
        raise ValueError(
            f"{shown(path, 300)}: the run has no checkpoint of step {shown(step)}; those it has are of step {kept} "
            "(run.keep_checkpoints says how many are kept)"
        )
    return RunModel(run, found[int(step)])


def base_model(path: str) -> str:
    """Return the path of a model with its config.json: that of a run is what its first run was trained from."""
    for _ in range(LONGEST_CHAIN):
        found = find_run_model(path)
        if found is None:
            return path
        if found.checkpoint is None:
            return str(found.folder)
        path = found.config().model.path
    raise ValueError(f"{shown(path, 300)}: more than {LONGEST_CHAIN} runs in a row start from each other")


def model_digest(path: str) -> str:
    """Return a hash of a model's contents; empty for a demo model, `smollm2` and a name on the hub.

    That of a run's checkpoint includes the model that the run was trained from: with LoRA only adapters are saved.
    """
    found = find_run_model(path)
    if found is None or found.checkpoint is None:
        folder = Path(path).expanduser() if found is None else found.folder
        named = path in MODEL_NAMES or not folder.is_dir()
        return "" if named else folder_digest(folder)
    base_model(path)  # raises if the chain has no end
    config = found.config()
    seed = config.run.seed if config.model.path in DEMO_MODELS else 0  # a demo model's weights depend on it
    weights = content_digest(found.checkpoint / "model.safetensors")
    return short_digest([weights, seed, config.model.path, model_digest(config.model.path)])


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the folders that are named like checkpoints, the oldest first."""
    paths = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,12}", path.name)]
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step-")))


def run_checkpoints(run: Path) -> list[Path]:
    """Return all checkpoints of a run, those that alarms asked for and the best one included."""
    # Those to resume from come last, and so win where an alarm kept the same step.
    return [path for folder in reversed(CHECKPOINT_FOLDERS) for path in list_checkpoints(run / folder)]


def _is_run(path: Path) -> bool:
    # `os.path`, whose functions return False for a path that is too long: a recipe may hold any text.
    return os.path.isfile(path / "config.toml")


def _is_checkpoint(path: Path) -> bool:
    return path.parent.name in CHECKPOINT_FOLDERS and os.path.isfile(path / "manifest.json")
