"""The recorder of a run: our trainer, TRL and verl hand their steps to it.

They copy the columns of an update to host memory (`update_record`) when a step ends. The tables of the step are built
from these and from its samples in the writer's thread.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from trimtab.record.conversation import calls_json, cut, observations_json
from trimtab.record.layout import StepInfo, UpdateInfo
from trimtab.record.schema import FROM_BATCH, FROM_PLAN, Vocabulary
from trimtab.record.writer import RecordWriter, StepData

if TYPE_CHECKING:  # reading records needs no torch, so nothing here imports it before a trainer calls
    from torch import Tensor

    from trimtab.data import Sample
    from trimtab.objectives import Plan, TokenBatch

MAX_CONTEXT = 100_000  # characters of a branch's context: later branches repeat what earlier ones have


@dataclass(kw_only=True)
class Recorder(RecordWriter):
    """Build and write the tables of a run's steps; plans are made on `device`."""

    device: str = "cpu"

    def record_step(
        self,
        step: int,
        samples: Sequence[Sample],
        updates: Sequence[UpdateRecord],
        *,
        observed_entropy: float | None,
        controllers: Mapping[str, dict[str, float]],
    ) -> None:
        """Record a step. Tables are built and written in the writer's thread; nothing happens for an unwanted step."""
        import torch

        # Read now: the tables are built later, in another thread, when the next step has begun.
        facts: dict[str, Any] = {"observed_entropy": observed_entropy, "controllers": controllers}
        facts |= {"device": self.device, "threads": torch.get_num_threads()}

        def build() -> StepData:
            selected = select_groups(samples, self.manifest.settings.group_share)
            data = step_data(step, samples, updates, selected, self.vocabulary)
            return replace(data, info=replace(data.info, **facts))

        self.write(step, build)


@dataclass(frozen=True)
class UpdateRecord:
    """One update: its columns in host memory, and which responses of the step they belong to.

    `first_response` counts over the step's responses. `columns` has `sequence` (which response of the update a token
    belongs to, from 0) beside the columns of the table `tokens`. `micro_batches` is how many responses each forward
    pass held.
    """

    number: int
    first_response: int
    responses: int
    columns: dict[str, Tensor]
    micro_batches: Sequence[int] = ()
    taken: bool = True


def update_record(
    number: int,
    first_response: int,
    batch: TokenBatch,
    plan: Plan,
    *,
    micro_batches: Sequence[int] = (),
    new_logp: Tensor | None = None,
    clipped: Tensor | None = None,
    taken: bool = True,
) -> UpdateRecord:
    """Copy the columns of an update to host memory: the mini-batch, its plan, and what the forward passes returned."""
    import torch

    # With scope = "micro" the weights of the plan as a whole are not those that were used: its micro-batches' are.
    plans = plan.split(micro_batches) if plan.replan else [plan]

    def planned(name: str) -> Tensor | None:
        values = [getattr(piece, name) for piece in plans]
        return values[0] if len(values) == 1 or values[0] is None else torch.cat(values)

    found: dict[str, Tensor | None] = {name: getattr(batch, name) for name in FROM_BATCH}
    found |= {name: planned(name) for name in FROM_PLAN}
    found |= {"planned_advantage": planned("advantage"), "new_logp": new_logp, "clipped": clipped}
    # On a CPU nothing is copied: nobody changes a batch or a plan after its update.
    columns = to_host({"sequence": batch.sequence} | {k: value for k, value in found.items() if value is not None})
    columns = _without_equal_advantage(columns)
    return UpdateRecord(number, first_response, batch.responses, columns, tuple(micro_batches), taken)


def to_host(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy columns to host memory."""
    import torch

    # All copies are started before the first wait: a synchronous copy of each column would wait for the GPU each time.
    copies = {name: value.to("cpu", non_blocking=value.is_cuda) for name, value in columns.items()}
    for device in {value.device for value in columns.values() if value.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def join_ranks(ranks: Sequence[UpdateRecord], first_response: int) -> UpdateRecord:
    """Join the records that the ranks have of one update, in rank order."""
    import torch

    for rank in ranks:  # dropped on a rank where no rule changed the advantage; another rank may have it
        rank.columns.setdefault("planned_advantage", rank.columns["advantage"])
    columns = {name: torch.cat([rank.columns[name] for rank in ranks]) for name in ranks[0].columns}
    # Each rank numbers its responses from 0.
    before = torch.tensor([0, *accumulate(rank.responses for rank in ranks)][:-1])
    columns["sequence"] += before.repeat_interleave(torch.tensor([len(rank.columns["sequence"]) for rank in ranks]))
    return replace(
        ranks[0],
        first_response=first_response,
        responses=sum(rank.responses for rank in ranks),
        columns=_without_equal_advantage(columns),
        micro_batches=[size for rank in ranks for size in rank.micro_batches],
    )


def _without_equal_advantage(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop the planned advantage where no rule changed it, which is so for most methods."""
    import torch

    if torch.equal(columns["advantage"], columns["planned_advantage"]):
        del columns["planned_advantage"]
    return columns


def select_groups(samples: Sequence[Sample], share: float) -> list[bool]:
    """Choose which responses are recorded: whole groups, by a hash of their number, at least one of them."""
    if share >= 1:
        return [True] * len(samples)
    draw = {group: _uniform(group) for group in {sample.group for sample in samples}}
    limit = max(share, min(draw.values(), default=0.0))
    return [draw[sample.group] <= limit for sample in samples]


def _uniform(group: int) -> float:
    """Return a number in [0, 1) that depends on the group's number alone: a resumed run chooses the same groups."""
    digest = hashlib.sha256(f"record\0{group}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 1) / 2**63


def step_data(
    step: int,
    samples: Sequence[Sample],
    updates: Sequence[UpdateRecord],
    selected: Sequence[bool],
    vocabulary: Vocabulary,
) -> StepData:
    """Build a step's tables from the samples that are selected and were trained on."""
    import numpy as np

    tables, infos, rows = [], [], []
    for update in updates:
        indices = range(update.first_response, update.first_response + update.responses)
        recorded = [index for index in indices if selected[index]]
        table = _token_columns(update, [selected[index] for index in indices], vocabulary)
        tables.append(table)
        counts = len(recorded), len(table["old_logp"])
        infos.append(UpdateInfo(update.number, *counts, update.taken, list(update.micro_batches)))
        rows += [(update.number, samples[index]) for index in recorded]
    # A table has no nulls: a column that one update lacks is left out of the step.
    names = [name for name in tables[0] if all(name in table for table in tables)]
    tokens = {name: np.concatenate([table[name] for table in tables]) for name in names}
    lengths = [sample.response.num_sampled for _, sample in rows]
    tokens["response"] = np.repeat(np.arange(len(rows), dtype=np.int32), lengths)
    info = StepInfo(step, len(rows), sum(lengths), len(samples), infos)
    return StepData(info, tokens, response_columns(step, rows, vocabulary))


def _token_columns(update: UpdateRecord, selected: Sequence[bool], vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the columns of an update's selected responses as NumPy arrays."""
    import torch

    from trimtab.objectives import segment_ids

    columns = dict(update.columns)
    sequence = columns.pop("sequence")
    if "segment" not in columns:  # recorded whatever the objective: another one may need it in a replay
        after_tool = columns["tool_tokens"] > 0 if "tool_tokens" in columns else None
        text = vocabulary.text_bytes
        columns["segment"] = segment_ids(columns["token"], text, sequence=sequence, after_tool=after_tool)
    # 64-bit integers in a batch, of which 32 bits are ever used.
    narrow = {"token": torch.int32, "segment": torch.int32}
    table = {name: value.to(narrow.get(name, value.dtype)).numpy() for name, value in columns.items()}
    if all(selected):
        return table
    # From responses to tokens by indexing: no Python work per token in a thread that shares the GIL with training.
    mask = torch.tensor(selected)[sequence].numpy()
    return {name: values[mask] for name, values in table.items()}


def response_columns(step: int, rows: Sequence[tuple[int, Sample]], vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the table of responses, each with the number of the update that trained on it."""
    samples = [sample for _, sample in rows]
    # A prompt is decoded once for its group: of eight samples seven would give the same text again.
    one_per_group = {sample.group: sample for sample in samples if sample.branch is None}
    prompts = {group: vocabulary.decode(sample.prompt) for group, sample in one_per_group.items()}
    branches = {"branch": [s.branch or 0 for s in samples]} if any(s.branch is not None for s in samples) else {}
    optional: dict[str, list[str]] = {
        "rewards": [json.dumps(dict(s.terms)) if s.terms else "" for s in samples],
        "observations": [observations_json(s.response, vocabulary) if s.response.observed else "" for s in samples],
        "calls": [calls_json(s.conversation.calls) if s.conversation and s.conversation.calls else "" for s in samples],
        "ended": [s.conversation.ended or "" if s.conversation else "" for s in samples],
    }
    return {
        **{name: texts for name, texts in optional.items() if any(texts)},
        **branches,
        "step": [step] * len(rows),
        "response": list(range(len(rows))),
        "update": [update for update, _ in rows],
        "tokens": [s.response.num_sampled for s in samples],
        "prompt": encodable(
            prompts[s.group] if s.branch is None else cut(vocabulary.decode(s.prompt), MAX_CONTEXT) for s in samples
        ),
        "group": [s.group for s in samples],
        "sample": [s.response.sample for s in samples],
        "reward": [s.reward for s in samples],
        "verdict": [s.verdict.kind if s.verdict else "ungraded" for s in samples],
        "finished": [s.response.finished for s in samples],
        "extracted": encodable(s.verdict.extracted or "" for s in samples),
        "answer": encodable(s.problem.answer for s in samples),
        "source": encodable(s.problem.source for s in samples),
    }


def encodable(texts: Iterable[str]) -> list[str]:
    """Replace lone surrogates, which UTF-8 and so Arrow cannot encode."""
    listed = list(texts)
    clean = {text: text.encode("utf-8", "replace").decode() for text in set(listed)}
    return [clean[text] for text in listed]
