"""Curves are downsampled without losing a peak, and runs of one objective are averaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.insight.report_runs import Made, data_of, decode_array, make_run
from trimtab.experiments.grid.comparison import LEGEND
from trimtab.insight.report import write_report
from trimtab.insight.report.curves import (
    FEWEST_POINTS,
    POINTS,
    axes_json,
    downsample,
    final_value,
    groups_json,
    mean_and_std,
    points_per_curve,
)
from trimtab.insight.report.run_files import MetricCurve, read_run
from trimtab.trainer.train import summarize_metrics

values = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=400).map(lambda v: np.array(v, np.float32))


@given(values, st.integers(4, 60))
def test_the_highest_and_the_lowest_point_and_both_ends_stay(curve: np.ndarray, points: int) -> None:
    kept = downsample(curve, points)
    assert len(kept) <= points or len(curve) <= points
    assert sorted(set(kept.tolist())) == kept.tolist()
    assert {0, len(curve) - 1} <= set(kept.tolist())
    assert curve[kept].max() == curve.max() and curve[kept].min() == curve.min()


def test_a_short_curve_stays_as_it_is() -> None:
    assert downsample(np.arange(10.0), 2_000).tolist() == list(range(10))


def test_a_single_spike_in_a_million_steps_is_seen() -> None:
    curve = np.zeros(1_000_000, np.float32)
    curve[123_456] = 1.0
    kept = downsample(curve)
    assert 123_456 in kept and len(kept) <= POINTS


@given(st.lists(st.lists(st.floats(-100, 100), min_size=3, max_size=3), min_size=1, max_size=6))
def test_a_band_is_the_mean_and_the_standard_deviation_over_seeds(runs: list[list[float]]) -> None:
    steps = np.array([1, 2, 3], np.int32)
    curves = [MetricCurve(steps, np.array(run)) for run in runs]
    where, mean, spread = mean_and_std(curves)
    assert where.tolist() == [1, 2, 3]
    assert mean == pytest.approx(np.mean(runs, 0))
    expected = np.std(runs, 0, ddof=1) if len(runs) > 1 else np.zeros(3)
    assert spread == pytest.approx(expected, abs=1e-4)


def test_a_run_that_stopped_early_counts_as_far_as_it_went() -> None:
    long = MetricCurve(np.array([1, 2, 3]), np.array([1.0, 2.0, 3.0]))
    short = MetricCurve(np.array([1]), np.array([3.0]))
    steps, mean, spread = mean_and_std([long, short])
    assert steps.tolist() == [1, 2, 3]
    assert mean.tolist() == [2.0, 2.0, 3.0]
    assert spread[0] == pytest.approx(np.sqrt(2)) and spread[1:].tolist() == [0.0, 0.0]


def test_seeds_of_one_objective_are_one_group_and_other_options_another(tmp_path: Path) -> None:
    other = '[objective]\nname = "grpo"\n[run]\nseed = 1\n'
    runs = [
        read_run(make_run(tmp_path / "a", Made(steps=2))),
        read_run(make_run(tmp_path / "b", Made(steps=2))),
        read_run(make_run(tmp_path / "c", Made(steps=2, config=other))),
    ]
    groups = groups_json(runs, 100)
    assert [(group["label"], group["runs"]) for group in groups] == [("stapo (tau_p=0.2)", [0, 1]), ("grpo", [2])]
    reward = groups[0]["curves"]["reward/mean"]
    assert decode_array(reward["steps"]).tolist() == [1, 2]
    assert decode_array(reward["values"]) == pytest.approx([1 / 3, 2 / 3])
    assert decode_array(reward["std"]) == pytest.approx([0, 0], abs=1e-6)
    assert groups[0]["final_values"]["eval/accuracy"] == [0.5, 0.0]


def test_runs_are_compared_by_where_they_ended_and_shares_over_the_whole_run() -> None:
    runs = [np.array([*[9.0] * 9, *[level] * 2]) for level in (1.0, 3.0)]
    curves = [MetricCurve(np.arange(11), values) for values in runs]
    assert final_value("reward/mean", curves) == pytest.approx([2.0, np.sqrt(2)])
    assert final_value("eval/accuracy", curves) == pytest.approx([2.0, np.sqrt(2)])
    assert final_value("tokens/silenced_share", curves)[0] == pytest.approx((2 * 9 * 9 + 2 + 6) / 22)
    assert final_value("reward/mean", curves[:1]) == [1.0, 0.0]


@pytest.mark.parametrize("steps", [1, 3, 12, 39, 100])
def test_the_page_and_the_terminal_average_the_end_of_a_run_over_the_same_steps(steps: int) -> None:
    rewards = [float(step**2) for step in range(1, steps + 1)]
    records = [{"step": step, "reward/mean": reward} for step, reward in enumerate(rewards, 1)]
    (mean, _) = final_value("reward/mean", [curve(list(range(1, steps + 1)), rewards)])
    assert mean == pytest.approx(summarize_metrics(records).reward_end)


def test_the_page_and_the_terminal_name_the_same_steps(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, Made(steps=2)) for name in "ab"]
    page = write_report(runs, tmp_path / "both.html").read_text(encoding="utf-8")
    assert data_of(page)["end_window"] == "the last quarter of the steps, at most 10"
    assert "Reward and entropy: mean over the last quarter of the steps, at most 10." in LEGEND


def test_many_runs_share_the_room_for_points() -> None:
    assert points_per_curve(1) == points_per_curve(3) == POINTS
    assert FEWEST_POINTS == points_per_curve(1_000) < points_per_curve(6) < POINTS


def curve(steps: list[int], values: list[float]) -> MetricCurve:
    return MetricCurve(np.array(steps), np.array(values, np.float32))


def test_time_and_tokens_add_up_over_the_steps() -> None:
    run = {
        "time/rollout": curve([1, 2, 3], [2.0, 2.0, 3.0]),
        "time/update": curve([1, 2, 3], [1.0, 1.0, 1.0]),
        "tokens/count": curve([1, 2, 3], [10.0, 20.0, 5.0]),
    }
    axes = axes_json([run], 100)
    found = {name: {k: decode_array(v).tolist() for k, v in axis.items()} for name, axis in axes.items()}
    assert found["time"] == {"steps": [0, 1, 2, 3], "values": [0.0, 3.0, 6.0, 10.0]}
    assert found["tokens"] == {"steps": [0, 1, 2, 3], "values": [0.0, 10.0, 30.0, 35.0]}
    assert axes_json([{"reward/mean": curve([1], [1.0])}], 100) == {}


def test_the_axis_of_several_runs_is_their_mean_and_never_goes_back() -> None:
    long, short = {"tokens/count": curve([1, 2, 3], [1.0, 1.0, 1.0])}, {"tokens/count": curve([1, 2], [9.0, 9.0])}
    axis = axes_json([long, short], 100)["tokens"]
    assert decode_array(axis["values"]).tolist() == [0.0, 5.0, 10.0, 10.0]
    assert "tokens" not in axes_json([long, {}], 100), "a run without it cannot be drawn"
