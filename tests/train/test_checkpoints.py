"""A checkpoint is loaded as it was saved or not at all; a full disk leaves the older ones.

`TRIMTAB_THOROUGH=1` damages checkpoints in hundreds of further ways.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trimtab
from helpers.thorough import THOROUGH, slow_but
from helpers.train.short_runs import (
    MessageLog,
    contents,
    differences,
    trained,
)
from trimtab.trainer.train import checkpoints
from trimtab.trainer.train.checkpoints import Checkpoint, CheckpointError
from trimtab.trainer.train.run_folder import RunFolder

STATE = {"progress": {"step": 0}, "note": "plain numbers and words"}
FILES = ("manifest.json", "state.json", "model.safetensors", "optimizer.safetensors")
FLIPS, CUTS = (90, 40) if THOROUGH else (6, 4)  # of each file


def tensors(seed: int) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    model = {"weight": torch.randn(3, 4, generator=generator), "bias": torch.randn(3, generator=generator)}
    return {"model": model, "optimizer": {"0/step": torch.tensor(5.0), "0/exp_avg": torch.randn(3, 4)}}


def save(folder: Path, step: int, keep: int = 2) -> Path:
    return checkpoints.save(folder, step, tensors(step), STATE, keep)


def accept(saved: Checkpoint) -> None:
    """Accept any intact checkpoint."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two good checkpoints, of steps 2 and 4."""
    for step in (2, 4):
        save(tmp_path, step)
    return tmp_path


def assert_step_4_is_not_loaded(folder: Path) -> None:
    log = MessageLog()
    saved = checkpoints.load_newest(folder, accept, log.message)
    assert saved is not None and saved.step == 2
    assert all(torch.equal(saved.tensors["model"][name], value) for name, value in tensors(2)["model"].items())
    assert log.has("step-00000004", "not used")
    with pytest.raises(CheckpointError):
        checkpoints.read(folder / "step-00000004")


def test_a_checkpoint_is_loaded_bit_for_bit(folder: Path) -> None:
    saved = checkpoints.load_newest(folder, accept, print)
    assert saved is not None and saved.step == 4 and saved.state == {"step": 4, **STATE}
    for name, group in tensors(4).items():
        if name == "model":
            assert all(torch.equal(saved.tensors[name][key], value) for key, value in group.items())


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("number", range(FLIPS))
def test_one_flipped_bit_is_detected(folder: Path, name: str, number: int) -> None:
    path, rng = folder / "step-00000004" / name, random.Random(number)
    content = bytearray(path.read_bytes())
    content[int(len(content) * (number + rng.random()) / FLIPS)] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    assert_step_4_is_not_loaded(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("number", range(CUTS))
def test_a_truncated_file_is_detected(folder: Path, name: str, number: int) -> None:
    path = folder / "step-00000004" / name
    os.truncate(path, path.stat().st_size * number // CUTS)
    assert_step_4_is_not_loaded(folder)


def rewrite(path: Path, content: bytes) -> None:
    """Replace the content of a file and its checksum in the manifest."""
    path.write_bytes(content)
    (path.parent / "manifest.json").unlink()
    checkpoints.write_manifest(path.parent)


def replace_by(kind: Callable[[Path], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / "state.json").unlink()
        kind(path / "state.json")

    return damage


def manifest_with(text: str) -> Callable[[Path], None]:
    return lambda path: (path / "manifest.json").write_text(text) and None


def state_with(text: str) -> Callable[[Path], None]:
    return lambda path: rewrite(path / "state.json", text.encode())


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def become_another_step(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step-00000002"), path)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    **{f"{name} is missing": lambda path, name=name: (path / name).unlink() for name in FILES},
    **{f"{name} is empty": lambda path, name=name: (path / name).write_bytes(b"") for name in FILES},
    **{f"{name} is longer": lambda path, name=name: lengthen(path / name) for name in FILES},
    "everything is missing": lambda path: [file.unlink() for file in path.iterdir()],
    "an extra file": lambda path: (path / "extra.safetensors").write_bytes(b"more"),
    "an extra pickle": lambda path: (path / "model.pt").write_bytes(b"\x80\x04."),
    "an extra folder": lambda path: (path / "more").mkdir(),
    "it is a file": lambda path: (shutil.rmtree(path), path.write_text("checkpoint")),
    "it is a link to nowhere": lambda path: (shutil.rmtree(path), path.symlink_to("nowhere")),
    "it is another step": become_another_step,
    "the manifest is another step's": lambda path: shutil.copy(path.with_name("step-00000002") / "manifest.json", path),
    "two files are swapped": lambda path: [
        (path / one).rename(path / other)
        for one, other in (
            ("model.safetensors", "x"),
            ("optimizer.safetensors", "model.safetensors"),
            ("x", "optimizer.safetensors"),
        )
    ],
    "a file is a folder": replace_by(Path.mkdir),
    "a file is a pipe": replace_by(os.mkfifo),
    "a file is a link in a circle": replace_by(lambda path: path.symlink_to(path.name)),
    "a file is too large": replace_by(lambda path: path.write_bytes(b" " * (checkpoints.MAX_JSON_BYTES + 1))),
    "the manifest is not JSON": manifest_with("{"),
    "the manifest is a list": manifest_with("[]"),
    "the manifest is a number": manifest_with("1" * 9999),
    "the manifest is null": manifest_with("null"),
    "the manifest is nested without end": manifest_with("[" * 100_000),
    "the manifest is huge": manifest_with('{"format": 1, "files": {' + " " * (1 << 21) + "}}"),
    "the manifest is not text": lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe\x00"),
    "the manifest is of another format": manifest_with('{"format": 2, "files": {}}'),
    "the manifest has no files": manifest_with('{"format": 1}'),
    "the manifest names no file": manifest_with('{"format": 1, "files": {}}'),
    "the manifest's files are a number": manifest_with('{"format": 1, "files": 7}'),
    "the manifest's files are words": manifest_with('{"format": 1, "files": ["model.safetensors"]}'),
    "the manifest reaches out of its folder": manifest_with('{"format": 1, "files": {"../../secret": "0"}}'),
    "the state is a list": state_with("[]"),
    "the state is of another step": state_with('{"step": 9}'),
    "the state's step is a word": state_with('{"step": "4; import os"}'),
    "the state has no step": state_with("{}"),
    "the state is nested without end": state_with("[" * 100_000),
    "the state is not a number": state_with("NaN"),
    "the tensors are a pickle": lambda path: rewrite(path / "model.safetensors", b"\x80\x04cos\nsystem\n."),
    "the tensors' header is absurd": lambda path: rewrite(path / "model.safetensors", b"\xff" * 8 + b"{}"),
    "the tensors' header lies": lambda path: rewrite(
        path / "model.safetensors", (2).to_bytes(8, "little") + b"{}" + b"\0" * 64
    ),
    "the tensors are nothing": lambda path: rewrite(path / "model.safetensors", b""),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_checkpoint_that_is_not_what_was_saved_is_never_loaded(folder: Path, what: str) -> None:
    DAMAGE[what](folder / "step-00000004")
    assert_step_4_is_not_loaded(folder)


@pytest.mark.parametrize(
    "name", ["step-x", "step-", "step-00000009.old", ".writing-00000009-1", "step--0000009", "step"]
)
def test_folders_with_similar_names_are_ignored(folder: Path, name: str) -> None:
    shutil.copytree(folder / "step-00000004", folder / name)
    saved = checkpoints.load_newest(folder, accept, pytest.fail)
    assert saved is not None and saved.step == 4


def test_an_intact_checkpoint_that_cannot_be_restored_is_skipped_for_the_one_before_it(folder: Path) -> None:
    def refuse(saved: Checkpoint) -> None:
        if saved.step == 4:
            raise CheckpointError("of another model")

    saved = checkpoints.load_newest(folder, refuse, print)
    assert saved is not None and saved.step == 2


def test_a_damaged_checkpoint_is_replaced_when_its_step_is_saved_again(folder: Path) -> None:
    (folder / "step-00000004" / "state.json").write_text("{}")
    save(folder, 4)
    assert checkpoints.read(folder / "step-00000004").step == 4


def test_an_intact_checkpoint_is_not_touched_when_its_step_is_saved_again(folder: Path) -> None:
    model = tensors(4)
    checkpoints.save(folder, 6, model, STATE, keep=2)
    before = (folder / "step-00000006").stat().st_ino
    checkpoints.save(folder, 6, model, STATE, keep=2)
    assert (folder / "step-00000006").stat().st_ino == before
    assert not list(folder.glob(".writing-*"))


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 5, 8])
def test_the_newest_checkpoints_are_kept(tmp_path: Path, keep: int) -> None:
    for step in range(6):
        save(tmp_path, step, keep)
    steps = [checkpoints.read(path).step for path in checkpoints.list_checkpoints(tmp_path)]
    assert steps == list(range(6))[-keep:]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_later_checkpoint_does_not_replace_an_intact_one(folder: Path, keep: int) -> None:
    (folder / "step-00000004" / "state.json").write_text("{}")
    save(folder, 3, keep)
    saved = checkpoints.load_newest(folder, accept, print)
    assert saved is not None and saved.step == 3


def test_what_another_live_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    theirs, dead = tmp_path / f".writing-00000002-{os.getppid()}", tmp_path / ".writing-00000002-999999999"
    for path in (theirs, dead):
        path.mkdir()
    save(tmp_path, 4)
    assert theirs.exists() and not dead.exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model", "optimizer"])
def test_weights_that_are_not_finite_are_never_saved(folder: Path, name: str, value: float) -> None:
    spoilt = tensors(6)
    next(iter(spoilt[name].values())).view(-1)[0] = value
    with pytest.raises(checkpoints.NonFiniteStateError, match="not finite"):
        checkpoints.save(folder, 6, spoilt, STATE, keep=2)
    assert [path.name for path in sorted(folder.iterdir())] == ["step-00000002", "step-00000004"]


def adam(*shapes: tuple[int, ...]) -> torch.optim.AdamW:
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_an_optimizer_is_restored_bit_for_bit() -> None:
    ours, other = adam((2, 3), (4,)), torch.optim.AdamW([nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(4))])
    checkpoints.load_optimizer(other, checkpoints.optimizer_tensors(ours))
    one, two = checkpoints.optimizer_tensors(ours), checkpoints.optimizer_tensors(other)
    assert one.keys() == two.keys() and len(one) == 6
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("shapes", [((3, 2), (4,)), ((2, 3),), ((4,), (2, 3))])
def test_an_optimizer_refuses_the_state_of_another_model(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(CheckpointError, match="another model"):
        checkpoints.load_optimizer(adam(*shapes), checkpoints.optimizer_tensors(adam((2, 3), (4,))))


# --- whole runs


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    trained(folder)
    return folder


@pytest.fixture
def run(run_folder: Path, tmp_path: Path) -> Path:
    """A copy of a finished run's folder."""
    return Path(shutil.copytree(run_folder, tmp_path / "run"))


def damage(folder: Path, *steps: int) -> None:
    for step in steps:
        path = folder / "checkpoints" / f"step-{step:08d}" / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one_and_ends_the_same(run_folder: Path, run: Path) -> None:
    damage(run, 6)
    _, log = trained(run, resume=True)
    assert log.has("step-00000006", "damaged", "not used") and log.has("resumed from step 4")
    assert not differences(contents(run), contents(run_folder))


def test_a_run_without_any_intact_checkpoint_is_an_error_and_nothing_is_changed(run: Path) -> None:
    damage(run, 4, 6)
    before = contents(run)
    with pytest.raises(CheckpointError, match=r"no checkpoint under .* can be used.*put a good one back, or train"):
        trained(run, resume=True)
    assert contents(run) == before


def test_a_run_whose_checkpoints_were_removed_is_an_error_and_nothing_is_changed(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    before = contents(run)
    with pytest.raises(CheckpointError, match=r"has the metrics of 6 steps, but no checkpoint.*--out FOLDER"):
        trained(run, {"run.steps": "8"}, resume=True)
    assert contents(run) == before


def test_a_finished_run_that_lost_its_metrics_too_keeps_its_model(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").write_text("nonsense\n")
    before = contents(run)
    with pytest.raises(CheckpointError, match=r"has the metrics of 0 steps, but no checkpoint to go on from"):
        trained(run, resume=True)
    assert contents(run) == before


def test_a_run_without_checkpoints_that_had_no_step_yet_starts_from_the_beginning(run_folder: Path, run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    metrics = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(metrics[0])
    shutil.rmtree(run / "model")
    _, log = trained(run, resume=True)
    assert log.has("no checkpoint yet", "from the beginning")
    assert not differences(contents(run), contents(run_folder))


@pytest.mark.parametrize(
    "changes", [{"model.path": '"demo"', "objective": '"dapo"'}, {"objective": '"stare"', "run.seed": "1"}]
)
def test_an_intact_checkpoint_of_another_run_is_not_used(
    run_folder: Path, run: Path, tmp_path: Path, changes: dict[str, str]
) -> None:
    trained(tmp_path / "other", {**changes, "run.steps": "8", "run.checkpoint_every": "4"})
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step-00000008", run / "checkpoints" / "step-00000008")
    _, log = trained(run, resume=True)
    assert log.has("step-00000008", "does not fit", "not used")
    assert log.has("resumed from step 6")


@pytest.mark.parametrize(
    ("spoil", "value"),
    slow_but(
        [("progress", None), ("objective", []), ("environment", 7), ("config_fingerprint", "word")],
        product(["progress", "objective", "environment", "config_fingerprint"], [None, [], 7, "word"]),
    ),
)
def test_an_invalid_state_is_not_used(run: Path, spoil: str, value: Any) -> None:
    path = run / "checkpoints" / "step-00000006" / "state.json"
    state = json.loads(path.read_text())
    state[spoil] = value
    rewrite(path, json.dumps(state).encode())
    _, log = trained(run, resume=True)
    assert log.has("step-00000006", "does not fit") and log.has("resumed from step 4")


@pytest.mark.parametrize(
    ("name", "value"),
    slow_but(
        [("step", -5), ("step", {}), ("position", "six"), ("steps_without_signal", None), ("updates_skipped", 1e999)],
        product(["step", "position", "steps_without_signal", "updates_skipped"], [-5, 1e999, "six", None, {}]),
    ),
)
def test_invalid_progress_is_not_used(run: Path, name: str, value: Any) -> None:
    path = run / "checkpoints" / "step-00000006" / "state.json"
    state = json.loads(path.read_text())
    state["progress"][name] = value
    rewrite(path, json.dumps(state).encode())
    _, log = trained(run, resume=True)
    assert log.has("step-00000006", "does not fit") and log.has("resumed from step 4")


def test_the_warm_start_is_repeated_if_its_cache_is_damaged(run_folder: Path, tmp_path: Path) -> None:
    trained(tmp_path / "before")
    (cached,) = (tmp_path / ".warm_start").glob("*/step-*")
    (cached / "state.json").write_text("{}")
    _, log = trained(tmp_path / "run")
    assert log.has(".warm_start", "not used")
    assert not differences(contents(tmp_path / "run"), contents(run_folder))
    assert checkpoints.read(cached).state == {"target_reached": False, "step": 4}


# --- full disks


def full(*args: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["save_file", "write_manifest"])
def test_on_a_full_disk_only_the_new_checkpoint_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(checkpoints, call, full)
    with pytest.raises(CheckpointError, match=r"step 6 could not be written to .*No space left"):
        save(folder, 6)
    assert [path.name for path in sorted(folder.iterdir())] == ["step-00000002", "step-00000004"]
    saved = checkpoints.load_newest(folder, accept, pytest.fail)
    assert saved is not None and saved.step == 4


@pytest.mark.parametrize("call", ["os.fsync", "os.mkdir", "pathlib.Path.write_text", "pathlib.Path.rename"])
def test_a_full_disk_at_any_system_call_leaves_the_older_checkpoints(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(call, full)
        with pytest.raises(CheckpointError, match="could not be written"):
            save(folder, 6)
    saved = checkpoints.load_newest(folder, accept, pytest.fail)
    assert saved is not None and saved.step == 4


def test_a_damaged_checkpoint_is_not_the_one_that_is_kept(folder: Path) -> None:
    save(folder, 6, keep=3)
    (folder / "step-00000006" / "state.json").write_text("{}")
    assert checkpoints.make_room(folder) == folder / "step-00000002"
    assert checkpoints.make_room(folder) is None, "that of step 4 is the newest good one"


def test_half_a_line_of_metrics_is_removed_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics({"step": 1})
    whole, limits = folder.metrics.read_text(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 5, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            folder.append_metrics({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert folder.metrics.read_text() == whole


def test_nothing_in_trimtab_reads_or_writes_pickles() -> None:
    for path in Path(trimtab.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for word in ("import pickle", "torch.load(", "torch.save(", "allow_pickle=True", "joblib", "import shelve"):
            assert word not in text, f"{path.name}: {word}"
