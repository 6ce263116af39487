"""The training loop: sample, grade, score, plan, update. One page that reads like the algorithm."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch

from trimtab import failpoints
from trimtab.config import Config
from trimtab.objectives import NotFiniteError, Objective
from trimtab.policy import Policy, UpdateOptions, UpdateResult, make_optimizer, update
from trimtab.record import Recorder
from trimtab.rollout import Sampler
from trimtab.tasks import Task
from trimtab.train.build import build_policy, build_reference, build_sampler, build_task
from trimtab.train.experience import Experience, gather_experience, with_current
from trimtab.train.gc_pause import gc_pause
from trimtab.train.metrics import fault_records, step_metrics
from trimtab.train.progress import Progress
from trimtab.train.recording import FinishedUpdate, record_step

if TYPE_CHECKING:
    from trimtab.train.run import Run


@dataclass
class Trainer:
    """Everything a step touches."""

    config: Config
    policy: Policy
    sampler: Sampler
    task: Task
    test: Task | None
    objective: Objective
    optimizer: torch.optim.Optimizer
    reference: Policy | None
    clock: dict[str, float] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)
    recorder: Recorder | None = None
    finished_updates: list[FinishedUpdate] = field(default_factory=list)

    def step(self, progress: Progress) -> dict[str, float]:
        """One step: a rollout batch and the updates on it. `progress` moves on to the next."""
        self.clock, self.finished_updates = {}, []
        with self.timed("rollout"):
            experience = gather_experience(
                self.policy,
                self.sampler,
                self.task,
                self.objective,
                self.reference,
                progress.position,
                progress.step,
                self.config,
            )
        self.objective.observe(experience.batch)
        with self.timed("update"):
            results = [self.update(experience, n, *span) for n, span in enumerate(_spans(experience.sizes))]
        if experience.fault is not None:
            results = [_refused(experience.fault)]
        progress.position = experience.position
        progress.step += 1
        self.faults = fault_records(progress.step, experience, results)
        if self.recorder is not None:
            record_step(self.recorder, progress.step, experience, self.finished_updates, self.objective)
        failpoints.failpoint("step.done")
        return step_metrics(experience, results, self.objective) | {f"time/{k}": v for k, v in self.clock.items()}

    def update(self, experience: Experience, number: int, first: int, last: int) -> UpdateResult:
        """One update on the answers `first` up to `last`, the `number`th of its step."""
        minibatch, transcripts = experience.batch.select(first, last), experience.transcripts[first:last]
        if self.config.update.token_stats == "current":
            try:
                minibatch = with_current(self.policy, minibatch, transcripts, self.config)
            except NotFiniteError as error:
                return _refused(error)
        plan = self.objective.plan(minibatch)
        failpoints.failpoint("update.planned")
        options = UpdateOptions(
            self.config.update.token_budget,
            self.config.update.head_chunk,
            self.config.rollout.temperature,
            self.config.update.max_grad_norm,
        )
        result = update(self.policy, self.optimizer, self.objective, plan, transcripts, options)
        if self.recorder is not None:
            self.finished_updates.append(FinishedUpdate(number, first, minibatch, plan, result))
        failpoints.failpoint("update.done")
        return result

    def set_learning_rate(self, step: int) -> None:
        """Constant after a linear warm-up."""
        warmup = self.config.update.warmup_steps
        scale = min(1.0, (step + 1) / warmup) if warmup else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.update.lr * scale

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Seconds spent under a name, the GPU's work included."""
        start = time.perf_counter()
        yield
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize(self.policy.device)
        self.clock[name] = self.clock.get(name, 0.0) + time.perf_counter() - start


def build_trainer(config: Config) -> Trainer:
    """The parts of a run, from its recipe."""
    task, policy = build_task(config, "train"), build_policy(config)
    assert task is not None
    betas, decay = config.update.betas, config.update.weight_decay
    return Trainer(
        config=config,
        policy=policy,
        sampler=build_sampler(policy, config.rollout),
        task=task,
        test=build_task(config, "test"),
        objective=config.build_objective(),
        optimizer=make_optimizer(policy, config.update.lr, betas, decay),
        reference=build_reference(config),
    )


def train(run: Run) -> None:
    """A whole run: warm start or resume, steps, evaluations, checkpoints."""
    with run.folder.locked():
        trainer = run.prepare()
        with closing(run.steps()) as steps, gc_pause() as settle:
            for step in steps:
                trainer.set_learning_rate(step)
                metrics = trainer.step(run.progress)
                run.finish_step(metrics)
                settle()


def _refused(error: NotFiniteError) -> UpdateResult:
    """The result of an update that could not even be planned."""
    return UpdateResult({}, taken=False, nonfinite=error.field, nonfinite_responses=error.responses)


def _spans(sizes: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(sizes, initial=0)))
