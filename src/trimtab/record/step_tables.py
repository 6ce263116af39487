"""Build the tables of a step from its responses and updates. It runs in the writer's thread."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from trimtab.record.conversation import calls_json, observations_json
from trimtab.record.inputs import RecordedResponse, UpdateRecord
from trimtab.record.layout import StepInfo, UpdateInfo
from trimtab.record.vocabulary import Vocabulary
from trimtab.record.writer import StepData

if TYPE_CHECKING:
    from torch import Tensor


class SegmentFinder(Protocol):
    """The signature of `trimtab.objectives.segment_ids`, which the caller passes in: this package imports no other."""

    def __call__(
        self, tokens: Tensor, tokenizer: Mapping[int, bytes], /, *, sequence: Tensor, after_tool: Tensor | None
    ) -> Tensor:
        """Return the subsentence of every token, from 0 in every response; none spans the output of a tool."""


def select_groups(responses: Sequence[RecordedResponse], share: float) -> list[bool]:
    """Choose which responses are recorded: whole groups, by a hash of their number, at least one of them."""
    if share >= 1:
        return [True] * len(responses)
    draw = {group: _uniform(group) for group in {response.group for response in responses}}
    limit = max(share, min(draw.values(), default=0.0))
    return [draw[response.group] <= limit for response in responses]


def _uniform(group: int) -> float:
    """Return a number in [0, 1) that depends on the group's number alone: a resumed run chooses the same groups."""
    digest = hashlib.sha256(f"record\0{group}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 1) / 2**63


def step_data(
    step: int,
    responses: Sequence[RecordedResponse],
    updates: Sequence[UpdateRecord],
    selected: Sequence[bool],
    vocabulary: Vocabulary,
    find_segments: SegmentFinder,
) -> StepData:
    """Build a step's tables from the responses that are selected and were trained on."""
    import numpy as np

    tables, infos, rows = [], [], []
    for update in updates:
        indices = range(update.first_response, update.first_response + update.responses)
        recorded = [index for index in indices if selected[index]]
        table = _token_columns(update, [selected[index] for index in indices], vocabulary, find_segments)
        tables.append(table)
        counts = len(recorded), len(table["old_logp"])
        infos.append(UpdateInfo(update.number, *counts, update.taken, list(update.micro_batches)))
        rows += [(update.number, responses[index]) for index in recorded]
    # A table has no nulls: a column that one update lacks is left out of the step.
    names = [name for name in tables[0] if all(name in table for table in tables)]
    tokens = {name: np.concatenate([table[name] for table in tables]) for name in names}
    lengths = [len(response.tokens) for _, response in rows]
    tokens["response"] = np.repeat(np.arange(len(rows), dtype=np.int32), lengths)
    info = StepInfo(step, len(rows), sum(lengths), len(responses), infos)
    return StepData(info, tokens, _response_columns(step, rows, vocabulary))


def _token_columns(
    update: UpdateRecord, selected: Sequence[bool], vocabulary: Vocabulary, find_segments: SegmentFinder
) -> dict[str, Any]:
    """Return the columns of an update's selected responses as NumPy arrays."""
    import torch

    columns = dict(update.columns)
    sequence = columns.pop("sequence")
    if "segment" not in columns:  # recorded whatever the objective: another one may need it in a replay
        after_tool = columns["tool_tokens"] > 0 if "tool_tokens" in columns else None
        found = find_segments(columns["token"], vocabulary.text_bytes, sequence=sequence, after_tool=after_tool)
        columns["segment"] = found
    # 64-bit integers in a batch, of which 32 bits are ever used.
    narrow = {"token": torch.int32, "segment": torch.int32}
    table = {name: value.to(narrow.get(name, value.dtype)).numpy() for name, value in columns.items()}
    if all(selected):
        return table
    # From responses to tokens by indexing: no Python work per token in a thread that shares the GIL with training.
    mask = torch.tensor(selected)[sequence].numpy()
    return {name: values[mask] for name, values in table.items()}


def _response_columns(
    step: int, rows: Sequence[tuple[int, RecordedResponse]], vocabulary: Vocabulary
) -> dict[str, Any]:
    """Return the table of responses, each with the number of the update that trained on it."""
    responses = [response for _, response in rows]
    # A prompt is decoded once for its group: of eight samples seven would give the same text again.
    one_per_group = {response.group: response for response in responses}
    prompts = {group: vocabulary.decode(response.prompt) for group, response in one_per_group.items()}
    given = {
        "rewards": [r.rewards for r in responses],
        "observations": [observations_json(r.observations, vocabulary) if r.observations else "" for r in responses],
        "calls": [calls_json(r.calls) if r.calls else "" for r in responses],
        "ended": [r.ended for r in responses],
    }
    copied = ("group", "sample", "reward", "verdict", "finished")
    return {
        **{name: texts for name, texts in given.items() if any(texts)},
        "step": [step] * len(rows),
        "response": list(range(len(rows))),
        "update": [update for update, _ in rows],
        "tokens": [len(r.tokens) for r in responses],
        "prompt": encodable(prompts[r.group] for r in responses),
        **{name: [getattr(r, name) for r in responses] for name in copied},
        **{name: encodable(getattr(r, name) for r in responses) for name in ("extracted", "answer", "source")},
    }


def encodable(texts: Iterable[str]) -> list[str]:
    """Replace lone surrogates, which UTF-8 and so Arrow cannot encode."""
    listed = list(texts)
    clean = {text: text.encode("utf-8", "replace").decode() for text in set(listed)}
    return [clean[text] for text in listed]
