"""From a recipe to the objects of a run."""

from __future__ import annotations

import pytest
import torch

from trimtab.trainer.config import load
from trimtab.trainer.sampling import NativeSampler
from trimtab.trainer.train.build import build_reference, build_task
from trimtab.trainer.train.trainer import build_trainer


def test_a_trainer_has_the_parts_of_its_recipe() -> None:
    trainer = build_trainer(load("addition", ["run.device=cpu", "update.lr=1e-4"]))
    assert isinstance(trainer.sampler, NativeSampler)
    assert (trainer.task.name, trainer.objective.name, trainer.reference) == ("arithmetic/addition-2", "stapo", None)
    assert trainer.test_task is not None and len(trainer.test_task) == trainer.config.run.eval_problems
    assert trainer.optimizer.param_groups[0]["lr"] == 1e-4


def test_a_reference_called_start_is_the_policys_model() -> None:
    config = load("addition", ["run.device=cpu", "objective=grpo + kl", "model.reference=start"])
    reference, policy = build_reference(config), build_trainer(config).policy
    assert reference is not None and reference is not policy
    pairs = zip(reference.model.parameters(), policy.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_file_task_without_held_out_problems_is_not_evaluated() -> None:
    config = load(None, ["task.name=file", "task.path=problems.jsonl"])
    assert build_task(config, "test") is None


def test_a_file_task_needs_a_path() -> None:
    with pytest.raises(ValueError, match=r"needs task\.path"):
        build_task(load(None, ["task.name=file"]), "train")
