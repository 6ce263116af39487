"""From an update's tensors to a record's columns: one wait for a GPU, no Python for every token, the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.gpu import host_sync_allowed, no_host_sync
from helpers.record.made_records import VOCABULARY
from trimtab.data import Problem, Response, Sample
from trimtab.grading import Verdict
from trimtab.objectives import Plan, TokenBatch, objective
from trimtab.record import StepData, UpdateRecord, join_ranks, update_record
from trimtab.record.recorder import step_data, to_host

RESPONSES = 8


@dataclass(frozen=True)
class MadeUpdate:
    """An update as a trainer has it, before it is recorded."""

    batch: TokenBatch
    plan: Plan
    new_logp: Tensor
    clipped: Tensor

    def record(self, number: int = 0, first: int = 0) -> UpdateRecord:
        return update_record(
            number,
            first,
            self.batch,
            self.plan,
            micro_batches=[RESPONSES],
            new_logp=self.new_logp,
            clipped=self.clipped,
        )


def made_update(length: int = 5, method: str = "stapo", device: str = "cpu") -> MadeUpdate:
    """An update over eight responses of this length, two groups."""
    draw = torch.Generator().manual_seed(length)
    tokens = RESPONSES * length

    def floats() -> Tensor:
        return torch.rand(tokens, generator=draw)

    columns = {
        "old_logp": -floats(),
        "advantage": (torch.arange(RESPONSES) % 2 - 0.5).repeat_interleave(length),
        "sequence": torch.arange(RESPONSES).repeat_interleave(length),
        "entropy": floats(),
        "token": torch.randint(0, len(VOCABULARY), (tokens,), generator=draw),
        "segment": torch.zeros(tokens, dtype=torch.int64),
        "sampler_logp": -floats(),
        "sum_p2": floats(),
        "sum_p2_logp": -floats(),
        "group": torch.arange(RESPONSES) // 4,
        "reward": torch.arange(RESPONSES) % 2 * 1.0,
    }
    batch = TokenBatch(**{name: value.to(device) for name, value in columns.items()})
    return MadeUpdate(batch, objective(method).plan(batch), batch.old_logp - 0.01, batch.old_logp < -0.9)


def samples_of(update: MadeUpdate) -> list[Sample]:
    assert update.batch.token is not None
    ids = update.batch.token.reshape(RESPONSES, -1).tolist()
    problem, verdict = Problem((), "2", "", "made"), Verdict("wrong", "3")
    return [
        Sample(problem, "", [1, 3, 1], Response(tokens, [], True, n % 4), n // 4, verdict=verdict, reward=0.5)
        for n, tokens in enumerate(ids)
    ]


def tables(step: int, updates: Sequence[MadeUpdate]) -> StepData:
    """The tables of a step of these updates, all responses selected."""
    samples = [sample for update in updates for sample in samples_of(update)]
    records = [update.record(n, n * RESPONSES) for n, update in enumerate(updates)]
    return step_data(step, samples, records, [True] * len(samples), VOCABULARY)


def expected_columns(update: MadeUpdate) -> dict[str, Tensor | None]:
    """What the columns must hold, from the batch, the plan and the forward pass."""
    names = ("old_logp", "entropy", "sampler_logp", "sum_p2", "sum_p2_logp", "advantage", "token", "segment")
    planned = {name: getattr(update.plan, name) for name in ("weight", "scale", "clip_low", "clip_high", "reason")}
    measured = {"new_logp": update.new_logp, "clipped": update.clipped}
    return {name: getattr(update.batch, name) for name in names} | planned | measured


def same_bits(record: UpdateRecord, update: MadeUpdate) -> bool:
    expected = expected_columns(update).items()
    return all(value is not None and torch.equal(record.columns[name], value.cpu()) for name, value in expected)


# --- out of the GPU


class OnGpu:
    """Stands for a tensor on a GPU, and notes how it was copied."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, copied: list[bool]) -> None:
        self.copied = copied

    def to(self, device: str, non_blocking: bool) -> str:
        self.copied.append(non_blocking)
        return f"in the memory of the {device}"


def test_a_gpu_is_waited_for_once_after_all_copies_have_started(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[bool] = []
    waits: list[int] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            assert device == OnGpu.device

        def synchronize(self) -> None:
            waits.append(len(copied))

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    held: dict[str, Any] = to_host({name: OnGpu(copied) for name in "abcde"})  # type: ignore[misc]
    assert copied == [True] * 5, "no copy waits by itself"
    assert waits == [5]
    assert held == dict.fromkeys("abcde", "in the memory of the cpu")


def test_columns_in_host_memory_are_not_copied() -> None:
    values = {"a": torch.rand(3), "b": torch.arange(3)}
    assert all(to_host(values)[name] is value for name, value in values.items())


@pytest.mark.gpu
def test_columns_of_a_gpu_are_copied_bit_by_bit_without_a_hidden_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    update, synchronize = made_update(200, device="cuda"), torch.cuda.Stream.synchronize
    update.record()

    def asked_for(stream: torch.cuda.Stream) -> None:
        with host_sync_allowed():
            synchronize(stream)

    monkeypatch.setattr(torch.cuda.Stream, "synchronize", asked_for)
    with no_host_sync():
        record = update.record()
    assert all(not value.is_cuda for value in record.columns.values())
    assert same_bits(record, update)


# --- what is kept of an update


def test_the_columns_of_an_update_are_copied_bit_by_bit() -> None:
    update = made_update()
    record = update.record()
    assert same_bits(record, update)
    assert record.responses == RESPONSES and len(record.columns["old_logp"]) == update.batch.tokens and record.taken
    assert not {"ref_logp", "proxy_logp", "current_logp", "penalty"} & set(record.columns), "this run has none of these"


@pytest.mark.parametrize(("method", "differs"), [("grpo", False), ("stapo", False), ("entropy_advantage", True)])
def test_a_planned_advantage_is_recorded_where_it_differs(method: str, differs: bool) -> None:
    update = made_update(method=method)
    assert ("planned_advantage" in update.record().columns) == differs
    assert (not torch.equal(update.plan.advantage, update.batch.advantage)) == differs
    copied = replace(update, plan=replace(update.plan, advantage=update.batch.advantage.clone()))
    assert "planned_advantage" not in copied.record().columns, "an equal one is left out"


def test_the_records_of_two_ranks_join_to_one_update() -> None:
    first, second = made_update(5), made_update(7, method="entropy_advantage")
    joined = join_ranks([first.record(), second.record()], first_response=3)
    assert (joined.first_response, joined.responses, joined.micro_batches) == (3, 2 * RESPONSES, [RESPONSES, RESPONSES])
    assert joined.columns["sequence"].tolist() == [n // 5 for n in range(40)] + [8 + n // 7 for n in range(56)]
    planned = torch.cat([first.plan.advantage, second.plan.advantage])
    assert torch.equal(joined.columns["planned_advantage"], planned), "one rank has changed its advantages"


# --- in the writer's thread


def test_a_step_holds_the_columns_of_its_updates_one_after_the_other() -> None:
    first, second = made_update(5), made_update(7)
    data = tables(3, [first, second])
    assert data.info.responses == 2 * RESPONSES and data.info.tokens == 12 * RESPONSES
    assert [update.tokens for update in data.info.updates] == [5 * RESPONSES, 7 * RESPONSES]
    for name, value in expected_columns(first).items():
        other = expected_columns(second)[name]
        assert value is not None and other is not None
        assert np.array_equal(data.tokens[name], torch.cat([value, other]).numpy()), name
    assert data.tokens["response"].tolist() == [n // 5 for n in range(40)] + [8 + n // 7 for n in range(56)]
    assert data.responses["prompt"] == ["1 and 1"] * 16
