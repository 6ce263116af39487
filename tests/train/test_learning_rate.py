"""Learning-rate schedules: constant, linear and cosine, each after a warm-up, by the step number alone."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from helpers.train.short_runs import contents, differences, recipe, trained
from trimtab.trainer.config import load
from trimtab.trainer.train.run_folder import RunFolder
from trimtab.trainer.train.trainer import build_trainer, learning_rate_scale


def scales(*settings: str, steps: int = 8) -> list[float]:
    config = load(None, [f"run.steps={steps}", *settings])
    return [learning_rate_scale(config, step) for step in range(steps)]


def test_a_constant_learning_rate_is_the_recipes_own_number() -> None:
    assert scales() == [1.0] * 8
    assert scales("update.warmup_steps=4") == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_a_linear_schedule_reaches_its_least_after_the_last_step() -> None:
    assert scales("update.lr_schedule=linear", steps=4) == [1.0, 0.75, 0.5, 0.25]
    warmed = scales("update.lr_schedule=linear", "update.warmup_steps=2", "update.min_lr_ratio=0.2", steps=6)
    assert warmed == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4])


def test_a_cosine_schedule_is_half_way_down_in_the_middle() -> None:
    found = scales("update.lr_schedule=cosine", steps=4)
    assert found == pytest.approx([1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2])


def test_after_the_decay_the_learning_rate_stays_at_its_least() -> None:
    settings = ["update.lr_schedule=linear", "update.decay_steps=4", "update.min_lr_ratio=0.5"]
    assert scales(*settings, steps=6) == [1.0, 0.875, 0.75, 0.625, 0.5, 0.5]


def test_the_optimizer_gets_the_learning_rate_of_the_step() -> None:
    trainer = build_trainer(load(None, ["run.device=cpu", "update.lr=1e-3", "update.warmup_steps=4"]))
    rates = []
    for step in range(6):
        trainer.set_learning_rate(step)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["update.lr_schedule=linaer"], "must be one of 'constant', 'linear' or 'cosine'; did you mean 'linear'"),
        (["update.decay_steps=5"], "update.lr_schedule = 'constant': set it to 'linear' or 'cosine'"),
        (
            ["update.lr_schedule=cosine", "run.steps=4", "update.warmup_steps=4"],
            "leaves no step",
        ),
        (["update.lr_schedule=cosine", "update.min_lr_ratio=1.5"], "update.min_lr_ratio = 1.5: must be at most 1"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_an_error(settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(None, settings)


def test_a_resumed_run_goes_on_with_its_schedule(tmp_path: Path) -> None:
    changes = {"update.lr_schedule": "cosine", "update.warmup_steps": "1", "run.steps": "4"}
    run, _ = trained(tmp_path / "run", changes)
    whole = contents(run.folder.path)
    rates = [record["update/lr"] for record in run.folder.records() if record["step"]]
    assert rates == [recipe(changes).update.lr * learning_rate_scale(recipe(changes), step) for step in range(4)]
    shutil.rmtree(run.folder.checkpoints / "step-00000004")
    trained(tmp_path / "run", changes, resume=True)
    assert not differences(contents(run.folder.path), whole)


def test_more_steps_on_resume_do_not_stretch_a_schedule_without_a_word(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.create(load(None, ["update.lr_schedule=linear", "run.steps=4"]))
    with pytest.raises(ValueError, match=r"update\.decay_steps: 4 -> 8"):
        folder.check_recipe(load(None, ["update.lr_schedule=linear", "run.steps=8"]))
    folder.check_recipe(load(None, ["update.lr_schedule=linear", "run.steps=8", "update.decay_steps=4"]))
