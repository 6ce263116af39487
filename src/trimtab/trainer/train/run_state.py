"""What a run saves and restores: its checkpoints, also on a full disk, the KL reference, and the trained model."""

from __future__ import annotations

import errno
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor

import trimtab
from trimtab import failpoints
from trimtab.files import new_folder
from trimtab.text import PrintLine, shown
from trimtab.trainer.config import Config, find_checkpoint
from trimtab.trainer.model import Policy, Precision
from trimtab.trainer.parallel import gather_to_leader, local_tensor
from trimtab.trainer.train import checkpoints, warm_start
from trimtab.trainer.train.build import check_base, open_policy
from trimtab.trainer.train.run_folder import RunFolder, config_fingerprint
from trimtab.trainer.train.trainer import RunProgress, Trainer

MOST_FAILED = 3  # checkpoints in a row that may fail
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class CheckpointSaver:
    """Saves the checkpoints that a run can be resumed from. `saved` is the step of the newest one."""

    folder: Path
    message: PrintLine
    may_go_on: bool  # after `MOST_FAILED` failures
    saved: int | None = None
    failed: int = 0  # in a row
    error: str = ""  # of the last failure

    def save(self, step: int, write: Callable[[], None]) -> bool:
        """Call `write`, which saves a step; return whether it is saved."""
        try:
            self.make_room_for(write)
        except (checkpoints.CheckpointError, OSError) as error:
            self.failed += 1
            self.error = str(error)
            if self.failed == 1:  # later it is known already, and it may happen at every step
                more = f"stops if {MOST_FAILED - 1} more fail in a row (run.on_failed_checkpoint)"
                then = "goes on without checkpoints until one can be written" if self.may_go_on else more
                self.message(f"warning: {error}. A resume would start {self.way_back}; the run {then}")
            return False
        if self.failed:
            self.message(f"the checkpoint of step {step} is written: a resume would go on from it")
        self.saved, self.failed, self.error = step, 0, ""
        return True

    def make_room_for(self, write: Callable[[], None]) -> None:
        """Call `write`; if the disk is full, remove what can be spared and call it again."""
        while True:
            try:
                return write()
            except (checkpoints.CheckpointError, OSError, SafetensorError) as error:
                # Of a warm start in the cache only time is lost.
                made = is_full(error) and (warm_start.make_room(self.folder) or checkpoints.make_room(self.folder))
                if not made:
                    raise
                self.message(f"the disk is full: removed {made}; trying again")

    @property
    def must_stop(self) -> bool:
        """Whether too many checkpoints in a row have failed for the run to go on."""
        return self.failed >= MOST_FAILED and not self.may_go_on

    @property
    def way_back(self) -> str:
        """Where a resume would start."""
        return "from the beginning, for nothing is saved" if self.saved is None else f"from step {self.saved}"


def is_full(error: BaseException | None) -> bool:
    """Return whether a file could not be written because its disk or the user's share of it is full."""
    while error is not None:
        # safetensors names the number of the system's error only in its text.
        if getattr(error, "errno", None) in FULL or any(f"os error {number})" in str(error) for number in FULL):
            return True
        error = error.__cause__
    return False


def versions() -> dict[str, str]:
    """Return the versions of the software that the last bits of results depend on."""
    return {
        "trimtab": trimtab.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def environment(device: torch.device, processes: int = 1) -> dict[str, Any]:
    """Return everything outside the recipe that the last bits of results depend on."""
    several = {} if processes == 1 else {"processes": processes}
    return {"threads": torch.get_num_threads(), "device": device.type, **several, **versions()}


def save_checkpoint(folder: Path, trainer: Trainer, progress: RunProgress, keep: int) -> None:
    """Write a checkpoint that the run can resume from, on any number of processes."""
    state = {
        "progress": asdict(progress),
        "objective": trainer.objective.state_dict(),
        "config_fingerprint": config_fingerprint(trainer.config),
        "environment": environment(trainer.policy.device, trainer.world.size),
    }
    if trainer.curriculum is not None:
        state["curriculum"] = trainer.curriculum.state_dict()
    if trainer.loss_scale is not None:
        state["loss_scale"] = trainer.loss_scale.state_dict()
    tensors = trainer.together(gather_tensors)
    if trainer.partial is not None:
        tensors = {**tensors, "rollouts": trainer.partial.state()}
    checkpoints.save(folder, progress.step, tensors, state, keep)


def gather_tensors(trainer: Trainer) -> checkpoints.TensorGroups:
    """Return the tensors of a checkpoint on rank 0; every process has a part of them."""
    return checkpoints.training_tensors(trainer.policy, trainer.optimizer, trainer.world)


def gather_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Return the trained weights on rank 0; of sharded ones every process has a part."""
    return gather_to_leader(checkpoints.trained_parameters(trainer.policy.model), trainer.world)


def gather_model(trainer: Trainer) -> dict[str, Tensor]:
    """Return the state dict of the policy's model on rank 0, with all weights whole."""
    return gather_to_leader(trainer.policy.model.state_dict(), trainer.world)


def weights_are_finite(trainer: Trainer) -> bool:
    """Return whether the trained weights of all processes are finite."""
    weights = map(local_tensor, checkpoints.trained_parameters(trainer.policy.model).values())
    return all(trainer.world.gather(all(bool(torch.isfinite(weight).all()) for weight in weights)))


def restore_follower(trainer: Trainer, path: Path) -> None:
    """Bring the trainer of a rank that follows to the checkpoint that rank 0 has restored."""
    if not trainer.world.leads:
        restore_checkpoint(checkpoints.read(path), trainer, RunProgress())


def restore_checkpoint(saved: checkpoints.Checkpoint, trainer: Trainer, progress: RunProgress) -> None:
    """Bring trainer and progress to the state of a checkpoint; one of another run raises CheckpointError."""
    with checkpoints.errors_as_mismatch(saved):
        # Keys that only one of the two has come from another version of trimtab and are not compared.
        now = config_fingerprint(trainer.config)
        before = saved.state["config_fingerprint"]
        other = [key for key, value in before.items() if now.get(key, value) != value]
        if other:
            raise ValueError(f"it is of a run with another {', '.join(other)}")
        checkpoints.load_training_tensors(trainer.policy, trainer.optimizer, saved)
        trainer.objective.load_state_dict(saved.state["objective"])
        if trainer.curriculum is not None and trainer.world.leads:
            trainer.curriculum.load_state_dict(saved.state["curriculum"])
        if trainer.loss_scale is not None:
            trainer.loss_scale.load_state_dict(saved.state["loss_scale"])
        if trainer.partial is not None:
            vocabulary = int(trainer.policy.lm_head.weight.shape[0])  # type: ignore[index]
            samples, problems = trainer.config.rollout.samples, len(trainer.task)
            trainer.partial.load_state(saved.tensors["rollouts"], samples, saved.step, problems, vocabulary)
        # Checksums prove that nothing was damaged, not that the numbers make sense.
        for name in asdict(progress):
            value = saved.state["progress"][name]
            if type(value) is not int or not 0 <= value < 10**18:
                raise ValueError(f"progress.{name} is {shown(value)}")
            setattr(progress, name, value)
        if progress.step != saved.step or not isinstance(saved.state["environment"], dict):
            raise ValueError("its state is not valid")


def load_start(trainer: Trainer, progress: RunProgress) -> str:
    """Bring a new run to the checkpoint that `model.start_from` names, if any; return in words what was taken.

    Its prompts, and its curriculum, go on where that run's ended, if both take the same ones. Of partial rollouts that
    run keeps what is not finished.
    """
    config = trainer.config
    if config.model.start_from is None:
        return ""
    found = find_checkpoint(config.model.start_from)
    saved = checkpoints.read(found.folder)
    taken = "weights"
    with checkpoints.errors_as_mismatch(saved):
        check_base(found.run, config)
        if config.model.path != config.model.start_from:  # else they are the model's already, merged
            checkpoints.load_parameters(trainer.policy.model, saved.tensors["model"])
        if config.model.start_optimizer:
            checkpoints.load_optimizer(trainer.optimizer, saved.tensors["optimizer"])
            taken += " and optimizer"
        before, position = saved.state["config_fingerprint"], saved.state["progress"]["position"]
        order = {key: value for key, value in config_fingerprint(config).items() if key.startswith("task.")}
        order["run.seed"] = config.run.seed
        same = all(before.get(key) == value for key, value in order.items())
        if same and type(position) is int:
            progress.position = max(position, 0)
        if same and trainer.curriculum is not None and trainer.world.leads and _has_curriculum(before, config):
            trainer.curriculum.load_state_dict(saved.state["curriculum"])
    return f"starts from the {taken} of step {saved.step} of {found.run}"


def _has_curriculum(before: dict[str, Any], config: Config) -> bool:
    """Return whether the fingerprint of a run has this recipe's curriculum."""
    own = {key: value for key, value in config_fingerprint(config).items() if key.startswith("curriculum.")}
    return all(before.get(key) == value for key, value in own.items())


def save_reference(trainer: Trainer, folder: RunFolder) -> None:
    """Keep the policy's present weights as the KL reference, for the whole run and for its resumes."""
    if trainer.config.model.reference == "start":
        # With LoRA only the adapter is trained and saved; the frozen base is the same in both models.
        start = {"model": trainer.together(gather_weights)}
        checkpoints.save(folder.reference, 0, start, {}, keep=1)
        trainer.together(load_reference, folder.reference)


def load_reference(trainer: Trainer, folder: Path) -> None:
    """Load the KL reference that `save_reference` kept."""
    if trainer.config.model.reference == "start" and trainer.reference is not None:
        checkpoints.load_weights(trainer.reference.model, folder / "step-00000000")


def publish_model(policy: Policy, folder: Path, state: dict[str, Tensor] | None = None, *, tidy: bool = True) -> None:
    """Write the trained model and its tokenizer in the format of transformers, completely or not at all.

    `state` is the model's state dict if this process has only a part of it; `tidy` as for `new_folder`.
    """
    # Not synced: unlike a checkpoint, it can be written again from the last checkpoint with --resume.
    with new_folder(folder, tidy=tidy) as temporary:
        # Without it peft looks up the base model's vocabulary on the hub; no adapter is on an embedding.
        options: dict[str, Any] = {"save_embedding_layers": False} if hasattr(policy.model, "peft_config") else {}
        policy.model.save_pretrained(temporary, state_dict=state, **options)
        policy.tokenizer.save_pretrained(temporary)
        failpoints.failpoint("model.written")


def export_model(path: str, folder: Path, precision: Precision = "fp32") -> None:
    """Write the model of a run or a checkpoint to a folder in the format of transformers, adapters merged."""
    if folder.exists():
        raise ValueError(f"{folder} exists already: choose another --out")
    policy = open_policy(path, device="cpu")
    if precision == "bf16":
        policy.model.to(torch.bfloat16)
    folder.parent.mkdir(parents=True, exist_ok=True)
    publish_model(policy, folder, tidy=False)  # beside it are files of the user
