"""The alarm over trim: it rings where the entropy cannot be held, says why, and is silent where it is held."""

from __future__ import annotations

import re
from typing import Any

import pytest

from helpers.insight.made_metrics import Curve, after, alarms_of, first_rings, made_run
from trimtab.insight.alarms import alarm_monitor
from trimtab.trainer.config import load
from trimtab.trainer.train.alarm_actions import Alarm

LOST = 60  # the step after which the entropy is below its band
HELD: dict[str, Curve] = {
    "trim__target": 0.3,
    "policy__entropy": lambda step: max(0.28, 0.6 * 0.99**step),
    "trim__drive": after(LOST, 0.2, 0.0),
    "trim__weight": after(LOST, 1.4, 1.0),
    "trim__leverage": 0.4,
    "trim__saturated": 0.0,
    "trim__r2": 0.1,
    "trim__gain": 3.0,
}
BELOW: dict[str, Curve] = {"policy__entropy": after(LOST, 0.2, 0.4)}


def control_alarms(steps: int = 200, seed: int = 0, **changes: Curve) -> list[Alarm]:
    found = alarms_of(made_run(steps, seed, 0.01, **{**HELD, **changes}), target=0.3)
    return [alarm for alarm in found if alarm.alarm == "control"]


@pytest.mark.parametrize("seed", range(10))
def test_a_run_whose_entropy_is_held_rings_nothing(seed: int) -> None:
    assert alarms_of(made_run(300, seed=seed, **HELD), target=0.3) == []


@pytest.mark.parametrize("seed", range(5))
def test_an_entropy_that_never_falls_to_its_floor_rings_nothing(seed: int) -> None:
    never: dict[str, Any] = {"policy__entropy": 0.6, "trim__drive": 0.0, "trim__weight": 1.0, "trim__r2": 0.001}
    assert control_alarms(seed=seed, **never) == []


def test_an_entropy_below_its_band_is_no_alarm_while_trim_can_still_act() -> None:
    assert control_alarms(**BELOW) == []


def test_a_weight_at_its_limit_for_some_steps_is_no_alarm() -> None:
    short = {"trim__saturated": after(LOST + 60, 0.0, after(LOST + 55, 1.0, 0.0))}
    assert control_alarms(**BELOW, **short) == []


CAUSES: dict[str, tuple[dict[str, Curve], str, str]] = {
    "mixed groups": ({"groups__mixed_share": after(LOST, 0.01, 0.7)}, "rewards differ in", "rollout.dynamic_sampling"),
    "leverage": ({"trim__leverage": after(LOST, 0.003, 0.4)}, "leverage of 0.00", "rollout.samples"),
    "saturated": (
        {"trim__saturated": after(LOST, 1.0, 0.0), "trim__weight": after(LOST, 5.0, 1.0)},
        "at its limit",
        "objective.max_weight",
    ),
    "no correlation": ({"trim__r2": 0.002}, "do not follow trim's prediction (R^2 0.00", "update.lr"),
    "a prediction of the wrong sign": ({"trim__gain": -1.0}, "gain -", "update.per_step"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_rings_once_with_its_own_words_and_advice(cause: str) -> None:
    changes, words, advice = CAUSES[cause]
    (alarm,) = control_alarms(**BELOW, **changes)
    assert LOST + 45 <= alarm.step <= LOST + 60
    assert re.match(r"entropy is 0\.(2|19)\d*, below its target of 0\.(3|29)\d* for 50 steps, and ", alarm.message)
    assert words in alarm.message and advice in alarm.suggestion
    assert alarm.evidence["policy/entropy"]["now"] == pytest.approx(0.2, rel=0.1)


def test_a_run_that_starts_below_its_floor_has_time_to_rise() -> None:
    rising: dict[str, Curve] = {"policy__entropy": lambda step: min(0.29, 0.1 + 0.004 * step), "trim__drive": 0.3}
    assert control_alarms(**rising, trim__saturated=lambda step: float(step < 30)) == []


def test_a_run_without_trim_has_no_such_alarm() -> None:
    assert "control" not in first_rings(made_run(200, policy__entropy=0.1), target=0.3)


def test_the_target_of_other_alarms_is_the_one_that_is_logged() -> None:
    """A floor that falls over the run is no reason to call an entropy that follows it collapsed."""
    falling: dict[str, Curve] = {
        "policy__entropy": lambda step: 0.7 * 0.99**step,
        "trim__target": lambda step: 0.6 * 0.99**step,
        "reward__accuracy": lambda step: 0.2 + 0.003 * step,
        "eval__accuracy": lambda step: 0.2 + 0.003 * step,
    }
    assert "entropy_collapse" not in first_rings(made_run(200, **falling), target=0.6)
    assert "entropy_collapse" in first_rings(made_run(200, **{**falling, "trim__target": None}), target=0.6)


def test_the_target_is_that_of_any_controller() -> None:
    for name, target in (("dapo + trim(floor=0.4)", 0.4), ("stare(target=0.2)", 0.2), ("dapo", None)):
        assert alarm_monitor(load("addition", [f"objective.name={name}"])).run.entropy_target == target
    assert load("addition", ["objective.name=dapo + trim(relative=true)"]).build_objective().entropy_target is None
