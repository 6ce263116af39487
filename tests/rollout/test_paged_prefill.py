"""Prompts are read into the cache in one pass; where that is a graph with room to spare, the room changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.rollout.paged_models import CONFIGS, ENDS, count_waits, prompts, same, tiny
from trimtab.rollout import NativeSampler, PagedSampler, SamplingOptions
from trimtab.rollout.paged.decode_state import PAGE
from trimtab.rollout.paged.decoder import Reading
from trimtab.rollout.paged.graphs import bucket
from trimtab.rollout.paged.prefill import LEAST, Reader, laid_out

OPTIONS = SamplingOptions(samples=3, max_new_tokens=20, seed=3)
PREFIXES = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3 * PAGE), min_size=1, max_size=5)


@pytest.fixture
def as_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Reading]:
    """Readings go through places of fixed size, as on a GPU; what a graph would replay is run instead."""
    made: list[Reading] = []

    def replayed(reader: Reader, reading: Reading) -> Callable[[], None]:
        made.append(reading)
        return partial(reader.decoder.prefill, reading, reader.memory)

    monkeypatch.setattr(Reader, "_bound_by_launches", lambda reader, tokens: True)
    monkeypatch.setattr(Reader, "_replayed", replayed)
    return made


@pytest.mark.parametrize("family", CONFIGS)
def test_room_to_spare_changes_nothing(as_graphs: list[Reading], family: str) -> None:
    model, asked = tiny(family), prompts(1, 63, 64, 65, 66, 130)
    mine = PagedSampler(model, ENDS, torch.float32).sample(asked, 0, OPTIONS)
    same(mine, NativeSampler(model, ENDS, 0, nullcontext).sample(asked, 0, OPTIONS))
    assert as_graphs


def test_a_size_is_made_once_and_holds_nothing_of_the_last_prompts(as_graphs: list[Reading]) -> None:
    model = tiny("llama tied")
    sampler = PagedSampler(model, ENDS, torch.float32)
    for step, lengths in enumerate([(100, 90), (70, 65), (100, 99)]):
        asked = prompts(*lengths)
        same(
            sampler.sample(asked, step, OPTIONS),
            NativeSampler(model, ENDS, 0, nullcontext).sample(asked, step, OPTIONS),
        )
    assert len(as_graphs) == 1
    assert len(as_graphs[0].ids) == LEAST


def test_samples_that_give_way_are_read_again(monkeypatch: pytest.MonkeyPatch, as_graphs: list[Reading]) -> None:
    waits = count_waits(monkeypatch)
    model, asked = tiny("llama tied"), prompts(40, 60, 1, 63, 10)
    options = SamplingOptions(samples=4, max_new_tokens=180, seed=3)
    tight = PagedSampler(model, frozenset({2}), torch.float32, pages=12).sample(asked, 0, options)
    same(tight, NativeSampler(model, frozenset({2}), 0, nullcontext).sample(asked, 0, options))
    assert waits
    assert as_graphs


def test_graphs_do_not_grow_without_end(monkeypatch: pytest.MonkeyPatch, as_graphs: list[Reading]) -> None:
    monkeypatch.setattr("trimtab.rollout.paged.prefill.MOST", 2)
    model = tiny("llama tied")
    sampler = PagedSampler(model, ENDS, torch.float32)
    for lengths in [(3,), (3, 4), (3, 4, 5, 6, 7), (3,)]:
        asked = prompts(*lengths)
        same(
            sampler.sample(asked, 0, OPTIONS),
            NativeSampler(model, ENDS, 0, nullcontext).sample(asked, 0, OPTIONS),
        )
    assert sampler._reader is not None
    assert 0 < len(sampler._reader._graphs) <= 2
    assert len(as_graphs) > 2


@given(PREFIXES)
def test_every_token_has_its_position_and_page(prefixes: list[list[int]]) -> None:
    pages, free = [], iter(range(100))
    for prefix in prefixes:
        pages.append([next(free) for _ in range(-(-len(prefix) // PAGE))])
    ids, position, page, starts = laid_out(prefixes, pages)
    wanted = [
        (token, place, held[place // PAGE])
        for prefix, held in zip(prefixes, pages, strict=True)
        for place, token in enumerate(prefix)
    ]
    assert list(zip(ids.tolist(), position.tolist(), page.tolist(), strict=True)) == wanted
    assert starts.tolist() == [0, *np.cumsum([len(prefix) for prefix in prefixes]).tolist()]
    assert starts.dtype == np.int32


def test_sizes_are_few_and_never_too_small() -> None:
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 6, 7, 9, 13, 17, 25, 256, 257)] == [
        *(1, 2, 3, 4, 6, 6, 8, 12, 16, 24, 32, 256, 384)
    ]
    sizes = {bucket(size) for size in range(1, 5000)}
    assert all(size <= bucket(size) <= max(2, 1.5 * size) for size in range(1, 5000))
    assert len(sizes) < 30
