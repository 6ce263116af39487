"""The order of problems in a run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.data import derive_seed, problem_index
from trimtab.data.problems import _shuffled


@given(st.integers(1, 200), st.integers(), st.integers(0, 20))
def test_every_epoch_has_every_problem_once(size: int, seed: int, epoch: int) -> None:
    order = [problem_index(size, seed, epoch * size + place) for place in range(size)]
    assert sorted(order) == list(range(size))


@given(st.integers(1, 50), st.integers(), st.lists(st.integers(0, 500), min_size=1))
def test_a_position_has_the_same_problem_in_any_order_of_access(size: int, seed: int, positions: list[int]) -> None:
    first = [problem_index(size, seed, position) for position in positions]
    _shuffled.cache_clear()
    assert [problem_index(size, seed, position) for position in reversed(positions)] == first[::-1]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(problem_index(50, seed, 50 * epoch + n) for n in range(50)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


def test_a_known_order_stays_what_it_is() -> None:
    assert [problem_index(8, 0, position) for position in range(16)] == [
        6,
        0,
        1,
        3,
        2,
        4,
        5,
        7,
        1,
        4,
        5,
        3,
        7,
        0,
        6,
        2,
    ]


@pytest.mark.parametrize(("size", "position"), [(0, 0), (5, -1)])
def test_a_position_that_cannot_be_is_an_error(size: int, position: int) -> None:
    with pytest.raises(ValueError, match="has no position"):
        problem_index(size, 0, position)


def test_seeds_of_different_values_differ() -> None:
    assert len({derive_seed("a", 1), derive_seed("a", 2), derive_seed("b", 1), derive_seed("a1")}) == 4
    assert all(0 <= derive_seed(n) < 2**63 for n in range(100))
