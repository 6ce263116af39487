"""Checkpoints: published whole or not at all, found by looking, believed only if every hash is right.

A checkpoint is a folder `step-N` with safetensors, JSON and a manifest of SHA-256 sums. It is written under a temporary
name, synced, and renamed. There is no pointer file that could be wrong, and no pickle that could run code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trimtab import failpoints

FORMAT = 1
LARGEST_JSON = 1 << 20  # bytes; ours are a few thousand


@dataclass(frozen=True)
class Checkpoint:
    """What was saved: named tensors by file, and the state as JSON."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    path: Path


class CheckpointError(ValueError):
    """A checkpoint that could not be written, or that is torn, corrupt or foreign."""


class RuinedError(ValueError):
    """Weights or optimizer state that are not finite: they are never saved."""


def save(
    folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], keep: int
) -> Path:
    """Publish a checkpoint, then let the oldest beyond `keep` go."""
    final, temporary = folder / f"step-{step:08d}", folder / f".writing-{step:08d}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        _write(temporary, {"step": step, **state}, tensors)
        if _same(final, temporary):
            shutil.rmtree(temporary)  # put in its place, it would leave a moment without either
        else:
            shutil.rmtree(final, ignore_errors=True)
            failpoints.failpoint("checkpoint.rename")
            temporary.rename(final)
            _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"the checkpoint of step {step} could not be written to {folder}: {error}") from error
    except RuinedError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    failpoints.failpoint("checkpoint.published")
    older = [path for path in found(folder) if _step(path) < step]  # a later one is damaged, and no reason to lose this
    for old in older[: max(len(older) + 1 - keep, 0)]:
        shutil.rmtree(old, ignore_errors=True)
        failpoints.failpoint("checkpoint.pruned")
    return final


def newest(
    folder: Path, use: Callable[[Checkpoint], None], warn: Callable[[str], None] | None = None
) -> Checkpoint | None:
    """Put the newest valid checkpoint to `use`, which may refuse it as well; the one before it is tried then."""
    for path in reversed(found(folder)):
        try:
            saved = read(path)
            use(saved)
        except CheckpointError as error:
            if warn is not None:
                warn(f"warning: {error}; it is not used")
        else:
            return saved
    return None


def found(folder: Path) -> list[Path]:
    """What looks like a checkpoint, the oldest first."""
    paths = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,12}", path.name)]
    return sorted(paths, key=_step)


def read(path: Path) -> Checkpoint:
    """A checkpoint, after every file has been checked against the manifest."""
    try:
        files = _check(path)
        state = _json(path / "state.json")
        if state["step"] != _step(path):
            raise CheckpointError(f"checkpoint {path} is of step {state['step']}")
        tensors = {Path(name).stem: load_file(path / name) for name in files if name.endswith(".safetensors")}
    except CheckpointError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error!r:.200}") from None
    return Checkpoint(_step(path), tensors, state, path)


@contextmanager
def fitting(saved: Checkpoint) -> Iterator[None]:
    """What goes wrong in here goes wrong because the checkpoint, though whole, is of something else."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {saved.path} does not fit: {error}") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"checkpoint {saved.path} does not fit: {error!r:.200}") from None


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """An optimizer's state as named tensors, by parameter number."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}/{name}": torch.as_tensor(value) for number, slots in state.items() for name, value in slots.items()
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restore what `optimizer_tensors` gave."""
    shapes = {
        str(number): p.shape for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition("/")
        if number not in shapes or value.shape not in {torch.Size(), shapes[number]}:
            raise CheckpointError(f"the optimizer's state is of another model: {key} does not fit")
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _write(folder: Path, state: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """All files of a checkpoint, on the disk for good."""
    folder.mkdir()
    for name, group in tensors.items():
        save_file(_plain(group), folder / f"{name}.safetensors")
        failpoints.failpoint("checkpoint.tensors")
    (folder / "state.json").write_text(json.dumps(state, sort_keys=True))
    failpoints.failpoint("checkpoint.state")
    _write_manifest(folder)
    failpoints.failpoint("checkpoint.manifest")
    for file in folder.iterdir():
        _sync(file)
    _sync(folder)


def _plain(group: Mapping[str, Tensor]) -> dict[str, Tensor]:
    plain = {name: value.detach().to("cpu").contiguous() for name, value in group.items()}
    ruined = [name for name, value in plain.items() if not bool(torch.isfinite(value).all())]
    if ruined:
        raise RuinedError(f"{ruined[0]} is not finite (and {len(ruined) - 1} more): not saved. Lower the learning rate")
    return plain


def _check(path: Path) -> list[str]:
    """The names of a checkpoint's files, once each is what was saved."""
    manifest = _json(path / "manifest.json")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {path} has a manifest of another format")
    files = dict(manifest["files"])
    present = {file.name for file in path.iterdir()} - {"manifest.json"}
    if present != set(files):
        raise CheckpointError(f"checkpoint {path} should hold {sorted(files)}, but holds {sorted(present)}")
    for name, digest in files.items():
        if _digest(path / name) != digest:
            raise CheckpointError(f"checkpoint {path} is damaged: {name} is not what was saved")
    return list(files)


def _same(one: Path, other: Path) -> bool:
    """Whether two checkpoints are the same and the first is whole."""
    try:
        read(one)
        return _digest(one / "manifest.json") == _digest(other / "manifest.json")
    except CheckpointError:
        return False


def _sweep(folder: Path) -> None:
    """Take away what a killed process left half-written; another run may be writing into a shared folder right now."""
    for path in folder.glob(".writing-*-*"):
        process = path.name.rpartition("-")[2]
        if process == str(os.getpid()) or not _alive(int(process)):
            shutil.rmtree(path, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _write_manifest(folder: Path) -> None:
    files = {file.name: _digest(file) for file in sorted(folder.iterdir())}
    (folder / "manifest.json").write_text(json.dumps({"format": FORMAT, "files": files}, sort_keys=True))


def _json(path: Path) -> Any:
    with _open(path) as file:
        text = file.read(LARGEST_JSON + 1)
    if len(text) > LARGEST_JSON:
        raise CheckpointError(f"checkpoint file {path} is too large to be ours")
    return json.loads(text)


def _digest(path: Path) -> str:
    with _open(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open(path: Path) -> Any:
    if not path.is_file():  # opening a pipe would wait for ever
        raise CheckpointError(f"checkpoint file {path} is missing")
    return path.open("rb")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
