"""The ranks of a run as threads of one process: a world whose exchanges meet at a barrier instead of a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trimtab.objectives import Plan, TokenBatch
from trimtab.trainer.config import Config
from trimtab.trainer.parallel import LostProcessError, ShardedOptimizer, World
from trimtab.trainer.train import loop
from trimtab.trainer.train.scoring import Experience
from trimtab.trainer.train.trainer import RunProgress, Trainer, build_trainer

HANG = 120.0  # seconds after which a rank that waits is taken for hung


class Meeting:
    """Where the ranks of one world leave and take values."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=HANG)
        self.values: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Leave a value, and return those of all ranks."""
        try:
            self.values[rank] = value
            self.barrier.wait()
            values = list(self.values)
            self.barrier.wait()  # nobody leaves the next value before all have taken these
        except threading.BrokenBarrierError:
            raise LostProcessError("another thread has ended") from None
        return values


@dataclass(frozen=True)
class ThreadWorld(World):
    """One rank's view of a world of threads."""

    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def gather(self, value: Any) -> list[Any]:
        return self.meeting.exchange(self.rank, value)

    def collect(self, value: Any) -> list[Any]:
        values = self.meeting.exchange(self.rank, value)
        return values if self.leads else []

    def gather_columns(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        parts = self.meeting.exchange(self.rank, own.clone())
        assert [part.shape[-1] for part in parts] == list(counts)
        return torch.cat(parts, dim=-1)

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(sum(self.meeting.exchange(self.rank, tensor.clone())))

    def reduce_scatter(self, flat: Tensor) -> Tensor:
        own = slice(self.rank * (len(flat) // self.size), (self.rank + 1) * (len(flat) // self.size))
        parts = self.meeting.exchange(self.rank, flat.clone())
        return torch.stack([part[own] for part in parts]).sum(0)

    def all_gather(self, whole: Tensor, own: Tensor) -> None:
        whole.copy_(torch.cat(self.meeting.exchange(self.rank, own.clone())))

    def send(self, call: object) -> None:
        self.meeting.exchange(self.rank, call)

    def receive(self) -> Any:
        return self.meeting.exchange(self.rank, None)[0]


def thread_worlds(size: int) -> list[World]:
    """Return the worlds of `size` ranks; the world of one rank exchanges nothing."""
    meeting = Meeting(size)
    return [World()] if size == 1 else [ThreadWorld(rank, size, parallel=True, meeting=meeting) for rank in range(size)]


def on_ranks(worlds: Sequence[World], function: Callable[[int], Any]) -> list[Any]:
    """Call a function with every rank in threads; return the results, or raise the first error of a rank."""
    results: list[Any] = [None] * len(worlds)
    errors: list[BaseException | None] = [None] * len(worlds)

    def work(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as error:
            errors[rank] = error
            if isinstance(world := worlds[rank], ThreadWorld):
                world.meeting.barrier.abort()  # the others wait for nobody now

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(1, len(worlds))]
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join()
    raised = [error for error in errors if error is not None]
    for error in sorted(raised, key=lambda error: isinstance(error, LostProcessError)):  # its cause comes first
        raise error
    return results


@dataclass
class Trained:
    """What one rank saw and had after some steps."""

    trainer: Trainer
    progress: RunProgress
    start: Tensor = field(default_factory=lambda: torch.zeros(0))  # the weights before the first step
    tokens: list[Any] = field(default_factory=list)  # of every step: prompt's number, response's tokens and reward
    metrics: list[dict[str, float]] = field(default_factory=list)  # of every step
    seen: list[tuple[str, TokenBatch]] = field(default_factory=list)  # `observe` of a step, then `plan` of its updates
    plans: list[Plan] = field(default_factory=list)  # of every update

    @property
    def weights(self) -> Tensor:
        """All trained weights, end to end."""
        return torch.cat([p.detach().flatten() for p in self.trainer.policy.model.parameters() if p.requires_grad])


def train_ranks(
    config: Config,
    size: int,
    steps: int,
    prepare: Callable[[Trainer], object] = lambda trainer: None,
    plans: Sequence[Plan] = (),
) -> list[Trained]:
    """Train with `size` ranks as threads, each with a trainer of its own, and return what every rank has.

    `plans`, if any, are taken instead of those that the ranks make.
    """
    torch.set_num_threads(1)
    worlds = thread_worlds(size)
    # One after the other: torch's random numbers belong to the process.
    ranks = [Trained(build_trainer(config, world=world), RunProgress()) for world in worlds]
    for rank in ranks:
        prepare(rank.trainer)
        rank.start = rank.weights

    def work(number: int) -> None:
        rank = ranks[number]
        rank.metrics += [loop.scheduled_step(rank.trainer, rank.progress).metrics for _ in range(steps)]

    try:
        with _watched(ranks, plans):
            on_ranks(worlds, work)
    finally:
        for rank in ranks:
            if rank.trainer.tool_use is not None:
                rank.trainer.tool_use.close()
    return ranks


@contextmanager
def _watched(ranks: Sequence[Trained], plans: Sequence[Plan]) -> Iterator[None]:
    """Keep the tokens, batches and plans of every rank in the block; put in `plans`, if any."""
    by_trainer = {id(rank.trainer): rank for rank in ranks}
    by_policy = {id(rank.trainer.policy): rank for rank in ranks}
    before = loop.score_rollouts, loop.update_policy, loop.update

    def score(trainer: Trainer, rollouts: Any) -> Experience:
        rank, experience = by_trainer[id(trainer)], before[0](trainer, rollouts)
        rank.tokens.append(
            [(r.group, r.response.sample, r.response.tokens.tolist(), r.reward) for r in rollouts.responses]
        )
        rank.seen.append(("observe", experience.batch))
        return experience

    def update_policy(trainer: Trainer, minibatch: Any, finished: Any) -> Any:
        by_trainer[id(trainer)].seen.append(("plan", minibatch.batch))
        return before[1](trainer, minibatch, finished)

    def update(policy: Any, optimizer: Any, objective: Any, plan: Plan, *rest: Any) -> Any:
        rank = by_policy[id(policy)]
        plan = plans[len(rank.plans)] if plans else plan
        rank.plans.append(plan)
        return before[2](policy, optimizer, objective, plan, *rest)

    loop.score_rollouts, loop.update_policy, loop.update = score, update_policy, update
    try:
        yield
    finally:
        loop.score_rollouts, loop.update_policy, loop.update = before


def use_sgd(trainer: Trainer, lr: float = 0.05) -> None:
    """Train with plain SGD, whose steps are as long as the gradient: AdamW hides a factor."""

    def sgd(parameters: Any) -> torch.optim.SGD:
        return torch.optim.SGD(parameters, lr=lr)

    parameters = [p for p in trainer.policy.model.parameters() if p.requires_grad]
    several = trainer.world.parallel
    trainer.optimizer = ShardedOptimizer(parameters, trainer.world, sgd) if several else sgd(parameters)


def plan_tensors(plan: Plan) -> dict[str, Tensor]:
    """Return every tensor of a plan by name."""
    return {name: value for name, value in vars(plan).items() if isinstance(value, Tensor)}
