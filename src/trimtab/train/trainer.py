"""The trainer of a run: the objects that a training step works with, built from the recipe, and the run's progress."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab.config import Config
from trimtab.objectives import Objective
from trimtab.policy import Policy, make_optimizer
from trimtab.record import Recorder
from trimtab.rollout import Sampler
from trimtab.tasks import Task
from trimtab.train.build import build_policy, build_reference, build_sampler, build_task


@dataclass
class RunProgress:
    """How far a run has come, as its checkpoints store it.

    `step` counts finished steps; `position` is where the next step starts in the endless stream of prompts.
    """

    step: int = 0
    position: int = 0
    steps_without_signal: int = 0
    updates_skipped: int = 0


@dataclass
class Trainer:
    """Everything a training step works with."""

    config: Config
    policy: Policy
    sampler: Sampler
    task: Task
    test_task: Task | None
    objective: Objective
    optimizer: torch.optim.Optimizer
    reference: Policy | None = None
    recorder: Recorder | None = None

    def set_learning_rate(self, step: int) -> None:
        """Set the learning rate of a step: constant after a linear warm-up."""
        warmup = self.config.update.warmup_steps
        # Set from the step number alone, so that a resumed run needs no state of a scheduler.
        scale = min(1.0, (step + 1) / warmup) if warmup else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.update.lr * scale


def build_trainer(config: Config) -> Trainer:
    """Build the trainer of a recipe."""
    task, policy = build_task(config, "train"), build_policy(config)
    assert task is not None  # only held-out problems may be missing
    return Trainer(
        config=config,
        policy=policy,
        sampler=build_sampler(policy, config.rollout),
        task=task,
        test_task=build_task(config, "test"),
        objective=config.build_objective(),
        optimizer=make_optimizer(policy, config.update.lr, config.update.betas, config.update.weight_decay),
        reference=build_reference(config),
    )
