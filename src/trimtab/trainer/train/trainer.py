"""The trainer of a run: what a training step works with, the run's progress, and what it changes in its process."""

from __future__ import annotations

import ctypes
import gc
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Concatenate, ParamSpec, TypeVar

import torch

from trimtab.data import Sampler, Task, derive_seed
from trimtab.grading import RuleErrors
from trimtab.objectives import Objective
from trimtab.own_parts import is_own
from trimtab.record import Recorder
from trimtab.trainer.config import Config
from trimtab.trainer.model import LossScale, Policy, make_optimizer, pick_device, with_shared_prompts
from trimtab.trainer.parallel import ShardedOptimizer, World
from trimtab.trainer.sampling import NativeSampler, OwnSampler
from trimtab.trainer.train.agents import AgentUse, build_agent_pool, build_agent_use
from trimtab.trainer.train.build import build_policy, build_reference, build_sampler, build_tasks
from trimtab.trainer.train.conversations import ToolUse, build_tool_use, build_tools
from trimtab.trainer.train.curriculum import Curriculum, build_curriculum
from trimtab.trainer.train.partial_rollouts import PartialRollouts
from trimtab.trainer.train.prompts import drop_long_prompts

# glibc's mallopt: which option, and its value in bytes.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = (-1, 256 << 20), (-3, 32 << 20)
SMALL_MODEL = 2_000_000  # weights, below which a model trains on one CPU thread by default

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


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
    optimizer: torch.optim.Optimizer | ShardedOptimizer
    reference: Policy | None = None
    recorder: Recorder | None = None
    rule_errors: RuleErrors = field(default_factory=RuleErrors)
    tool_use: ToolUse | None = None
    agent_use: AgentUse | None = None
    curriculum: Curriculum | None = None  # none: the uniform stream of problems
    partial: PartialRollouts | None = None  # none: every step samples its responses whole
    seen_share: float = 0.0  # of the held-out problems, that are also trained on
    world: World = field(default_factory=World)
    loss_scale: LossScale | None = None  # in fp16
    seconds: dict[str, float] = field(default_factory=dict)  # by metric, since they were taken
    _calling: bool = False  # whether the ranks that follow are in a call

    def together(
        self,
        function: Callable[Concatenate[Trainer, Arguments], Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Call a function of a module with this trainer, on rank 0 and at the same time on the ranks that follow it."""
        self.tell(function, *args, **kwargs)
        result = function(self, *args, **kwargs)
        self._calling = False
        return result

    def tell(
        self,
        function: Callable[Concatenate[Trainer, Arguments], object],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> None:
        """Have the ranks that follow call a function of a module with their trainer."""
        self._calling = True
        self.world.send((function, args, kwargs))

    def follow(self, after_each: Callable[[], object] = lambda: None) -> None:
        """Call every function that rank 0 calls, until it says that there are no more."""
        while (call := self.world.receive()) is not None:
            function, args, kwargs = call
            function(self, *args, **kwargs)
            after_each()

    def close(self) -> None:
        """End the processes of tools and agents, and let the ranks that follow end."""
        self.world.end_watch()
        # In the middle of a call they wait for something else; they end when this process does.
        if self.world.leads and not self._calling:
            self.world.send(None)
            self._calling = True
        for used in (self.tool_use, self.agent_use):
            if used is not None:
                used.close()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes to those of a metric."""
        start = time.perf_counter()
        yield
        if self.policy.device.type == "cuda":
            # Kernels run asynchronously: without this only their launch is timed.
            torch.cuda.synchronize(self.policy.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds by metric since the last call, and start over."""
        taken, self.seconds = self.seconds, {}
        if self.tool_use is not None and "time/sampling" in taken:
            taken |= self.tool_use.take_times()
            taken["time/sampling"] -= taken["time/tools"]
        if self.agent_use is not None and "time/sampling" in taken:
            taken |= self.agent_use.take_times()
            taken["time/sampling"] -= taken["time/agents"]
        return taken

    def set_learning_rate(self, step: int) -> None:
        """Set the learning rate of a step, counted from 0."""
        # Set only from the step number, so that a resumed run needs no state of a scheduler.
        scale = learning_rate_scale(self.config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.update.lr * scale

    def seed_dropout(self, phase: str, step: int) -> None:
        """Seed torch's random numbers for a step's dropout, so that a resumed run drops the same; nothing without."""
        if self.config.model.lora_dropout:
            # Each of several processes has its own responses, and needs its own masks.
            torch.manual_seed(derive_seed(phase, self.config.run.seed, step) + self.world.rank)


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


def build_trainer(
    config: Config, problems: tuple[Task, Task | None] | None = None, world: World | None = None
) -> Trainer:
    """Build the trainer of a recipe, on the problems that `build_tasks` returned or on new ones."""
    world = world or World()
    if world.parallel and config.rollout.engine == "vllm":
        # vLLM reads the same variables of the environment, and would take the trainer's processes for its own.
        raise ValueError('rollout.engine = "vllm" works in a run of one process: leave out --gpus, or use "native"')
    if config.model.shard:
        _check_shard(config, world)
    # Problems and rules before the model: what is wrong with them is then known in seconds.
    task, test_task = build_tasks(config) if problems is None else problems
    tools, agents = build_tools(config), build_agent_pool(config)
    agent_use = None
    try:
        policy, reference = build_policy(config, world=world), build_reference(config, world)
        if config.update.shared_prompts:
            policy = with_shared_prompts(policy)
            reference = None if reference is None else with_shared_prompts(reference)
        sampler, tool_use = build_sampler(policy, config.rollout), build_tool_use(config, policy, tools)
        if tool_use is not None and isinstance(sampler, OwnSampler):
            sampler.require_turns()
        agent_use = build_agent_use(config, policy, sampler, agents)
        if config.update.old_stats == "sampled":
            sampler = _with_moments(sampler, world)
        with warnings.catch_warnings():
            if not world.leads:  # rank 0 says it
                warnings.simplefilter("ignore")
            if agents is None:
                task = drop_long_prompts(policy, task, config, tool_use)
            if agents is None and test_task is not None:
                test_task = drop_long_prompts(policy, test_task, config, tool_use)
        curriculum = build_curriculum(config, task)
    except BaseException:
        for started in (tools, agent_use or agents):
            if started is not None:
                started.close()
        raise
    lag, prompts = config.rollout.max_lag, config.rollout.prompts
    return Trainer(
        curriculum=curriculum,
        partial=PartialRollouts((1 + lag) * prompts) if lag else None,
        config=config,
        policy=policy,
        sampler=sampler,
        task=task,
        test_task=test_task,
        objective=config.build_objective(),
        optimizer=make_optimizer(policy, config.update.lr, config.update.betas, config.update.weight_decay, world),
        reference=reference,
        tool_use=tool_use,
        agent_use=agent_use,
        world=world,
        loss_scale=LossScale() if config.model.precision == "fp16" else None,
    )


def _with_moments(sampler: Sampler, world: World) -> Sampler:
    """Return the sampler that has the moments of its tokens, for `update.old_stats = "sampled"`."""
    if not isinstance(sampler, NativeSampler) or world.parallel:
        where = "in several processes" if world.parallel else "on a GPU"
        raise ValueError(
            f"update.old_stats = 'sampled' is for a run of one process on a CPU, not {where}; use 'scored'"
        )
    return replace(sampler, with_moments=True)


def _check_shard(config: Config, world: World) -> None:
    """Raise if the weights cannot be split among processes."""
    if not world.parallel:
        raise ValueError(
            "model.shard = true splits the weights among the processes of a run: start it with --gpus N, or set "
            "model.shard=false"
        )
    if is_own(config.rollout.engine):
        raise ValueError(
            f'model.shard = true: rollout.engine = "{config.rollout.engine}" would sample from a part of the weights; '
            'use "native"'
        )
    if config.model.precision == "fp16":
        raise ValueError(
            'model.shard = true sums the gradients of layers in every backward pass, which model.precision = "fp16" '
            'does not support yet; use "bf16"'
        )
    if config.model.precision == "bf16" and config.rollout.precision == "fp32":
        raise ValueError(
            'model.shard = true gathers weights in model.precision = "bf16", too coarse for rollout.precision = '
            '"fp32"; leave out rollout.precision'
        )


def set_threads(config: Config, weights: int | None = None) -> None:
    """Set torch's CPU threads to `run.threads`; if that is 0, to one for a GPU or a small model, else as torch does.

    `weights` is how many the model has, once that is known.
    """
    # Beside a GPU the other threads would only spin. The operations of a small model are so short that threads mostly
    # wait for each other: on two busy cores, a decoding step of the demo model (0.12 million weights) took 22 ms with
    # two threads and 2 ms with one; of a model of 1 million, 41 ms and 7 ms. Larger models gain on an idle machine.
    one = pick_device(config.run.device).type == "cuda" or (weights is not None and weights < SMALL_MODEL)
    threads = config.run.threads or (1 if one else 0)
    if threads:
        torch.set_num_threads(threads)


def keep_freed_memory() -> None:
    """Have glibc keep the memory of freed tensors for the next ones; nothing with another C library."""
    # By default it returns large blocks to the system at once, and every page of the next tensor is a page fault: 2,000
    # to 4,000 of them, 5 to 12 ms of the 120 ms that a step of the demo model takes.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(*M_TRIM_THRESHOLD)
        mallopt(*M_MMAP_THRESHOLD)


@contextmanager
def gc_pause() -> Iterator[Callable[[], None]]:
    """Yield a function to call after each step: its first call freezes all live objects, so collections skip them.

    If somebody else has frozen objects already, nothing more is frozen, and theirs stay frozen.
    """
    # A full collection walks through everything that was ever imported, torch and transformers included: a few tenths
    # of a second in the middle of some step. What is alive after the first step stays alive for the whole run.
    ours = not gc.get_freeze_count()
    frozen = not ours

    def freeze_once() -> None:
        # Asked once, above: get_freeze_count walks through every frozen object, 0.035 s for the 360,000 of a run.
        nonlocal frozen
        if not frozen:
            gc.collect()  # or the garbage of the start would be frozen, and kept for the whole run
            gc.freeze()
            frozen = True

    try:
        yield freeze_once
    finally:
        if ours:
            gc.unfreeze()
