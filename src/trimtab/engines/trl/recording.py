"""The flight recorder beside TRL: each rollout batch is a step, each optimizer step of its first pass an update.

The processes' shares are brought together on the main one, in the order in which they were planned over, so that a
replay makes the same plans again. The folder has the form of a run's: `tokens/`, and `metrics.jsonl`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.engines.trl.batch import ENTROPY, REWARD, ROW, Table, trained
from trimtab.objectives import LossOutput, Objective, Plan, TokenBatch
from trimtab.policy import Policy, UpdateResult
from trimtab.record import FOLDER, Manifest, Recorder, Settings, StepData, UpdateInfo, Vocabulary
from trimtab.rewards import Verdict
from trimtab.rollout import Response
from trimtab.tasks import Problem
from trimtab.train import GradedResponse, Held, RunFolder, Trace, hold, step_data, versions, vocabulary

Gather = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class Rollouts:
    """How TRL lays out a rollout batch: updates in it, responses to a prompt, and the tokens that end one."""

    updates: int
    samples: int
    prompts: int
    ends: frozenset[int]


@dataclass(frozen=True)
class Share:
    """One process's part of an update: its columns, how it was cut, and its responses."""

    columns: dict[str, Tensor]
    parts: list[int]
    answers: list[GradedResponse]


@dataclass
class Recording:
    """The recorder of a run: `folder`, `recorder` and `words` are there on the main process alone."""

    layout: Rollouts
    objective: Objective
    device: str
    gather: Gather
    folder: RunFolder | None = None
    recorder: Recorder | None = None
    words: Vocabulary | None = None
    _wanted: bool = False
    _open: tuple[int, TokenBatch, Plan, Sequence[Table]] | None = None
    _entropy: tuple[float, int] = (0.0, 0)
    _held: list[Held] = field(default_factory=list)
    _answers: list[GradedResponse] = field(default_factory=list)
    _metrics: list[Mapping[str, float]] = field(default_factory=list)

    def begin_step(self, step: int, tables: Sequence[Table]) -> None:
        """A rollout batch has come. Whether its tokens are recorded is decided on the main process, for all."""
        wants = self.recorder is not None and self.recorder.wants(step)
        values = torch.cat([table[ENTROPY][trained(table)] for table in tables])
        mine = (float(values.sum(dtype=torch.float64)), len(values))
        shares = self.gather([(wants, mine)])
        self._wanted = shares[0][0]
        self._entropy = sum(s[1][0] for s in shares), sum(s[1][1] for s in shares)
        self._held, self._answers, self._metrics = [], [], []

    def begin(self, update: int, batch: TokenBatch, plan: Plan, tables: Sequence[Table]) -> None:
        """An update has been planned."""
        self._open = (update, batch, plan, tables) if update < self.layout.updates else None

    def finish(self, step: int, outputs: Sequence[tuple[LossOutput, Tensor]], metrics: Mapping[str, float]) -> None:
        """All forward passes of the update are done; with the last one of a step, the step is written."""
        if self._open is None:
            return
        update, batch, plan, tables = self._open
        self._open = None
        self._metrics.append(metrics)
        if self._wanted:
            parts = [len(table["completion_ids"]) for table in tables]
            held = hold(Trace(update, 0, batch, plan, _result(outputs)), parts)
            answers = [answer for table in tables for answer in self._table_answers(step, table)]
            shares = self.gather([Share(held.columns, parts, answers)])
            if self.recorder is not None:
                self._held.append(joined(update, len(self._answers), shares))
                self._answers += [answer for share in shares for answer in share.answers]
        if update + 1 == self.layout.updates:
            self._write(step)

    def flush(self) -> None:
        """Wait until everything is on the disk."""
        if self.recorder is not None and self.folder is not None:
            self.recorder.flush()
            self.folder.settle()

    def close(self) -> None:
        """Write what is waiting, and end."""
        if self.recorder is not None:
            self.recorder.close()

    def _write(self, step: int) -> None:
        if self.recorder is None or self.folder is None or self.words is None:
            return
        entropy, tokens = self._entropy
        observed = entropy / tokens if tokens else None
        names = {name: None for metrics in self._metrics for name in metrics}
        means = {name: _mean([m[name] for m in self._metrics if name in m]) for name in names}
        facts = {"tokens/count": float(tokens)} | ({} if observed is None else {"policy/entropy": observed})
        self.folder.append({"step": step, **means, **facts})
        if not self._wanted:
            return
        held, answers, words = self._held, self._answers, self.words
        known: dict[str, Any] = {
            "observed_entropy": observed,
            "controllers": self.objective.state_dict(),
            "device": self.device,
            "threads": torch.get_num_threads(),
        }

        def build() -> StepData:
            data = step_data(step, answers, held, [True] * len(answers), words)
            return replace(data, info=replace(data.info, **known))

        self.recorder.write(step, build)

    def _table_answers(self, step: int, table: Table) -> list[GradedResponse]:
        """The responses of a micro-batch; their tokens are those that are trained on."""
        mask, read = trained(table), table["prompt_mask"].bool()
        answers = []
        for n, (row, reward) in enumerate(zip(table[ROW].tolist(), table[REWARD].nan_to_num().tolist(), strict=True)):
            tokens = table["completion_ids"][n][mask[n]].tolist()
            finished = bool(tokens) and tokens[-1] in self.layout.ends
            group = (step - 1) * self.layout.prompts + row // self.layout.samples
            answers.append(
                GradedResponse(
                    problem=Problem((), "", "", "trl"),
                    prompt=table["prompt_ids"][n][read[n]].tolist(),
                    response=Response(tokens, [], finished, sample=row % self.layout.samples),
                    text="",
                    verdict=Verdict("correct" if reward > 0 else "wrong"),
                    reward=reward,
                    group=group,
                )
            )
        return answers


def start_recording(
    to: Path,
    step: int,
    table: Mapping[str, Any],
    recording: Recording,
    policy: Policy,
    settings: Settings,
    main: bool,
) -> Recording:
    """The recording of a run that goes on after `step`; its files are the main process's."""
    if not main:
        return recording
    if not step and (to / FOLDER).exists():
        raise ValueError(f"record_to={str(to)!r} holds the records of another run: choose another folder, or remove it")
    folder, words = RunFolder(to), vocabulary(policy)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.rewind(step)
    manifest = Manifest(dict(table), recording.objective.advantage, settings, versions=versions())
    recorder = Recorder(to / FOLDER, manifest, lambda text: warnings.warn(text, stacklevel=2))
    recorder.start(words, step)
    return replace(recording, folder=folder, recorder=recorder, words=words)


def joined(update: int, first: int, shares: Sequence[Share]) -> Held:
    """An update of all processes from their shares, in rank order."""
    for share in shares:  # left out by a process whose advantages were planned as they came
        share.columns.setdefault("planned_advantage", share.columns["advantage"])
    columns = {name: torch.cat([share.columns[name] for share in shares]) for name in shares[0].columns}
    responses = [len(share.answers) for share in shares]
    before = torch.tensor([0, *accumulate(responses)][:-1]).repeat_interleave(
        torch.tensor([len(share.columns["sequence"]) for share in shares])
    )
    columns["sequence"] += before
    if torch.equal(columns["planned_advantage"], columns["advantage"]):
        del columns["planned_advantage"]
    parts = [size for share in shares for size in share.parts]
    return Held(UpdateInfo(update, sum(responses), len(columns["old_logp"]), True, parts), first, columns)


def _result(outputs: Sequence[tuple[LossOutput, Tensor]]) -> UpdateResult:
    clipped = [out.clipped for out, _ in outputs if out.clipped is not None]
    return UpdateResult(
        {},
        new_logp=torch.cat([new_logp for _, new_logp in outputs]).float(),
        clipped=torch.cat(clipped) if clipped else None,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
