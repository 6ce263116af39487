"""The trainer of a run: the objects that a training step works with, built from the recipe, and the run's progress."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from trimtab.config import Config
from trimtab.objectives import Objective
from trimtab.policy import Policy, make_optimizer
from trimtab.record import Recorder
from trimtab.rewards import RuleErrors
from trimtab.rollout import OwnSampler, Sampler
from trimtab.tasks import Task, derive_seed
from trimtab.train.build import build_policy, build_reference, build_sampler, build_tasks
from trimtab.train.responses import ToolUse, build_tool_use, build_tools


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
    rule_errors: RuleErrors = field(default_factory=RuleErrors)
    tool_use: ToolUse | None = None

    def close(self) -> None:
        """End the processes of tools."""
        if self.tool_use is not None:
            self.tool_use.close()

    def set_learning_rate(self, step: int) -> None:
        """Set the learning rate of a step, counted from 0."""
        # Set from the step number alone, so that a resumed run needs no state of a scheduler.
        scale = learning_rate_scale(self.config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.update.lr * scale

    def seed_dropout(self, phase: str, step: int) -> None:
        """Seed torch's random numbers for a step's dropout, so that a resumed run drops the same; nothing without."""
        if self.config.model.lora_dropout:
            torch.manual_seed(derive_seed(phase, self.config.run.seed, step))


def learning_rate_scale(config: Config, step: int) -> float:
    """Return the factor on `update.lr` at a step, counted from 0: a linear warm-up, then `update.lr_schedule`."""
    update, end = config.update, config.decay_steps
    if step < update.warmup_steps:
        return (step + 1) / update.warmup_steps
    if end is None:
        return 1.0
    # The first step after the warm-up has the whole learning rate, and the step after the last would have the least.
    done = min(1.0, (step - update.warmup_steps) / max(1, end - update.warmup_steps))
    left = 1.0 - done if update.lr_schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return update.min_lr_ratio + (1.0 - update.min_lr_ratio) * left


def build_trainer(config: Config, problems: tuple[Task, Task | None] | None = None) -> Trainer:
    """Build the trainer of a recipe, on the problems that `build_tasks` returned or on new ones."""
    # Problems and rules before the model: what is wrong with them is then known in seconds.
    task, test_task = build_tasks(config) if problems is None else problems
    tools = build_tools(config)
    try:
        policy = build_policy(config)
        sampler, tool_use = build_sampler(policy, config.rollout), build_tool_use(config, policy, tools)
        if tool_use is not None and isinstance(sampler, OwnSampler):
            sampler.require_turns()
        reference = build_reference(config)
    except BaseException:
        if tools is not None:
            tools.close()
        raise
    return Trainer(
        config=config,
        policy=policy,
        sampler=sampler,
        task=task,
        test_task=test_task,
        objective=config.build_objective(),
        optimizer=make_optimizer(policy, config.update.lr, config.update.betas, config.update.weight_decay),
        reference=reference,
        tool_use=tool_use,
    )
