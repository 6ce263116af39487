"""Quantiles and largest values agree with their plain definitions, whatever the values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.objectives.selection import largest, quantile, random_pick, share_count, top_share

floats = st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, -0.0, 1.0, 1e-30, -1e-30])


def by_sorting(values: torch.Tensor, count: int, among: torch.Tensor) -> set[int]:
    """The plain definition: largest first, of equal ones the first."""
    order = sorted((i for i in range(len(values)) if among[i]), key=lambda i: (-values[i].item(), i))
    return set(order[:count])


@given(values=st.lists(floats, min_size=1, max_size=40), data=st.data(), wide=st.booleans())
@settings(max_examples=300)
def test_the_largest_are_the_largest(values: list[float], data: st.DataObject, wide: bool) -> None:
    tensor = torch.tensor(values, dtype=torch.float64 if wide else torch.float32)
    among = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    count = data.draw(st.integers(0, int(among.sum())))
    expected = by_sorting(tensor, count, among)
    assert set(largest(tensor, count, among).tolist()) == expected
    everywhere = torch.ones_like(among)
    assert set(largest(tensor, count).tolist()) == by_sorting(tensor, count, everywhere)


@pytest.mark.parametrize("count", [1, 30_000, 74_999])
@pytest.mark.parametrize("decimals", [1, 6])
def test_of_many_values_and_ties_the_first_of_the_largest_are_taken(count: int, decimals: int) -> None:
    n = 400_000
    values = torch.randn(n, generator=torch.Generator().manual_seed(0)).round(decimals=decimals)
    among = torch.arange(n) % 4 > 0
    expected = torch.where(among, values, -torch.inf).argsort(descending=True, stable=True)[:count]
    assert torch.equal(largest(values, count, among), expected.sort().values)


@pytest.mark.parametrize("n", [1, 2, 1000, 50_000])
@pytest.mark.parametrize("q", [0.0, 0.1, 0.75, 0.8, 1.0])
def test_quantiles_interpolate_like_numpys(n: int, q: float) -> None:
    values = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    assert quantile(values, q).item() == pytest.approx(np.quantile(values.numpy(), q), abs=1e-12)
    tied = values.round()
    assert quantile(tied, q).item() == pytest.approx(np.quantile(tied.numpy(), q), abs=1e-12)


def test_the_quantile_of_nothing_is_below_nothing() -> None:
    threshold = quantile(torch.zeros(0), 0.5)
    assert math.isnan(threshold.item())
    assert not (torch.tensor([0.0, -1e9]) < threshold).any()


@pytest.mark.parametrize(
    ("n", "share", "count"),
    [(0, 0.5, 0), (1, 0.0, 1), (10, 0.1, 1), (11, 0.1, 2), (30, 0.1, 3), (7, 1.0, 7), (3, 0.7, 3)],
)
def test_shares_are_rounded_up(n: int, share: float, count: int) -> None:
    assert share_count(n, share) == count


@given(n=st.integers(1, 100_000), percent=st.integers(1, 100))
@settings(max_examples=300)
def test_shares_are_exact_for_every_percentage(n: int, percent: int) -> None:
    assert share_count(n, percent / 100) == max(1, -(-n * percent // 100))


def test_top_share_counts_among_the_mask() -> None:
    values, among = torch.arange(20.0), torch.arange(20) < 10
    assert top_share(values, 0.2, among).tolist() == [8, 9]


def test_random_picks_are_spread_evenly() -> None:
    logp = -torch.rand(1000, generator=torch.Generator().manual_seed(0))
    position = torch.arange(0, 1000, 2)
    counts = torch.zeros(1000)
    for seed in range(400):
        picked = random_pick(position, 50, seed, logp)
        assert len(picked.unique()) == 50
        counts[picked] += 1
    assert counts[1::2].sum() == 0
    # Each even position is picked 40 times on average, with a deviation of 6.
    assert 15 < counts[::2].min() < counts[::2].max() < 70


def test_a_random_pick_depends_on_the_batch() -> None:
    position, logp = torch.arange(100), torch.full((100,), -1.0)
    picks = [random_pick(position, 10, 0, logp), random_pick(position, 10, 0, logp - 0.5)]
    assert not torch.equal(*picks)
    assert len(random_pick(position[:3], 10, 0, logp)) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 1000, 1_000_000])
def test_a_gpu_picks_the_same_tokens(n: int) -> None:
    values = torch.randn(n, generator=torch.Generator().manual_seed(n)).round(decimals=2)
    among = torch.arange(n) % 3 > 0
    count = int(among.sum()) // 4
    mine = set(largest(values, count, among).tolist())
    assert set(largest(values.cuda(), count, among.cuda()).tolist()) == mine
    assert quantile(values.cuda(), 0.75).item() == pytest.approx(quantile(values, 0.75).item(), abs=1e-6)
