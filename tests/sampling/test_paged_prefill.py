"""Prompts are prefilled in one packed pass; padding it to the size of a CUDA graph changes nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.sampling.paged_models import CONFIGS, EOS, assert_same, count_preemptions, prompts, tiny
from trimtab.data import SamplingOptions
from trimtab.trainer.sampling import NativeSampler, PagedSampler
from trimtab.trainer.sampling.paged import sampler as module
from trimtab.trainer.sampling.paged.buffers import PAGE_SIZE
from trimtab.trainer.sampling.paged.decoder import graph_size
from trimtab.trainer.sampling.paged.sampler import pack_prefixes

OPTIONS = SamplingOptions(samples=3, max_new_tokens=20, seed=3)
PREFIXES = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3 * PAGE_SIZE), min_size=1, max_size=5)


class FakeGraph:
    """Runs again what a CUDA graph would replay."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work

    def pool(self) -> None: ...


class Graphs:
    """How many graphs were captured, and those that are still held."""

    def __init__(self) -> None:
        self.captured = 0
        self.alive: weakref.WeakSet[FakeGraph] = weakref.WeakSet()

    def capture(self, work: Callable[[], None], pool: Any = None) -> FakeGraph:
        graph = FakeGraph(work)
        work()  # a capture runs the work for warm-up
        self.captured += 1
        self.alive.add(graph)
        return graph


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Prefill in padded batches as on a GPU, with fake graphs."""
    made = Graphs()
    monkeypatch.setattr(module, "is_launch_bound", lambda decoder, tokens: True)
    monkeypatch.setattr(module, "capture_graph", made.capture)
    return made


@pytest.mark.parametrize("family", CONFIGS)
def test_padding_changes_nothing(graphs: Graphs, family: str) -> None:
    model, batch = tiny(family), prompts(1, 63, 64, 65, 66, 130)
    responses = PagedSampler(model, EOS, torch.float32).sample(batch, 0, OPTIONS)
    assert_same(responses, NativeSampler(model, EOS, 0, nullcontext).sample(batch, 0, OPTIONS))
    assert graphs.captured


def test_a_graph_is_captured_once_per_size_and_keeps_nothing_of_earlier_prompts(graphs: Graphs) -> None:
    model = tiny("llama tied")
    sampler = PagedSampler(model, EOS, torch.float32)
    for step, lengths in enumerate([(100, 90), (70, 65), (100, 99)]):
        batch = prompts(*lengths)
        assert_same(
            sampler.sample(batch, step, OPTIONS),
            NativeSampler(model, EOS, 0, nullcontext).sample(batch, step, OPTIONS),
        )
    assert graphs.captured == 1


def test_preempted_sequences_are_prefilled_again(monkeypatch: pytest.MonkeyPatch, graphs: Graphs) -> None:
    preemptions = count_preemptions(monkeypatch)
    model, batch = tiny("llama tied"), prompts(40, 60, 1, 63, 10)
    options = SamplingOptions(samples=4, max_new_tokens=180, seed=3)
    responses = PagedSampler(model, frozenset({2}), torch.float32, max_pages=12).sample(batch, 0, options)
    assert_same(responses, NativeSampler(model, frozenset({2}), 0, nullcontext).sample(batch, 0, options))
    assert preemptions
    assert graphs.captured


def test_the_number_of_graphs_is_limited(monkeypatch: pytest.MonkeyPatch, graphs: Graphs) -> None:
    monkeypatch.setattr(module, "MAX_GRAPHS", 2)
    model = tiny("llama tied")
    sampler = PagedSampler(model, EOS, torch.float32)
    for lengths in [(3, 4, 5, 6, 7), (3,), (3, 4), (3,)]:  # the largest first, so that buffers and graphs are kept
        batch = prompts(*lengths)
        assert_same(
            sampler.sample(batch, 0, OPTIONS),
            NativeSampler(model, EOS, 0, nullcontext).sample(batch, 0, OPTIONS),
        )
    assert graphs.captured == 4, "the third replaced the first two"
    assert len(graphs.alive) == 2


@given(PREFIXES)
def test_every_token_has_its_position_and_page(prefixes: list[list[int]]) -> None:
    pages, free = [], iter(range(100))
    for prefix in prefixes:
        pages.append([next(free) for _ in range(-(-len(prefix) // PAGE_SIZE))])
    ids, position, page, cu_seqlens = pack_prefixes(prefixes, pages)
    expected = [
        (token, place, held[place // PAGE_SIZE])
        for prefix, held in zip(prefixes, pages, strict=True)
        for place, token in enumerate(prefix)
    ]
    assert list(zip(ids.tolist(), position.tolist(), page.tolist(), strict=True)) == expected
    assert cu_seqlens.tolist() == [0, *np.cumsum([len(prefix) for prefix in prefixes]).tolist()]
    assert cu_seqlens.dtype == np.int32


def test_graph_sizes_are_few_and_never_too_small() -> None:
    assert [graph_size(n) for n in (1, 2, 3, 4, 5, 6, 7, 9, 13, 17, 25, 256, 257)] == [
        *(1, 2, 3, 4, 6, 6, 8, 12, 16, 24, 32, 256, 384)
    ]
    sizes = {graph_size(size) for size in range(1, 5000)}
    assert all(size <= graph_size(size) <= max(2, 1.5 * size) for size in range(1, 5000))
    assert len(sizes) < 30
