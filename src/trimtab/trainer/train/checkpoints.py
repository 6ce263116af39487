"""Checkpoints: written completely or not at all, and loaded only if every checksum matches.

A checkpoint is a folder `step-N` of safetensors and JSON files with a manifest of SHA-256 sums. It is written under a
temporary name, synced, and renamed. No pointer file can be out of date, and no pickle can run code.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trimtab import failpoints
from trimtab.files import new_folder, read_bounded
from trimtab.text import PrintLine, shown
from trimtab.trainer.config import list_checkpoints
from trimtab.trainer.model import Policy
from trimtab.trainer.parallel import ShardedOptimizer, World, gather_to_leader, local_part, local_tensor

FORMAT = 1
MANIFEST = "manifest.json"
FILES = {MANIFEST, "state.json", "model.safetensors", "optimizer.safetensors", "rollouts.safetensors"}
TensorGroups = Mapping[str, Mapping[str, Tensor]]  # tensors by name, for each file of a checkpoint
MAX_JSON_BYTES = 1 << 20  # ours have a few thousand; anything larger is not ours and could fill the memory
# What a foreign or damaged file can cause; RecursionError by deeply nested JSON.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError)


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: named tensors by file, and the state as JSON."""

    step: int
    tensors: TensorGroups
    state: dict[str, Any]
    path: Path


class CheckpointError(ValueError):
    """A checkpoint could not be written, is damaged, or belongs to something else."""


class NonFiniteStateError(ValueError):
    """Weights or optimizer state are not finite; they are never saved."""


def save(folder: Path, step: int, tensors: TensorGroups, state: Mapping[str, Any], keep: int) -> Path:
    """Write a checkpoint, then delete the oldest ones beyond `keep`."""
    final = folder / f"step-{step:08d}"
    try:
        folder.mkdir(exist_ok=True)  # without its parents: a run's folder that somebody has removed stays removed
        with new_folder(final, durable=True) as temporary:
            _write(temporary, {"step": step, **state}, tensors)
            if _is_intact(final) and _digest(final / MANIFEST) == _digest(temporary / MANIFEST):
                shutil.rmtree(temporary)  # replacing it would leave a moment without either
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint of step {step} could not be written to {folder}: {error}") from error
    failpoints.failpoint("checkpoint.published")
    # Checkpoints of later steps are not counted: they are damaged, or this step would not be saved again.
    older = [path for path in list_checkpoints(folder) if _step(path) < step]
    for old in older[: max(len(older) + 1 - keep, 0)]:
        remove(old)
        failpoints.failpoint("checkpoint.pruned")
    return final


def make_room(folder: Path) -> Path | None:
    """Remove the oldest checkpoint if a newer one is intact, and return it; None if there is none to spare."""
    paths = list_checkpoints(folder)
    kept = next((path for path in reversed(paths) if _is_intact(path)), None)
    for path in paths[: paths.index(kept)] if kept is not None else []:
        remove(path)
        if not path.exists():
            return path
    return None


def _is_intact(path: Path) -> bool:
    """Return whether every file of a checkpoint is what was saved, without loading it."""
    try:
        _check(path)
    except UNREADABLE:
        return False
    return True


def remove(path: Path) -> None:
    """Remove a checkpoint, unless somebody has put other files into its folder."""
    with suppress(OSError):
        if {file.name for file in path.iterdir()} <= FILES:
            shutil.rmtree(path, ignore_errors=True)


def load_newest(folder: Path, restore: Callable[[Checkpoint], None], warn: PrintLine) -> Checkpoint | None:
    """Pass the newest intact checkpoint to `restore`; if that raises CheckpointError, the one before it, and so on."""
    for path in reversed(list_checkpoints(folder)):
        try:
            saved = read(path)
            restore(saved)
            return saved
        except CheckpointError as error:
            warn(f"warning: {error}; it is not used")
    return None


def read(path: Path) -> Checkpoint:
    """Load a checkpoint after checking every file against the manifest."""
    try:
        files = _check(path)
        state = _read_json(path / "state.json")
        if state["step"] != _step(path):
            raise CheckpointError(f"checkpoint {path} is of step {shown(state['step'])}")
        # safetensors checks its own header, and a file that passed the checksum is the one we wrote.
        tensors = {Path(name).stem: load_file(path / name) for name in files if name.endswith(".safetensors")}
    except CheckpointError:
        raise
    except UNREADABLE as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error!r:.1000}") from None
    return Checkpoint(_step(path), tensors, state, path)


@contextmanager
def errors_as_mismatch(saved: Checkpoint) -> Iterator[None]:
    """Turn errors of the block into CheckpointError: the checkpoint is intact but belongs to something else."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {saved.path} does not fit: {error}") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"checkpoint {saved.path} does not fit: {error!r:.1000}") from None


def trained_parameters(model: Any) -> dict[str, Tensor]:
    """Return the trainable weights by name; of sharded ones every process has its part."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def load_parameters(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Load saved weights: all of them, or none if any does not fit."""
    own = trained_parameters(model)
    shapes, saved = ({(name, value.shape, value.dtype) for name, value in group.items()} for group in (own, tensors))
    wrong = sorted({name for name, *_ in shapes ^ saved})
    if wrong:  # checked before the first copy: a policy that is half restored would be worse than an error
        raise CheckpointError(f"checkpoint of another model: {wrong[0]} does not fit (and {len(wrong) - 1} more)")
    _check_finite(tensors)
    for name, value in own.items():
        local_tensor(value).copy_(local_part(tensors[name], value))


def load_weights(model: Any, path: Path) -> None:
    """Load the weights of a checkpoint, and nothing else of it."""
    saved = read(path)
    with errors_as_mismatch(saved):
        load_parameters(model, saved.tensors["model"])


AnyOptimizer = torch.optim.Optimizer | ShardedOptimizer


def optimizer_tensors(optimizer: AnyOptimizer) -> dict[str, Tensor]:
    """Return an optimizer's state as tensors named `NUMBER OF THE PARAMETER/NAME`.

    Processes that share one must call this together.
    """
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.gather_state()
    # Only tensors and counters; learning rate and betas come from the recipe.
    state = optimizer.state_dict()["state"]
    return {f"{n}/{name}": torch.as_tensor(value) for n, slots in state.items() for name, value in slots.items()}


_ADAMW_STATE = {"step", "exp_avg", "exp_avg_sq"}


def load_optimizer(optimizer: AnyOptimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restore what `optimizer_tensors` returned, on this or another number of processes."""
    if isinstance(optimizer, ShardedOptimizer):
        parameters = optimizer.parameters
    else:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
    shapes = {str(number): p.shape for number, p in enumerate(parameters)}
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition("/")
        fits = number in shapes and name in _ADAMW_STATE and value.is_floating_point()
        if not fits or value.shape != (torch.Size() if name == "step" else shapes[number]):
            raise CheckpointError(f"the optimizer's state is of another model: {key:.100} does not fit")
        if name != "exp_avg" and bool((value < 0).any()):
            raise CheckpointError(f"the optimizer's state is not valid: {key} is negative")
        state.setdefault(int(number), {})[name] = value
    # A parameter that had no gradient yet has no state; one that has some has all of it.
    partial = [number for number, slots in state.items() if len(slots) < len(_ADAMW_STATE)]
    if partial:
        raise CheckpointError(f"the optimizer's state of parameter {partial[0]} is not complete")
    _check_finite(tensors)
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.load_state(tensors)
    else:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _check_finite(tensors: Mapping[str, Tensor]) -> None:
    if bad := _nonfinite(tensors):  # `save` refuses such values, so these were not saved by us
        raise CheckpointError(bad)


def training_tensors(policy: Policy, optimizer: AnyOptimizer | None, world: World) -> TensorGroups:
    """Return on rank 0 the tensors of a checkpoint to go on training from; all processes must call it together.

    Without an optimizer these are only the weights.
    """
    weights = gather_to_leader(trained_parameters(policy.model), world)
    return {"model": weights} if optimizer is None else {"model": weights, "optimizer": optimizer_tensors(optimizer)}


def load_training_tensors(policy: Policy, optimizer: AnyOptimizer, saved: Checkpoint) -> None:
    """Restore what `training_tensors` returned."""
    load_parameters(policy.model, saved.tensors["model"])
    load_optimizer(optimizer, saved.tensors["optimizer"])


def _write(folder: Path, state: Mapping[str, Any], tensors: TensorGroups) -> None:
    for name, group in tensors.items():
        save_file(_finite_on_cpu(group), folder / f"{name}.safetensors")
        failpoints.failpoint("checkpoint.tensors")
    (folder / "state.json").write_text(json.dumps(state, sort_keys=True))
    failpoints.failpoint("checkpoint.state")
    write_manifest(folder)
    failpoints.failpoint("checkpoint.manifest")


def _finite_on_cpu(group: Mapping[str, Tensor]) -> dict[str, Tensor]:
    copies = {name: value.detach().to("cpu").contiguous() for name, value in group.items()}
    # Checked on the copy that is written: the one place that every save passes.
    if bad := _nonfinite(copies):
        raise NonFiniteStateError(f"{bad}: not saved. Lower the learning rate")
    return copies


def _nonfinite(tensors: Mapping[str, Tensor]) -> str:
    """Name tensors that are not finite; return nothing if all are."""
    bad = [name for name, value in tensors.items() if not bool(torch.isfinite(value).all())]
    return f"{bad[0]:.100} is not finite (and {len(bad) - 1} more)" if bad else ""


def write_manifest(folder: Path) -> None:
    """Write the checksums of all files of a checkpoint."""
    files = {file.name: _digest(file) for file in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}, sort_keys=True))


def _check(path: Path) -> list[str]:
    """Return the names of a checkpoint's files after checking each against the manifest."""
    manifest = _read_json(path / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {path} has a manifest of another format")
    files = dict(manifest["files"])
    present = {file.name for file in path.iterdir()} - {MANIFEST}
    # An extra file is as suspicious as a missing one, and the manifest cannot name files outside of the folder.
    if present != set(files):
        raise CheckpointError(f"checkpoint {path} should hold {sorted(files)}, but holds {sorted(present)}")
    for name, digest in files.items():
        if _digest(path / name) != digest:
            raise CheckpointError(f"checkpoint {path} is damaged: {name} is not what was saved")
    return list(files)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _read_json(path: Path) -> Any:
    return json.loads(read_bounded(path, MAX_JSON_BYTES))


def _digest(path: Path) -> str:
    if not path.is_file():  # opening a named pipe would block for ever
        raise CheckpointError(f"checkpoint file {path} is missing")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
