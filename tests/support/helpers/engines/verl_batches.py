"""Batches as verl's engine has them: nested tensors, prompts before responses, and tool output among the responses."""

from __future__ import annotations

import helpers.engines.verl_quiet  # noqa: F401  # isort: skip

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from helpers.engines.verl_runs import CHARACTERS, SPECIAL, tiny_tokenizer
from trimtab.engines.verl.planning import SENT_COLUMNS, plan_step
from trimtab.objectives import Objective, TokenBatch, segment_ids

TOKENIZER = tiny_tokenizer()
TEXT_IDS = range(len(SPECIAL), len(SPECIAL) + len(CHARACTERS))


def nested(rows: Sequence[Tensor]) -> Any:
    """A jagged nested tensor of rows."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def random_batch(seed: int, responses: int = 8, tools: bool = True) -> TensorDict:
    """A batch of one's own: the same for the same seed."""
    return _random_batch(seed, responses, tools).copy()


@lru_cache
def _random_batch(seed: int, responses: int, tools: bool) -> TensorDict:
    """Responses of odd lengths, some with tool output in the middle, one of nothing else, and all of verl's fields."""
    draw = torch.Generator().manual_seed(seed)

    def uniform(size: int) -> Tensor:
        return torch.rand(size, generator=draw)

    rows: dict[str, list[Tensor]] = {}
    for row in range(responses):
        prompt = int(torch.randint(1, 5, (), generator=draw))
        size = int(torch.randint(1, 24, (), generator=draw))
        mask = torch.ones(size, dtype=torch.int64)
        if tools and size > 6:
            mask[size // 3 : size // 3 + int(torch.randint(0, 4, (), generator=draw))] = 0
        if row == seed % 97:  # what verl pads a batch with
            mask[:] = 0
        logp = uniform(size).clamp(min=1e-4).log() * 2
        advantage = torch.randn((), generator=draw).round(decimals=1)
        ids = torch.randint(TEXT_IDS.start, TEXT_IDS.stop, (prompt + size,), generator=draw)
        given = {
            "prompts": ids[:prompt],
            "responses": ids[prompt:],
            "input_ids": ids,
            "position_ids": torch.arange(prompt + size),
            "response_mask": mask,
            "loss_mask": mask.clone(),
            "old_log_probs": logp,
            "rollout_log_probs": logp + 0.2 * (uniform(size) - 0.5),
            "ref_log_prob": -(logp + uniform(size) - 0.5).abs(),
            "entropy": 2 * uniform(size),
            "advantages": advantage * mask,
        }
        for name, value in given.items():
            rows.setdefault(name, []).append(value)
    return TensorDict({name: nested(values) for name, values in rows.items()}, batch_size=responses)


def new_log_probs(data: TensorDict, seed: int) -> Tensor:
    """The policy now, for every token of prompts and responses, shifted by one as the engine gives them: a leaf."""
    draw = torch.Generator().manual_seed(seed + 1000)
    flat = torch.zeros(int(data["input_ids"].offsets()[-1]))
    ends = data["input_ids"].offsets()[1:]
    for end, old in zip(ends.tolist(), data["old_log_probs"].unbind(), strict=True):
        move = torch.randn(len(old), generator=draw) * 0.3
        flat[end - len(old) - 1 : end - 1] = (old + move).clamp(max=-1e-6)
    return flat.requires_grad_()


def with_plan(objective: Objective, data: TensorDict, minibatch: int, ranks: int = 1) -> TensorDict:
    """The data with the plans of their mini-batches, as the driver sends them."""
    planned = plan_step(objective, data, minibatch, ranks, TOKENIZER)
    for name, value in planned.fields.items():
        data[name] = value
    tu.assign_non_tensor(data, **{SENT_COLUMNS: planned.sent})
    return data


def as_minibatch(data: TensorDict, rows: Sequence[int], ranks: int = 1, tokens: int | None = None) -> TensorDict:
    """Rows of a batch as the engine hands them on: `tokens` are those of the mini-batch of all ranks."""
    every = list(rows) == list(range(len(data)))
    part = data.copy() if every else tu.index_select_tensor_dict(data, torch.tensor(list(rows)))
    tokens = int(part["loss_mask"].values().sum()) if tokens is None else tokens
    tu.assign_non_tensor(part, dp_size=ranks, batch_num_tokens=tokens)
    return part


def padded(data: TensorDict, name: str, rows: Sequence[int]) -> Tensor:
    """A field as a padded tensor, for a way to the same tokens that shares no code with the adapter."""
    found = data[name].unbind()
    return torch.nn.utils.rnn.pad_sequence([found[row] for row in rows], batch_first=True)


def core_batch(objective: Objective, data: TensorDict, rows: Sequence[int]) -> TokenBatch:
    """The same tokens straight into the core, through padded tensors."""
    mask = padded(data, "response_mask", rows)
    names = {"entropy": "entropy", "sampler_logp": "rollout_log_probs", "ref_logp": "ref_log_prob"}
    given = {name: padded(data, field, rows) for name, field in names.items() if name in objective.needs}
    if "segment" in objective.needs:
        given["segment"] = torch.zeros_like(mask)
        for n, (ids, kept) in enumerate(zip(padded(data, "responses", rows), mask.bool(), strict=True)):
            given["segment"][n, kept] = _turns(ids, kept)
    return TokenBatch.from_padded(
        mask, old_logp=padded(data, "old_log_probs", rows), advantage=padded(data, "advantages", rows), **given
    )


def _turns(ids: Tensor, kept: Tensor) -> Tensor:
    """Segment ids of one response, each turn by itself."""
    found: list[int] = []
    turn: list[int] = []
    for token, mine in [*zip(ids.tolist(), kept.tolist(), strict=True), (0, False)]:
        if mine:
            turn.append(token)
        elif turn:
            first = found[-1] + 1 if found else 0
            found += [first + n for n in segment_ids(turn, TOKENIZER).tolist()]
            turn = []
    return torch.tensor(found, dtype=torch.int64)
