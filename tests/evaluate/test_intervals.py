"""Intervals by problem: right numbers, sensible edges, and coverage that was measured."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import interval_coverage as coverage
from trimtab.experiments.intervals import (
    Interval,
    average,
    difference_interval,
    mean_interval,
    share_interval,
    share_limits,
    t_quantile,
)

ROOT = Path(__file__).parents[2]
ROUNDS = coverage.ROUNDS  # a share near 95 % then has a standard error of two tenths of a point


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [
        (1, 12.706204736432095),
        (2, 4.302652729911275),
        (3, 3.182446305284263),
        (4, 2.7764451051977987),
        (9, 2.2621571627409915),
        (29, 2.045229642132703),
        (30, 2.0422724563012373),
        (499, 1.9647293909876649),
        (1318, 1.9617655127673155),
    ],
)
def test_students_quantile_is_that_of_the_tables(freedom: int, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, rel=1e-9)


def test_no_problem_has_no_interval_and_one_has_a_mean_alone() -> None:
    assert share_interval([]) is None
    assert mean_interval([]) is None
    assert difference_interval([], []) is None
    assert share_interval([0.25]) == Interval(0.25, None, None, 1)


def test_nothing_solved_is_not_surely_nothing() -> None:
    none, every = share_interval([0.0] * 30), share_interval([1.0] * 30)
    assert none is not None and every is not None
    assert (none.mean, none.low) == (0.0, 0.0)
    assert none.high == pytest.approx(0.1261, abs=1e-4)
    assert (every.mean, every.high) == (1.0, 1.0)
    assert every.low == pytest.approx(1 - 0.1261, abs=1e-4)


def test_problems_that_are_each_right_or_wrong_get_wilsons_interval() -> None:
    """With values of 0 and 1 alone the factor is 1, and what is left is Wilson's formula with Student's quantile."""
    found = share_interval([1.0] * 12 + [0.0] * 18)
    assert found is not None
    n, p, t2 = 29, 0.4, t_quantile(29) ** 2
    center = (p + t2 / (2 * n)) / (1 + t2 / n)
    half = math.sqrt(t2 * (p * (1 - p) / n + t2 / (4 * n * n))) / (1 + t2 / n)
    assert (found.low, found.high) == (pytest.approx(center - half), pytest.approx(center + half))


def test_problems_that_vary_less_than_right_or_wrong_get_a_narrower_interval() -> None:
    some = share_interval([0.3, 0.5, 0.4, 0.6, 0.2] * 6)
    all_or_nothing = share_interval([1.0, 0.0, 0.0, 1.0, 0.0] * 6)
    assert some is not None and all_or_nothing is not None
    assert some.mean == pytest.approx(all_or_nothing.mean)
    assert some.high is not None and some.low is not None
    assert all_or_nothing.high is not None and all_or_nothing.low is not None
    assert some.high - some.low < 0.4 * (all_or_nothing.high - all_or_nothing.low)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=60))
@settings(max_examples=200)
def test_an_interval_of_shares_holds_its_mean_and_stays_between_0_and_1(values: list[float]) -> None:
    found = share_interval(values)
    assert found is not None and found.low is not None and found.high is not None
    assert 0 <= found.low <= found.mean + 1e-12
    assert found.mean - 1e-12 <= found.high <= 1
    assert found.low < found.high


@given(st.lists(st.floats(0, 1), min_size=2, max_size=40))
@settings(max_examples=100)
def test_right_and_wrong_are_treated_alike(values: list[float]) -> None:
    low, high = share_limits(torch.tensor(values, dtype=torch.float64))
    mirrored_low, mirrored_high = share_limits(1 - torch.tensor(values, dtype=torch.float64))
    assert float(low) == pytest.approx(1 - float(mirrored_high), abs=1e-9)
    assert float(high) == pytest.approx(1 - float(mirrored_low), abs=1e-9)


def test_more_problems_narrow_an_interval_as_the_square_root() -> None:
    draw = random.Random(0)
    values = [draw.random() for _ in range(4000)]
    few, many = share_interval(values[:1000]), share_interval(values)
    assert few is not None and many is not None
    assert few.high is not None and few.low is not None and many.high is not None and many.low is not None
    assert (few.high - few.low) / (many.high - many.low) == pytest.approx(2, rel=0.05)


def test_lengths_get_students_interval() -> None:
    found = mean_interval([10.0, 12.0, 14.0])
    half = t_quantile(2) * 2 / math.sqrt(3)
    assert found == Interval(12.0, pytest.approx(12 - half), pytest.approx(12 + half), 3)


def test_lengths_and_entropies_are_not_below_zero_at_two_problems() -> None:
    for values in ([10.0, 900.0], [0.01, 0.6]):
        found = mean_interval(values)
        assert found is not None and found.low == 0.0
        assert found.high is not None and found.high > max(values)
    # Rounding may leave a mean a little below 0; the interval still holds it.
    found = mean_interval([-1e-4, -1e-4])
    assert found is not None and found.low == found.mean == -1e-4


def test_a_difference_is_paired_by_problem() -> None:
    easy_and_hard = [0.9, 0.1] * 15
    found = difference_interval([value + 0.05 for value in easy_and_hard], easy_and_hard)
    assert found is not None and found.low is not None and found.high is not None
    assert found.mean == pytest.approx(0.05)
    noisy = [value + (0.1 if n % 3 else 0.0) for n, value in enumerate(easy_and_hard)]
    told = difference_interval(noisy, easy_and_hard)
    assert told is not None and told.low is not None and told.low > 0, "the spread over problems cancels"


def test_two_models_that_answer_alike_are_not_proven_equal() -> None:
    found = difference_interval([0.5] * 30, [0.5] * 30)
    assert found is not None and found.low is not None and found.high is not None
    assert found.mean == 0
    assert found.low == pytest.approx(-0.1261, abs=1e-4)
    assert found.high == pytest.approx(0.1261, abs=1e-4)


def test_differences_need_the_same_problems() -> None:
    with pytest.raises(ValueError, match="shorter"):
        difference_interval([0.1, 0.2], [0.1])


def test_a_mean_of_benchmarks_is_better_known_than_each_of_them() -> None:
    parts = [Interval(0.2, 0.1, 0.4, 30), Interval(0.6, 0.5, 0.7, 40)]
    found = average(parts)
    assert found.mean == pytest.approx(0.4)
    assert found.low == pytest.approx(0.4 - math.hypot(0.1, 0.1) / 2)
    assert found.high == pytest.approx(0.4 + math.hypot(0.2, 0.1) / 2)
    assert found.problems == 70


def test_a_mean_of_benchmarks_of_which_one_has_no_interval_has_none() -> None:
    found = average([Interval(0.2, 0.1, 0.4, 30), Interval(1.0, None, None, 1)])
    assert found == Interval(0.6, None, None, 31)


@pytest.mark.parametrize("samples", coverage.SAMPLES)
@pytest.mark.parametrize("difficulty", coverage.PLAUSIBLE, ids=lambda difficulty: difficulty.name)
def test_with_30_problems_95_percent_means_95_percent(difficulty: coverage.Difficulty, samples: int) -> None:
    held, _ = coverage.coverage(difficulty, samples, ROUNDS)
    assert held == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize("samples", coverage.SAMPLES)
@pytest.mark.parametrize("difficulty", coverage.EDGES, ids=lambda difficulty: difficulty.name)
def test_where_nearly_nothing_is_solved_the_interval_errs_on_the_wide_side(
    difficulty: coverage.Difficulty, samples: int
) -> None:
    held, plain = coverage.coverage(difficulty, samples, ROUNDS)
    assert held >= 0.93
    assert plain < held, "Student's t holds the truth less often"


@pytest.mark.parametrize("samples", coverage.SAMPLES)
@pytest.mark.parametrize("pair", coverage.PAIRS, ids=str)
def test_differences_of_two_models_are_covered_too(pair: tuple[float, float, float, float], samples: int) -> None:
    assert coverage.paired_coverage(pair, samples, ROUNDS) == pytest.approx(0.95, abs=0.015)


def test_the_mean_of_benchmarks_is_covered_too() -> None:
    """Three benchmarks of 30 problems and three levels of difficulty, put together 2,000 times."""
    parts = (coverage.spikes(0.8, 0.0), coverage.logit_normal(-2, 2), coverage.spikes(0.2, 0.6))
    truth = sum(part.mean for part in parts) / 3
    generator = torch.Generator().manual_seed(1)
    exams = []
    for part in parts:
        chance = part.solve_rates(torch.rand(2000, 30, generator=generator, dtype=torch.float64))
        scores = torch.binomial(torch.full_like(chance, 4), chance, generator=generator) / 4
        exams.append([[*row, 30] for row in torch.stack([scores.mean(-1), *share_limits(scores)], 1).tolist()])
    found = [average([Interval(*row) for row in rows]) for rows in zip(*exams, strict=True)]
    held = sum(mean.low <= truth <= mean.high for mean in found if mean.low is not None and mean.high is not None)
    assert held / 2000 == pytest.approx(0.95, abs=0.015)


def test_the_simulation_would_notice_a_wrong_interval() -> None:
    _, plain = coverage.coverage(coverage.spikes(0.9, 0.0), 4, ROUNDS)
    assert plain < 0.9


def test_the_simulation_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    coverage.coverage(coverage.PLAUSIBLE[0], 4, 10)
    assert torch.rand(1) == expected


def test_the_documents_table_is_what_the_simulation_gives() -> None:
    """To within what another version of torch may draw."""

    def numbers(text: str) -> dict[str, list[float]]:
        cells = [line.split("|") for line in text.splitlines() if re.match(r"\| (log-odds|\d+% never)", line)]
        return {row[1].strip(): [float(cell.strip(" %")) for cell in row[2:-1]] for row in cells}

    made, written = numbers(coverage.table(ROUNDS)), numbers((ROOT / "docs/evaluation.md").read_text())
    assert len(made) == len(coverage.PLAUSIBLE) + len(coverage.EDGES) + len(coverage.PAIRS)
    assert written.keys() == made.keys()
    for name, values in made.items():
        assert written[name] == pytest.approx(values, abs=1.0), name
