"""The flight recorder beside TRL: a rollout batch is a step, an optimizer step of its first pass is an update.

The columns of all processes are gathered on the main one in the order in which they were planned, so that a replay
makes the same plans. The folder is laid out like a run's: `tokens/` and `metrics.jsonl`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor

from trimtab.data import Problem, Response, Sample
from trimtab.engines import common
from trimtab.engines.trl.padded import (
    RESPONSE_INDEX,
    REWARD,
    REWARDS,
    PaddedBatch,
    sampled_mask,
    sampled_positions,
    token_batch,
)
from trimtab.grading import Verdict
from trimtab.objectives import LossOutput, Objective, Plan, TokenBatch
from trimtab.record import (
    Manifest,
    Recorder,
    UpdateRecord,
    Vocabulary,
    join_ranks,
    update_record,
)
from trimtab.trainer.train import AlarmHandler, MetricsLog, RunFolder, token_signals


@dataclass(frozen=True)
class RolloutShape:
    """The shape of TRL's rollout batch: updates on it, samples per prompt, prompts, and the ids that end a response.

    `rewards` has the names of the reward functions, and `weights` their weights.
    """

    updates: int
    samples: int
    prompts: int
    end_tokens: frozenset[int]
    rewards: Sequence[str]
    weights: Sequence[float]


@dataclass(frozen=True)
class PlannedUpdate:
    """An update whose forward passes are under way: its number in the step, mini-batch, plan and micro-batches."""

    number: int
    batch: TokenBatch
    plan: Plan
    micro_batches: Sequence[PaddedBatch]


@dataclass
class TrlRecording:
    """Collect the updates of a rollout batch and record them; `recorder` exists on the main process alone."""

    shape: RolloutShape
    objective: Objective
    gather: Callable[[list[Any]], list[Any]]
    recorder: Recorder | None
    alarms: AlarmHandler | None = None
    metrics_log: MetricsLog | None = field(init=False)
    _full: bool = False  # whether the disk was at the last step
    _wanted: bool = False
    _planned: PlannedUpdate | None = None
    _facts: dict[str, float] = field(default_factory=dict)  # of the rollout batch
    _due: int = 0  # the step whose metrics wait for the optimizer step
    _updates: list[UpdateRecord] = field(default_factory=list)
    _samples: list[Sample] = field(default_factory=list)
    _metrics: list[Mapping[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        folder = self.recorder and RunFolder(self.recorder.folder.parent)
        self.metrics_log = MetricsLog(folder) if folder else None

    def begin_step(self, step: int, micro_batches: Sequence[PaddedBatch]) -> None:
        """Start a rollout batch. The main process decides for all whether its tokens are recorded."""
        wants = self.recorder is not None and self.recorder.wants(step)
        batch = token_batch(micro_batches, self.objective)
        signals = {name: float(value) for name, value in token_signals(batch).items()}
        graded = [response for each in micro_batches for response in graded_responses(each, self.shape)]
        assert batch.entropy is not None
        sums = (float(batch.entropy.sum(dtype=torch.float64)), batch.tokens, signals)
        # All processes must agree: those that take part in `gather` later wait for each other.
        ranks = self.gather([(wants, sums, graded)])
        self._wanted = ranks[0][0]
        responses = [response for _, _, each in ranks for response in each]
        self._facts = rollout_metrics([each for _, each, _ in ranks], responses, self.shape)
        self._updates, self._samples, self._metrics = [], [], []

    def begin_update(self, update: PlannedUpdate) -> None:
        """Note an update that has been planned. Later passes over the same rollout batch are not recorded."""
        self._planned = update if update.number < self.shape.updates else None

    def finish_update(
        self, step: int, outputs: Sequence[tuple[LossOutput, Tensor]], metrics: Mapping[str, float]
    ) -> None:
        """Add an update whose forward passes are done; the last update of a step writes the step."""
        if self._planned is None:
            return
        planned, self._planned = self._planned, None
        self._metrics.append(metrics)
        if self._wanted:
            clipped = [out.clipped for out, _ in outputs if out.clipped is not None]
            local = update_record(
                planned.number,
                0,
                planned.batch,
                planned.plan,
                micro_batches=[len(batch["completion_ids"]) for batch in planned.micro_batches],
                new_logp=torch.cat([new_logp for _, new_logp in outputs]).float(),  # a model in bf16 returns bf16
                clipped=torch.cat(clipped) if clipped else None,
            )
            # With tools, in every update of every process: a column that one of them lacks would be lost.
            if all(batch.get("tool_mask") is not None for batch in planned.micro_batches):
                spans = [common.tool_tokens(*sampled_positions(batch)) for batch in planned.micro_batches]
                local.columns["tool_tokens"] = torch.cat(spans)
            recorded = [s for batch in planned.micro_batches for s in samples(step, batch, self.shape)]
            # In rank order, which is the order in which the plan saw the responses.
            ranks = self.gather([(local, recorded)])
            if self.recorder is not None:
                self._updates.append(join_ranks([update for update, _ in ranks], len(self._samples)))
                self._samples += [sample for _, rank in ranks for sample in rank]
        if planned.number + 1 == self.shape.updates and self.recorder is not None:
            self._due = step
            if self._wanted:
                observed, state = self._facts.get("policy/entropy"), self.objective.state_dict()
                self.recorder.record_step(
                    step, self._samples, self._updates, observed_entropy=observed, controllers=state
                )

    def finish_optimizer_step(self, grad_norm: float | None, lr: float) -> None:
        """Add what TRL knows after its optimizer step; the last one of a step writes the metrics of the step."""
        if self._metrics and "update/lr" not in self._metrics[-1]:
            norm = {} if grad_norm is None else {"update/grad_norm": grad_norm}
            self._metrics[-1] = {**self._metrics[-1], **norm, "update/lr": lr}
        if self._due and self.recorder is not None:
            self._write(self._due)

    def flush(self) -> None:
        """Wait until everything is on disk."""
        if self.recorder is not None:
            self.recorder.flush()
            RunFolder(self.recorder.folder.parent).sync()

    def close(self) -> None:
        """Write what is queued and end the recorder."""
        if self.recorder is not None:
            if self._due:
                self._write(self._due)
            self.recorder.close()

    def _write(self, step: int) -> None:
        self._due = 0
        names = {name: None for metrics in self._metrics for name in metrics}
        found = {name: [metrics[name] for metrics in self._metrics if name in metrics] for name in names}
        means = {name: sum(values) / len(values) for name, values in found.items()}
        record = {"step": step, **means, **self._facts}
        assert self.metrics_log is not None
        problem = self.metrics_log.append(record)
        if problem and not self._full:
            warnings.warn(f"{self.metrics_log.folder.metrics}: {problem}", stacklevel=2)
        self._full = bool(problem)
        if self.alarms is not None:
            self.alarms.handle(record)


def start_recorder(to: Path, step: int, manifest: Manifest, vocabulary: Vocabulary, device: str) -> Recorder:
    """Open the files of a run that continues after `step`; for the main process alone."""
    common.require_unused(to, step, "record")
    to.mkdir(parents=True, exist_ok=True)
    RunFolder(to).rewind(step, lambda problem: warnings.warn(problem, stacklevel=2))
    return common.start_recorder("trl", to, step, manifest, vocabulary, device)


@dataclass(frozen=True)
class TrlGraded:
    """What metrics need of a response: its place in the rollout batch, its rewards by function, its tokens."""

    index: int
    reward: float
    rewards: dict[str, float]  # without those of functions that did not grade it
    tokens: int
    finished: bool
    first: str

    @property
    def verdict(self) -> Verdict | None:
        """Return the verdict by the first reward function; None if it did not grade."""
        score = self.rewards.get(self.first)
        return None if score is None else common.verdict_of_score(score)


def graded_responses(batch: PaddedBatch, shape: RolloutShape) -> list[TrlGraded]:
    """Return the responses of a micro-batch with their rewards."""
    mask, lengths = sampled_mask(batch), batch["completion_mask"].sum(1)
    last = (lengths - 1).clamp(min=0)[:, None]
    # A response that ends with the reply of a tool was cut there, though its last sampled token ended a turn.
    answered = mask.gather(1, last).squeeze(1) & (lengths > 0)
    # Whole columns: a value by itself would make the host wait for the GPU.
    index, reward, by_function = (batch[name].tolist() for name in (RESPONSE_INDEX, REWARD, REWARDS))
    end, tokens = batch["completion_ids"].gather(1, last).squeeze(1).tolist(), mask.sum(1).tolist()
    return [
        TrlGraded(
            index=index[row],
            reward=0.0 if isnan(reward[row]) else reward[row],
            rewards={name: v for name, v in zip(shape.rewards, by_function[row], strict=True) if not isnan(v)},
            tokens=tokens[row],
            finished=was_answered and end[row] in shape.end_tokens,
            first=shape.rewards[0],
        )
        for row, was_answered in enumerate(answered.tolist())
    ]


def rollout_metrics(
    ranks: Sequence[tuple[float, int, Mapping[str, float]]], graded: Sequence[TrlGraded], shape: RolloutShape
) -> dict[str, float]:
    """Return the metrics of a rollout batch, as trimtab's own trainer logs them."""
    tokens = sum(count for _, count, _ in ranks)
    metrics = {"tokens/count": float(tokens)}
    if tokens:
        metrics["policy/entropy"] = sum(entropy for entropy, _, _ in ranks) / tokens
        for name in ("tokens/spurious_share", "response/repetition_share"):  # medians of ranks do not add up
            metrics[name] = sum(count * signals.get(name, 0.0) for _, count, signals in ranks) / tokens
    scores = [one.rewards[one.first] for one in graded if one.first in one.rewards]
    if scores:
        metrics["reward/score"] = fmean(scores)
        metrics["reward/accuracy"] = fmean(one.verdict.kind == "correct" for one in graded if one.verdict)
    groups: dict[int, list[TrlGraded]] = {}
    for one in graded:
        groups.setdefault(one.index // shape.samples, []).append(one)
    metrics["groups/mixed_share"] = fmean(len({one.reward for one in group}) > 1 for group in groups.values())
    metrics["response/length_mean"] = fmean(one.tokens for one in graded)
    metrics["response/truncated_share"] = fmean(not one.finished for one in graded)
    for name, weight in zip(shape.rewards, shape.weights, strict=True) if len(shape.rewards) > 1 else ():
        by_group = [[one.rewards[name] for one in group if name in one.rewards] for group in groups.values()]
        if values := [value for group in by_group for value in group]:
            metrics[f"rewards/{name}"] = fmean(values)
            metrics[f"rewards/{name}_spread"] = fmean(pstdev(weight * v for v in group) for group in by_group if group)
    return metrics


def samples(step: int, batch: PaddedBatch, shape: RolloutShape) -> list[Sample]:
    """Return the responses of a micro-batch as samples."""
    mask, prompt_mask = sampled_mask(batch).cpu(), batch["prompt_mask"].bool()
    lengths = batch["completion_mask"].sum(1).tolist()
    found = []
    for row, graded in enumerate(graded_responses(batch, shape)):
        ids = batch["completion_ids"][row][: lengths[row]].cpu().numpy()
        observed = common.observed_spans(mask[row][: lengths[row]])
        found.append(
            Sample(
                Problem((), "", "", "trl"),
                prompt=batch["prompt_ids"][row][prompt_mask[row]].tolist(),
                response=Response(ids, (), graded.finished, graded.index % shape.samples, observed),
                group=(step - 1) * shape.prompts + graded.index // shape.samples,
                verdict=graded.verdict,  # type: ignore[arg-type]
                reward=graded.reward,
                terms=graded.rewards if len(shape.rewards) > 1 else {},
            )
        )
    return found
