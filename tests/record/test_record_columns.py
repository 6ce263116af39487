"""From an update's tensors to a record's columns: one wait for a GPU, no Python for every token, the same bits."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.gpu import host_sync_allowed, no_host_sync
from helpers.record.made_records import WORDS
from trimtab.objectives import TokenBatch, objective
from trimtab.policy.update import UpdateResult
from trimtab.record.tables import encode
from trimtab.rewards import Verdict
from trimtab.rollout import Response
from trimtab.tasks import Problem
from trimtab.train.experience import GradedResponse
from trimtab.train.recording import Held, Trace, hold, on_host, step_data

RESPONSES = 8


def made_trace(length: int = 5, method: str = "stapo", device: str = "cpu") -> Trace:
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
        "token": torch.randint(0, len(WORDS), (tokens,), generator=draw),
        "segment": torch.zeros(tokens, dtype=torch.int64),
        "sampler_logp": -floats(),
        "sum_p2": floats(),
        "sum_p2_logp": -floats(),
        "group": torch.arange(RESPONSES) // 4,
        "reward": torch.arange(RESPONSES) % 2 * 1.0,
    }
    batch = TokenBatch(**{name: value.to(device) for name, value in columns.items()})
    result = UpdateResult({}, new_logp=batch.old_logp - 0.01, clipped=batch.old_logp < -0.9, parts=[RESPONSES])
    return Trace(0, 0, batch, objective(method).plan(batch), result)


def answers_of(trace: Trace) -> list[GradedResponse]:
    assert trace.batch.token is not None
    ids = trace.batch.token.reshape(RESPONSES, -1).tolist()
    problem = Problem((), "2", "exact", "made")
    return [
        GradedResponse(
            problem, [1, 3, 1], Response(tokens, [], True, sample=n % 4), "", Verdict("wrong", "3"), 0.5, n // 4
        )
        for n, tokens in enumerate(ids)
    ]


def given(trace: Trace) -> dict[str, Tensor | None]:
    """What the columns must hold, from where it lies."""
    batch, plan = trace.batch, trace.plan
    names = ("old_logp", "entropy", "sampler_logp", "sum_p2", "sum_p2_logp", "advantage", "token", "segment")
    planned = {name: getattr(plan, name) for name in ("weight", "scale", "clip_low", "clip_high", "reason")}
    measured = {"new_logp": trace.result.new_logp, "clipped": trace.result.clipped}
    return {name: getattr(batch, name) for name in names} | planned | measured


def same_bits(held: Held, trace: Trace) -> bool:
    return all(
        value is not None and torch.equal(held.columns[name], value.cpu()) for name, value in given(trace).items()
    )


# --- out of the GPU


class OnGpu:
    """Stands for a tensor on a GPU, and notes how it was copied."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, copied: list[bool]) -> None:
        self.copied = copied

    def to(self, device: str, non_blocking: bool) -> str:
        self.copied.append(non_blocking)
        return f"in the memory of the {device}"


def test_a_gpu_is_waited_for_once_after_all_copies_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[bool] = []
    waits: list[int] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            assert device == OnGpu.device

        def synchronize(self) -> None:
            waits.append(len(copied))

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    held: dict[str, Any] = on_host({name: OnGpu(copied) for name in "abcde"})  # type: ignore[misc]
    assert copied == [True] * 5, "no copy waits by itself"
    assert waits == [5]
    assert held == dict.fromkeys("abcde", "in the memory of the cpu")


def test_what_lies_in_the_main_memory_is_not_copied() -> None:
    values = {"a": torch.rand(3), "b": torch.arange(3)}
    assert all(on_host(values)[name] is value for name, value in values.items())


@pytest.mark.gpu
def test_columns_of_a_gpu_are_held_with_their_bits_and_no_hidden_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, synchronize = made_trace(200, device="cuda"), torch.cuda.Stream.synchronize
    hold(trace, [RESPONSES])

    def asked_for(stream: torch.cuda.Stream) -> None:
        with host_sync_allowed():
            synchronize(stream)

    monkeypatch.setattr(torch.cuda.Stream, "synchronize", asked_for)
    with no_host_sync():
        held = hold(trace, [RESPONSES])
    assert all(not value.is_cuda for value in held.columns.values())
    assert same_bits(held, trace)


# --- what is held


def test_an_update_is_held_as_it_was() -> None:
    trace = made_trace()
    held = hold(trace, [RESPONSES])
    assert same_bits(held, trace)
    assert held.info.responses == RESPONSES and held.info.tokens == trace.batch.tokens and held.info.taken
    assert not {"ref_logp", "proxy_logp", "current_logp", "penalty"} & set(held.columns), "nobody measured these"


@pytest.mark.parametrize(("method", "differs"), [("grpo", False), ("stapo", False), ("entropy_advantage", True)])
def test_a_planned_advantage_is_held_where_it_differs(method: str, differs: bool) -> None:
    trace = made_trace(method=method)
    held = hold(trace, [RESPONSES])
    assert (
        ("planned_advantage" in held.columns)
        == differs
        == (not torch.equal(trace.plan.advantage, trace.batch.advantage))
    )
    copied = replace(trace, plan=replace(trace.plan, advantage=trace.batch.advantage.clone()))
    assert "planned_advantage" not in hold(copied, [RESPONSES]).columns, "an equal one is the same"


# --- in the recorder's thread


def python_work(length: int) -> int:
    """Calls, of Python and of C, while a record is built and put into its bytes."""
    trace = made_trace(length)
    answers, held = answers_of(trace), [hold(trace, [RESPONSES])]
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        data = step_data(1, answers, held, [True] * RESPONSES, WORDS)
        encode("tokens", data.tokens)
        encode("responses", data.responses)
    finally:
        sys.setprofile(before)
    return calls


def test_the_recorder_takes_no_python_for_every_token() -> None:
    python_work(2)  # the first one imports
    short, long = python_work(5), python_work(500)
    assert long - short < 100, "the training loop waits while the recorder's thread runs Python"


def test_a_step_holds_the_columns_of_its_updates_one_after_the_other() -> None:
    first, second = made_trace(5), replace(made_trace(7), update=1, first=RESPONSES)
    answers = answers_of(first) + answers_of(second)
    data = step_data(3, answers, [hold(t, [RESPONSES]) for t in (first, second)], [True] * len(answers), WORDS)
    assert data.info.responses == 2 * RESPONSES and data.info.tokens == 12 * RESPONSES
    assert [update.tokens for update in data.info.updates] == [5 * RESPONSES, 7 * RESPONSES]
    for name, value in given(first).items():
        other = given(second)[name]
        assert value is not None and other is not None
        assert np.array_equal(data.tokens[name], torch.cat([value, other]).numpy()), name
    assert data.tokens["response"].tolist() == [n // 5 for n in range(40)] + [8 + n // 7 for n in range(56)]
    assert data.responses["prompt"] == ["1 and 1"] * 16
