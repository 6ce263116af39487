"""Was the entropy held, and did the first-order theory predict how it moved?"""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.objectives.entropy_control import (
    MIN_POINTS,
    WINDOW,
    FitWindow,
    control_sentences,
    entropy_verdict,
    prediction_fit,
    prediction_pairs,
)

NUMBERS = st.lists(st.tuples(st.floats(), st.floats()), max_size=40)


def records(steps: int, gain: float = 2.0, noise: float = 0.0, seed: int = 0, every: int = 1) -> list[dict[str, float]]:
    """Return the metrics of a run whose updates move the entropy by `gain` times AdamW's mean of predictions."""
    rng, mean, made = random.Random(seed), 0.0, [{"step": 0.0, "eval/accuracy": 0.1}]
    for step in range(1, steps + 1):
        predicted = rng.gauss(0, 0.01)
        mean = 0.9 * mean + 0.1 * predicted
        record = {"step": step, "policy/entropy": 0.5, "trim/predicted_change": predicted, "trim/target": 0.4}
        if step % every == 0:
            record["update/entropy_change"] = gain * mean + rng.gauss(0, noise)
        made.append(record)
    return made


# --- the fit


def test_measured_changes_are_paired_with_the_running_mean_of_predictions() -> None:
    rows = records(60, every=3)
    pairs = prediction_pairs(rows)
    assert [step for step, _ in pairs] == list(range(3, 61, 3))
    fit = prediction_fit(pair for _, pair in pairs)
    assert fit is not None
    assert (fit.gain, fit.r2, fit.points) == (pytest.approx(2.0), pytest.approx(1.0), 20)


def test_the_fit_is_a_line() -> None:
    fit = prediction_fit([(1.0, 0.5), (-1.0, 0.1), (math.nan, 9.0), (3.0, 0.9)])
    assert fit is not None
    assert (fit.gain, fit.drift, fit.r2) == (pytest.approx(0.2), pytest.approx(0.3), pytest.approx(1.0))


def test_r2_is_the_squared_correlation() -> None:
    torch = pytest.importorskip("torch")
    pairs = [pair for _, pair in prediction_pairs(records(80, noise=0.01))]
    fit = prediction_fit(pairs)
    expected = torch.corrcoef(torch.tensor(pairs, dtype=torch.float64).T)[0, 1] ** 2
    assert fit is not None and fit.r2 == pytest.approx(float(expected))
    assert 0.05 < fit.r2 < 0.9 and fit.points == 80


@given(NUMBERS)
def test_any_numbers_give_a_share_or_nothing(values: list[tuple[float, float]]) -> None:
    fit = prediction_fit(values)
    assert fit is None or (0 <= fit.r2 <= 1 and math.isfinite(fit.gain))


def test_what_does_not_vary_has_no_fit() -> None:
    assert prediction_fit([(0.1, y) for y in (0.5, 0.6, 0.7)]) is None
    assert prediction_fit([(x, 0.5) for x in (0.1, 0.2, 0.3)]) is None


# --- the window of a run


def test_the_metrics_begin_with_enough_points_and_forget_old_ones() -> None:
    window = FitWindow()
    turned = [*records(150, gain=-1.0), *({**row, "step": row["step"] + 150} for row in records(300, seed=1)[1:])]
    logged = {row["step"]: window.add(row) for row in turned}
    assert not any(logged[step] for step in range(MIN_POINTS)) and logged[MIN_POINTS]
    assert logged[150]["trim/gain"] == pytest.approx(-1.0)
    assert logged[200]["trim/r2"] < 0.9  # both halves are in the window
    assert logged[150 + 5 * WINDOW // 2]["trim/gain"] == pytest.approx(2.0)  # the mean has forgotten the first half too


def test_a_step_without_a_measurement_logs_nothing() -> None:
    window = FitWindow()
    logged = [bool(window.add(row)) for row in records(200, every=4)]
    assert [step for step, found in enumerate(logged) if found] == list(range(80, 201, 4))


def test_a_window_that_is_rebuilt_goes_on_with_the_same_bits() -> None:
    whole, rows = FitWindow(), records(160, noise=0.01)
    expected = [whole.add(row) for row in rows]
    for cut in (1, 19, 20, 21, 90, 101, 102, 140):
        resumed = FitWindow()
        for row in rows[:cut]:
            resumed.add(row)
        assert [resumed.add(row) for row in rows[cut:]] == expected[cut:]


def test_a_run_without_trim_has_no_such_metrics() -> None:
    window = FitWindow()
    rows = ({"step": step, "policy/entropy": 1 / step, "update/entropy_change": 0.1} for step in range(1, 60))
    assert not any(window.add(row) for row in rows)


# --- the verdict


@pytest.mark.parametrize(
    ("entropy", "verdict"),
    [
        ([0.9, 0.6, 0.31, 0.28, 0.3, 0.27], "held"),
        ([0.9, 0.6, 0.3, 0.2, 0.15, 0.1], "below"),
        ([0.9, 0.8, 0.7, 0.6, 0.5, 0.45], "never fell"),
        ([0.9, 0.6, 0.29, 0.4, 0.8, 0.9], "above"),
        ([0.1], "below"),
    ],
)
def test_the_end_of_a_run_is_compared_with_its_target(entropy: list[float], verdict: str) -> None:
    found = entropy_verdict(entropy, [0.3] * len(entropy))
    assert found is not None and found.verdict == verdict
    assert f"{found.entropy:.3g} over the last tenth" in found.words and "target 0.3" in found.words


def test_without_a_target_there_is_no_verdict() -> None:
    assert entropy_verdict([0.5, 0.4], [math.nan, 0.0]) is None
    assert control_sentences([{"step": 1, "policy/entropy": 0.4}]) == []
    assert control_sentences([]) == []


def test_sentences_say_whether_it_was_held_and_what_the_prediction_explains() -> None:
    held, explained = control_sentences(records(100))
    assert "target 0.4" in held
    assert explained.endswith("by R^2 = 1.00 over 100 measurements.")


def test_a_target_that_is_not_logged_comes_from_the_objective() -> None:
    rows = [{"step": step, "policy/entropy": 0.3} for step in range(1, 30)]
    assert control_sentences(rows, 0.3) == ["The entropy was held: 0.3 over the last tenth of the run, target 0.3."]
