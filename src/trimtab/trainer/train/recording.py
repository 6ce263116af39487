"""Record a run's steps: open the recorder, and turn the trainer's objects into its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trimtab.objectives import Objective, Plan, TokenBatch, token_bytes
from trimtab.record import (
    RECORDS_FOLDER,
    Manifest,
    Recorder,
    RecordSettings,
    Vocabulary,
    rewind,
    update_record,
)
from trimtab.trainer.model import UpdateResult, tool_tokens
from trimtab.trainer.train.run_state import versions
from trimtab.trainer.train.scoring import Experience, Minibatch
from trimtab.trainer.train.trainer import Trainer


@dataclass(frozen=True)
class FinishedUpdate:
    """An update of the present step: its mini-batch, plan and result. Its tensors stay on the GPU until recorded."""

    minibatch: Minibatch
    plan: Plan
    result: UpdateResult


def start_recording(
    trainer: Trainer, folder: Path, step: int, *, warn: Callable[[str], None], kept: Iterable[int]
) -> Recorder | None:
    """Start the recorder of a run that continues after `step`; None if the recipe does not record.

    `kept` are steps that the size budget drops last.
    """
    config, policy = trainer.config, trainer.policy
    if not config.record.enabled:
        try:
            rewind(folder / RECORDS_FOLDER, step)
        except OSError as error:
            warn(f"warning: records after step {step} are out of date and cannot be removed: {error}")
        return None
    # `update.token_stats` is an option of the objective that recipes have in another section.
    current = {"token_stats": "current"} if trainer.objective.token_stats == "current" else {}
    manifest = Manifest(
        objective={**current, **config.objective},
        advantage=trainer.objective.advantage,
        settings=RecordSettings(config.record.every, config.record.group_share, config.record.max_megabytes),
        versions=versions(),
    )
    size = int(policy.lm_head.weight.shape[0])  # type: ignore[index]
    vocabulary, device = tokenizer_vocabulary(policy.tokenizer, size), policy.device.type
    recorder = Recorder(folder / RECORDS_FOLDER, manifest, vocabulary, warn, device=device)
    recorder.keep(kept)
    recorder.start(step)
    return recorder


def tokenizer_vocabulary(tokenizer: Any, size: int) -> Vocabulary:
    """Return the bytes of the first `size` token ids: a model may have more logits than its tokenizer has tokens."""
    try:
        text = token_bytes(range(size), tokenizer)
    except ValueError:  # a tokenizer that has no bytes of single tokens, only decoded text
        special = set(tokenizer.all_special_ids)
        known = [n for n in range(min(size, len(tokenizer))) if n not in special]
        text = {n: tokenizer.decode([n]).encode("utf-8", "replace") for n in known}
    names = dict(enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))))
    everything = [text[n] if n in text else (names.get(n) or f"<{n}>").encode() for n in range(size)]
    return Vocabulary(everything, [n not in text for n in range(size)])


def record_step(
    recorder: Recorder, step: int, experience: Experience, updates: Sequence[FinishedUpdate], objective: Objective
) -> None:
    """Record a step of the trainer; one in which nothing was planned has no record."""
    if not updates or not recorder.wants(step):
        return
    # Once per step, after its last update: copying between updates would make the GPU wait for the host.
    records = [
        update_record(
            update.minibatch.number,
            update.minibatch.first,
            update.minibatch.batch,
            update.plan,
            micro_batches=update.result.micro_batch_sizes,
            new_logp=update.result.new_logp,
            clipped=update.result.clipped,
            taken=update.result.taken,
        )
        for update in updates
    ]
    for record, update in zip(records, updates, strict=True):
        # In all updates or in none: a column that one of them lacks would be lost.
        if any(response.response.observed for response in experience.rollouts.responses):
            record.columns["tool_tokens"] = torch.from_numpy(tool_tokens(update.minibatch.transcripts))
        if experience.lags is not None:
            record.columns["version"] = torch.from_numpy(versions_of(experience, update.minibatch))
        kept = [transcript.kept.counts for transcript in update.minibatch.transcripts if transcript.kept is not None]
        if kept:
            record.columns["kept"] = torch.from_numpy(np.concatenate(kept).astype(np.int32))
    recorder.record_step(
        step,
        experience.rollouts.responses,
        records,
        observed_entropy=observed_entropy(experience.batch),
        controllers=objective.state_dict(),
    )


def versions_of(experience: Experience, minibatch: Minibatch) -> NDArray[np.int32]:
    """Return for every token of a mini-batch how many steps the weights that sampled it were trained for."""
    assert experience.lags is not None
    offsets, last = experience.batch.offsets, minibatch.first + minibatch.batch.responses
    versions: NDArray[np.int64] = experience.rollouts.step - experience.lags[offsets[minibatch.first] : offsets[last]]
    return versions.astype(np.int32)


def observed_entropy(batch: TokenBatch) -> float | None:
    """Return the mean entropy that `Objective.observe` passes to controllers."""
    if batch.entropy is None or not batch.tokens:
        return None
    # The same float64 sum as in `observe`: a replay must show its controllers this very number.
    return float(batch.entropy.sum(dtype=torch.float64)) / batch.tokens
