"""Checkpoints: published whole or not at all, found by looking, believed only if every hash is right.

A checkpoint is a folder `step-N` with safetensors, JSON and a manifest of SHA-256 sums. It is written under a temporary
name, synced, and renamed. There is no pointer file that could be wrong, and no pickle that could run code.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trimtab.train import faults

FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """What was saved: named tensors by file, and the state as JSON."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    path: Path


class CheckpointError(ValueError):
    """A checkpoint that is torn, corrupt or foreign."""


def save(
    folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], keep: int
) -> Path:
    """Publish a checkpoint, then let the oldest beyond `keep` go."""
    folder.mkdir(parents=True, exist_ok=True)
    final, temporary = folder / f"step-{step:08d}", folder / f".writing-{step:08d}-{os.getpid()}"
    for stale in folder.glob(".writing-*"):
        shutil.rmtree(stale, ignore_errors=True)
    temporary.mkdir()
    try:
        for name, group in tensors.items():
            plain = {key: value.detach().to("cpu").contiguous() for key, value in group.items()}
            save_file(plain, temporary / f"{name}.safetensors")
            faults.point("checkpoint.tensors")
        (temporary / "state.json").write_text(json.dumps({"step": step, **state}, sort_keys=True))
        faults.point("checkpoint.state")
        _write_manifest(temporary)
        faults.point("checkpoint.manifest")
        for file in temporary.iterdir():
            _sync(file)
        _sync(temporary)
        shutil.rmtree(final, ignore_errors=True)
        faults.point("checkpoint.rename")
        temporary.rename(final)
        _sync(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"the checkpoint of step {step} could not be written to {folder}: {error}") from error
    faults.point("checkpoint.published")
    for old in _found(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
        faults.point("checkpoint.pruned")
    return final


def newest(folder: Path, warn: Any = None) -> Checkpoint | None:
    """The newest valid checkpoint; a damaged one is named to `warn` and the one before it is tried."""
    for path in reversed(_found(folder)):
        try:
            return read(path)
        except CheckpointError as error:
            if warn is not None:
                warn(f"{error}; trying the one before it")
    return None


def read(path: Path) -> Checkpoint:
    """A checkpoint, after every file has been checked against the manifest."""
    manifest = _json(path / "manifest.json")
    if (
        not isinstance(manifest, dict)
        or manifest.get("format") != FORMAT
        or not isinstance(manifest.get("files"), dict)
    ):
        raise CheckpointError(f"checkpoint {path} has a manifest of another format")
    files: dict[str, str] = manifest["files"]
    present = {file.name for file in path.iterdir()} - {"manifest.json"}
    if present != set(files):
        raise CheckpointError(f"checkpoint {path} should hold {sorted(files)}, but holds {sorted(present)}")
    for name, digest in files.items():
        if _digest(path / name) != digest:
            raise CheckpointError(f"checkpoint {path} is damaged: {name} is not what was saved")
    state = _json(path / "state.json")
    tensors = {Path(name).stem: load_file(path / name) for name in files if name.endswith(".safetensors")}
    return Checkpoint(int(state["step"]), tensors, state, path)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """An optimizer's state as named tensors, by parameter number."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}/{name}": torch.as_tensor(value) for number, slots in state.items() for name, value in slots.items()
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restore what `optimizer_tensors` gave."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, name = key.split("/")
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _found(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def _write_manifest(folder: Path) -> None:
    files = {file.name: _digest(file) for file in sorted(folder.iterdir())}
    (folder / "manifest.json").write_text(json.dumps({"format": FORMAT, "files": files}, sort_keys=True))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint file {path} cannot be read: {error}") from None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
