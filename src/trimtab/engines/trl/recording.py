"""The flight recorder beside TRL: a rollout batch is a step, an optimizer step of its first pass is an update.

The columns of all processes are gathered on the main one in the order in which they were planned, so that a replay
makes the same plans. The folder is laid out like a run's: `tokens/` and `metrics.jsonl`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.engines import common
from trimtab.engines.trl.padded import ENTROPY, RESPONSE_INDEX, REWARD, PaddedBatch, sampled_mask, sampled_positions
from trimtab.objectives import LossOutput, Objective, Plan, TokenBatch
from trimtab.record import (
    Manifest,
    RecordedResponse,
    Recorder,
    UpdateRecord,
    Vocabulary,
    join_ranks,
    update_record,
)
from trimtab.train import RunFolder


@dataclass(frozen=True)
class RolloutShape:
    """The shape of TRL's rollout batch: updates on it, samples per prompt, prompts, and the ids that end a response."""

    updates: int
    samples: int
    prompts: int
    end_tokens: frozenset[int]


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
    _wanted: bool = False
    _planned: PlannedUpdate | None = None
    _entropy: tuple[float, int] = (0.0, 0)
    _updates: list[UpdateRecord] = field(default_factory=list)
    _responses: list[RecordedResponse] = field(default_factory=list)
    _metrics: list[Mapping[str, float]] = field(default_factory=list)

    def begin_step(self, step: int, micro_batches: Sequence[PaddedBatch]) -> None:
        """Start a rollout batch. The main process decides for all whether its tokens are recorded."""
        wants = self.recorder is not None and self.recorder.wants(step)
        values = torch.cat([batch[ENTROPY][sampled_mask(batch)] for batch in micro_batches])
        ranks = self.gather([(wants, float(values.sum(dtype=torch.float64)), len(values))])
        # All processes must agree: those that take part in `gather` later wait for each other.
        self._wanted = ranks[0][0]
        self._entropy = sum(total for _, total, _ in ranks), sum(tokens for _, _, tokens in ranks)
        self._updates, self._responses, self._metrics = [], [], []

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
            responses = [r for batch in planned.micro_batches for r in recorded_responses(step, batch, self.shape)]
            # In rank order, which is the order in which the plan saw the responses.
            ranks = self.gather([(local, responses)])
            if self.recorder is not None:
                self._updates.append(join_ranks([update for update, _ in ranks], len(self._responses)))
                self._responses += [response for _, rank in ranks for response in rank]
        if planned.number + 1 == self.shape.updates and self.recorder is not None:
            self._write(step, self.recorder)

    def flush(self) -> None:
        """Wait until everything is on disk."""
        if self.recorder is not None:
            self.recorder.flush()
            RunFolder(self.recorder.folder.parent).sync()

    def close(self) -> None:
        """Write what is queued and end the recorder."""
        if self.recorder is not None:
            self.recorder.close()

    def _write(self, step: int, recorder: Recorder) -> None:
        entropy, tokens = self._entropy
        observed = entropy / tokens if tokens else None
        names = {name: None for metrics in self._metrics for name in metrics}
        found = {name: [metrics[name] for metrics in self._metrics if name in metrics] for name in names}
        means = {name: sum(values) / len(values) for name, values in found.items()}
        facts = {"tokens/count": float(tokens)} | ({} if observed is None else {"policy/entropy": observed})
        RunFolder(recorder.folder.parent).append_metrics({"step": step, **means, **facts})
        if self._wanted:
            state = self.objective.state_dict()
            recorder.record_step(step, self._responses, self._updates, observed_entropy=observed, controllers=state)


def start_recorder(to: Path, step: int, manifest: Manifest, vocabulary: Vocabulary, device: str) -> Recorder:
    """Open the files of a run that continues after `step`; for the main process alone."""
    common.require_unused(to, step, "record_to")
    to.mkdir(parents=True, exist_ok=True)
    RunFolder(to).rewind(step, lambda problem: warnings.warn(problem, stacklevel=2))
    return common.start_recorder("trl", to, step, manifest, vocabulary, device)


def recorded_responses(step: int, batch: PaddedBatch, shape: RolloutShape) -> list[RecordedResponse]:
    """Return the responses of a micro-batch; their tokens are those that are trained on."""
    mask, prompt_mask = sampled_mask(batch), batch["prompt_mask"].bool()
    lengths = batch["completion_mask"].sum(1).tolist()
    indices, rewards = batch[RESPONSE_INDEX].tolist(), batch[REWARD].nan_to_num().tolist()
    responses = []
    for row, (index, reward) in enumerate(zip(indices, rewards, strict=True)):
        ids, sampled = batch["completion_ids"][row][: lengths[row]], mask[row][: lengths[row]]
        tokens = ids[sampled].tolist()
        # A response that ends with the reply of a tool was cut there, though its last sampled token ended a turn.
        answered = bool(tokens) and bool(mask[row, lengths[row] - 1])
        responses.append(
            RecordedResponse(
                prompt=batch["prompt_ids"][row][prompt_mask[row]].tolist(),
                tokens=tokens,
                group=(step - 1) * shape.prompts + index // shape.samples,
                sample=index % shape.samples,
                reward=reward,
                verdict="correct" if reward > 0 else "wrong",  # TRL's reward functions return numbers alone
                finished=answered and tokens[-1] in shape.end_tokens,
                source="trl",
                observations=common.observations(ids.tolist(), sampled.tolist()),
            )
        )
    return responses
