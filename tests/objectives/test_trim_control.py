"""trim's controller: a PI controller on the distance of the rollout's entropy from its band, saved and resumed."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import trimtab as tt
from helpers.objectives.batches import batch, observed
from helpers.objectives.reference_control import trim_drive
from trimtab.objectives.rules.trim import TrimControl

BANDS: list[dict[str, Any]] = [
    {"floor": 0.3},
    {"floor": 0.3, "ceiling": 0.5},
    {"floor": 0.3, "gain": 4.0, "integral_gain": 0.5},
    {"floor": 0.3, "ceiling": 0.35, "gain": 0.0, "integral_gain": 1.0},
    {"floor": 0.8, "ceiling": 1.2, "relative": True},
    {"floor": 0.5, "ceiling": 0.7, "fall": 0.25, "fall_steps": 7},
    {"floor": 0.9, "relative": True, "fall": 0.0, "fall_steps": 20},
    {"floor": 0.0, "ceiling": 0.0},
]
DEFAULTS: dict[str, Any] = {
    "ceiling": None, "relative": False, "fall": 1.0, "fall_steps": 1000, "gain": 0.5, "integral_gain": 0.02,
}  # fmt: skip


def walk(seed: int, rollouts: int = 40) -> list[float]:
    """Entropies that wander about 0.4, jump now and then, and are not finite once in a while."""
    rng, entropy, found = random.Random(seed), 0.4, []
    for _ in range(rollouts):
        entropy = rng.uniform(0, 1) if rng.random() < 0.15 else abs(entropy + rng.gauss(0, 0.06))
        found.append(rng.choice([math.nan, math.inf, -math.inf]) if rng.random() < 0.1 else entropy)
    return found


def after(entropies: list[float], **options: Any) -> TrimControl:
    control = TrimControl(**options)
    for entropy in entropies:
        control.observe(entropy)
    return control


def saved(control: TrimControl) -> str:
    """The state as a checkpoint holds it: NaN is no JSON."""
    return json.dumps(control.state_dict(), allow_nan=False)


# --- the drive


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_the_drive_is_proportional_to_the_error_plus_its_integral(band: dict[str, Any]) -> None:
    sides = set()
    for seed in range(20):
        entropies, control = walk(seed), TrimControl(**band)
        for number, entropy in enumerate(entropies, 1):
            control.observe(entropy)
            where, drive = trim_drive(entropies[:number], **DEFAULTS | band)
            sides.add(where)
            if where:
                assert control.drive == pytest.approx(where * drive, abs=1e-12)
                assert math.copysign(1, control.drive) == where
            else:
                assert control.drive is None
    assert 1 in sides or band["floor"] == 0
    assert -1 in sides or band.get("ceiling") is None


def test_the_first_error_is_worth_its_gain() -> None:
    assert after([0.15], floor=0.3, gain=0.5, integral_gain=0.02).drive == pytest.approx(0.5 * 0.5 + 0.02 * 0.5)
    assert after([0.6], floor=0.3, ceiling=0.4, gain=0.5, integral_gain=0.02).drive == pytest.approx(-0.26)
    assert after([9.0], floor=0.3, ceiling=0.4, gain=0.5, integral_gain=0.0).drive == -0.5  # an error of at most 1


@pytest.mark.parametrize("entropy", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("before", [[], [0.2], [0.2, 0.9], [0.4]])
def test_an_entropy_that_is_not_finite_changes_nothing(entropy: float, before: list[float]) -> None:
    control = after(before, floor=0.3, ceiling=0.5)
    state, drive = saved(control), control.drive
    control.observe(entropy)
    assert (saved(control), control.drive) == (state, drive)


def test_the_band_is_exact_at_its_ends() -> None:
    for entropy in (0.3, 0.4, 0.5):
        assert after([entropy], floor=0.3, ceiling=0.5).drive is None
    assert after([math.nextafter(0.3, 0)], floor=0.3, ceiling=0.5).drive is not None
    assert after([math.nextafter(0.5, 1)], floor=0.3, ceiling=0.5).drive is not None


# --- the band


def test_a_relative_band_is_a_multiple_of_the_first_rollouts_entropy() -> None:
    control = TrimControl(floor=0.5, ceiling=1.5, relative=True)
    assert control.drive is None and control.target == 0
    control.observe(math.nan)
    for entropy in (0.8, 0.1, 3.0):
        control.observe(entropy)
        assert control.band == (pytest.approx(0.4), pytest.approx(1.2))


def test_a_relative_floor_is_no_target_before_the_first_rollout() -> None:
    objective = tt.objective("dapo + trim(floor=0.5, relative=true)")
    assert objective.entropy_target is None
    objective.controllers["trim"].observe(0.8)
    assert objective.entropy_target == pytest.approx(0.4)


def test_a_falling_band_falls_linearly_from_the_first_rollout_on_and_then_stays() -> None:
    control, floors = TrimControl(floor=0.4, ceiling=0.8, fall=0.5, fall_steps=4), []
    for _ in range(7):
        control.observe(0.6)
        floors.append(control.band[0])
        assert control.band[1] == pytest.approx(2 * control.band[0])
    assert floors == pytest.approx([0.4, 0.35, 0.3, 0.25, 0.2, 0.2, 0.2])


def test_a_band_that_is_relative_and_falls_does_both() -> None:
    control = after([2.0] * 11, floor=0.5, relative=True, fall=0.2, fall_steps=10)
    assert control.band == (pytest.approx(0.2), math.inf)


def test_rollouts_without_tokens_do_not_lower_a_falling_band() -> None:
    control = after([0.6, math.nan, math.nan, 0.6], floor=0.4, fall=0.5, fall_steps=4)
    assert control.band[0] == pytest.approx(0.35)


def test_a_ceiling_of_zero_always_pushes_down() -> None:
    control = after([1e-9], floor=0.0, ceiling=0.0, gain=0.5, integral_gain=0.02)
    assert control.drive == pytest.approx(-0.52)
    assert after([0.0], floor=0.0, ceiling=0.0).drive is None


def test_a_first_rollout_without_entropy_leaves_a_relative_floor_at_zero() -> None:
    assert after([0.0, 0.5], floor=0.5, relative=True).drive is None
    assert after([0.0, 0.5], floor=0.5, ceiling=2.0, relative=True).drive == pytest.approx(-0.52)


def test_a_floor_above_the_ceiling_is_an_error_that_names_both() -> None:
    with pytest.raises(ValueError, match=r"trim: option floor=0.5 must be at most ceiling, which is 0.2"):
        tt.objective("dapo + trim(floor=0.5, ceiling=0.2)")
    with pytest.raises(ValueError, match=r"trim: option floor=0.3 must be at most ceiling, which is 0.2"):
        tt.objective("dapo + trim(ceiling=0.2)")


# --- never away from the band, and no wind-up


@pytest.mark.parametrize("long", [1, 10, 1000])
def test_a_jump_to_the_other_side_of_the_band_never_drives_away_from_it(long: int) -> None:
    for side, other in itertools.permutations([0.05, 0.9]):
        control = after([side] * long, floor=0.3, ceiling=0.4)
        control.observe(other)
        assert control.drive is not None
        assert math.copysign(1, control.drive) == (1 if other < 0.3 else -1)


@pytest.mark.parametrize("host", ["dapo", "gspo"])
def test_a_plan_after_a_jump_is_not_pushed_out_of_the_band(host: str) -> None:
    for seed in range(10):
        tokens = batch(seed)
        alone = observed(tt.objective(f"{host} + trim(floor=0)"), tokens).plan(tokens)
        unweighted = alone.metrics["trim/predicted_change"]
        for side, other in itertools.permutations([0.05, 0.9]):
            objective = tt.objective(f"{host} + trim(floor=0.3, ceiling=0.4)")
            for entropy in [side] * 300 + [other]:
                objective.controllers["trim"].observe(entropy)
            change = objective.plan(tokens).metrics["trim/predicted_change"]
            assert change >= unweighted if other < 0.3 else change <= unweighted


def test_a_long_time_above_the_floor_leaves_nothing_behind() -> None:
    fresh, late = after([0.2], floor=0.3), after([0.9] * 5000 + [0.2], floor=0.3)
    assert late.drive == fresh.drive


def test_a_long_saturation_is_forgotten_as_soon_as_a_short_one() -> None:
    short, long = after([0.0] * 60, floor=0.3), after([0.0] * 5000, floor=0.3)
    assert short.drive == long.drive == 1
    assert short.integral == long.integral == 1
    for control in (short, long):  # 100 % above the floor takes one integral_gain off per rollout
        for _ in range(51):
            control.observe(0.6)
        assert control.integral == 0


def test_the_integral_runs_down_within_the_band_with_the_distance_from_the_end_it_pushes_from() -> None:
    near, far = (after([0.1] * 10 + [entropy] * 10, floor=0.3) for entropy in (0.31, 0.45))
    before = after([0.1] * 10, floor=0.3).integral
    assert near.integral == pytest.approx(before - 10 * 0.02 * (0.31 / 0.3 - 1))
    assert far.integral == pytest.approx(before - 10 * 0.02 * 0.5)
    below = after([0.9] * 10 + [0.4] * 3, floor=0.3, ceiling=0.5)
    assert below.integral == pytest.approx(-10 * 0.02 * 0.8 + 3 * 0.02 * 0.2)


# --- in a closed loop


def closed_loop(integral_gain: float, pull: float, floor: float = 0.3, steps: int = 500, **options: Any) -> list[float]:
    """Entropies of a first-order plant: g times the predicted change, and a pull that the theory does not know."""
    rng, tokens = random.Random(0), batch(3, rows=20)
    # By themselves these updates raise the entropy; with the opposite advantages they lower it.
    tokens = replace(tokens, advantage=math.copysign(1, pull) * tokens.advantage)
    objective = tt.objective("dapo", trim={"floor": floor, "integral_gain": integral_gain, **options})
    entropy, found = 0.6, []
    for _ in range(steps):
        objective.controllers["trim"].observe(entropy)
        predicted = float(objective.plan(tokens).metrics["trim/predicted_change"])
        entropy = max(1e-3, entropy + 0.3 * predicted + pull + rng.gauss(0, 1e-4))
        found.append(entropy)
    return found


def end(entropies: list[float]) -> float:
    return sum(entropies[-100:]) / 100


def test_the_integral_removes_the_offset_that_a_proportional_controller_leaves() -> None:
    assert end(closed_loop(0.0, -0.008, gain=0.0)) < 0.1  # balanced to first order alone, the pull wins
    proportional, integral = (end(closed_loop(gain, -0.008)) for gain in (0.0, 0.02))
    assert proportional < 0.9 * 0.3
    assert integral == pytest.approx(0.3, rel=0.03)


def test_a_ceiling_holds_an_entropy_that_is_pulled_up() -> None:
    assert end(closed_loop(0.02, +0.004, floor=0.1)) > 1
    assert end(closed_loop(0.02, +0.004, floor=0.1, ceiling=0.3)) == pytest.approx(0.3, rel=0.02)


# --- saved and resumed


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_a_resumed_controller_goes_on_as_if_it_had_never_stopped(band: dict[str, Any]) -> None:
    entropies = walk(5)
    for cut in range(0, len(entropies), 3):
        whole = after(entropies[:cut], **band)
        resumed = TrimControl(**band)
        resumed.load_state_dict(json.loads(saved(whole)))
        assert saved(resumed) == saved(whole) and resumed.drive == whole.drive and resumed.band == whole.band
        for entropy in entropies[cut:]:
            whole.observe(entropy)
            resumed.observe(entropy)
            assert saved(resumed) == saved(whole) and resumed.drive == whole.drive and resumed.band == whole.band


def test_a_loaded_state_replaces_all_of_the_old_one() -> None:
    control = after([0.1, 0.2], floor=0.3)
    control.load_state_dict(TrimControl(floor=0.3).state_dict())
    assert saved(control) == saved(TrimControl(floor=0.3))
    assert control.drive is None


STATE = {"integral": 0.1, "rollouts": 2.0, "first": 0.5, "entropy": 0.2, "change": -0.3}


@pytest.mark.parametrize(
    "state",
    [
        {},
        {name: value for name, value in STATE.items() if name != "integral"},
        {name: value for name, value in STATE.items() if name != "rollouts"},
        {**STATE, "boost": 1.1},
        {**STATE, "integral": math.nan},
        {**STATE, "change": math.inf},
        {**STATE, "entropy": "high"},
    ],
    ids=str,
)
def test_a_state_that_is_none_raises_and_changes_nothing(state: dict[str, Any]) -> None:
    control = after([0.6, 0.1], floor=0.3)
    before = saved(control)
    with pytest.raises(ValueError, match=r"state of trim|could not convert"):
        control.load_state_dict(state)
    assert saved(control) == before


def test_a_bad_state_of_one_controller_changes_none_of_the_others() -> None:
    objective, tokens = tt.objective("stare(adaptive=true) + trim"), batch(0)
    before = observed(objective, tokens).state_dict()
    observed(other := tt.objective("stare(adaptive=true) + trim"), tokens)
    other.observe(tokens)
    state = other.state_dict()
    state["trim"]["integral"] = math.nan
    with pytest.raises(ValueError, match="state of trim"):
        objective.load_state_dict(state)
    assert objective.state_dict() == before


@pytest.mark.parametrize("state", [{}, {"current": 0.1}, {"current": math.nan, "below": 1.0}], ids=str)
def test_a_state_that_is_no_entropy_bonuss_raises_and_changes_nothing(state: dict[str, float]) -> None:
    objective = tt.objective("dapo + entropy_bonus(target=9)")
    before = observed(objective, batch(0)).state_dict()
    with pytest.raises(ValueError, match="entropy bonus"):
        objective.load_state_dict({"entropy_bonus": state})
    assert objective.state_dict() == before


def test_the_coefficient_of_an_entropy_bonus_follows_the_entropy_and_is_resumed() -> None:
    name = "dapo + entropy_bonus(coef=0.01, target=0.3, rate=0.005)"
    one, other, tokens = tt.objective(name), tt.objective(name), batch(0)
    expected = [(0.2, 0.015), (0.1, 0.02), (0.4, 0.0), (math.nan, 0.0), (0.2, 0.02), (0.3, 0.0), (9.0, 0.0)]
    for entropy, coefficient in expected:
        one.controllers["entropy_bonus"].observe(entropy)
        other.load_state_dict(json.loads(json.dumps(one.state_dict(), allow_nan=False)))
        for objective in (one, other):
            assert objective.plan(tokens).metrics["entropy_bonus/coef"].item() == pytest.approx(coefficient)


@pytest.mark.parametrize("name", ["dapo + trim(floor=9, gain=2)", "gspo + trim(floor=0, ceiling=0.01, gain=2)"])
def test_an_objective_that_is_resumed_plans_the_same_weights(name: str) -> None:
    one, other = observed(tt.objective(name), batch(1)), tt.objective(name)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for seed in range(3):
        tokens = batch(seed, rows=30)
        weights = [observed(objective, tokens).plan(tokens).weight for objective in (one, other)]
        assert torch.equal(*weights)
        assert bool((weights[0] != 1).any())


def test_objectives_do_not_share_a_controller() -> None:
    one, other = tt.objective("dapo + trim(floor=9)"), tt.objective("dapo + trim(floor=9)")
    observed(one, batch(0))
    assert other.plan(batch(0)).metrics["trim/drive"] == 0
