"""Alarms over conversations with tools: each rings for its own problem, and none where a policy learns to use them."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.insight.made_metrics import after, alarms_of, first_rings, made_run
from trimtab.insight.alarms import ALARM_KINDS

TROUBLE = 40  # the step after which a run goes wrong
HEALTHY: dict[str, Any] = {
    "tools__failed_share": 0.1,
    "conversation__void_share": 0.05,
    "conversation__called_share": 0.6,
    "time__tools_wait_share": 0.1,
}
TOOL_ALARMS = ("failing_calls", "void_turns", "calls_vanish", "tool_wait")


def rings(**changes: Any) -> dict[str, int]:
    return {name: step for name, step in first_rings(made_run(**{**HEALTHY, **changes})).items() if name in TOOL_ALARMS}


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_with_tools_rings_nothing(seed: int) -> None:
    assert first_rings(made_run(400, seed, **HEALTHY)) == {}


@pytest.mark.parametrize(
    ("alarm", "changes"),
    [
        ("failing_calls", {"tools__failed_share": after(TROUBLE, 0.7, 0.1)}),
        ("failing_calls", {"tools__failed_share": after(TROUBLE, 0.35, 0.1)}),
        ("void_turns", {"conversation__void_share": after(TROUBLE, 0.6, 0.05)}),
        ("void_turns", {"conversation__void_share": after(TROUBLE, 0.25, 0.05)}),
        ("calls_vanish", {"conversation__called_share": after(TROUBLE, 0.05, 0.6), "eval__accuracy": 0.35}),
        ("tool_wait", {"time__tools_wait_share": after(TROUBLE, 0.8, 0.1)}),
    ],
)
def test_each_trouble_rings_its_own_alarm_alone_and_soon(alarm: str, changes: dict[str, Any]) -> None:
    found = rings(**changes)
    assert set(found) == {alarm} and TROUBLE < found[alarm] <= TROUBLE + 15


def test_a_policy_that_learns_to_call_rings_nothing() -> None:
    assert (
        rings(
            tools__failed_share=lambda step: max(0.9 - 0.02 * step, 0.05),
            conversation__void_share=lambda step: max(0.8 - 0.02 * step, 0.02),
            conversation__called_share=lambda step: min(0.02 * step, 0.9),
        )
        == {}
    )


def test_one_that_does_without_tools_and_answers_better_rings_nothing() -> None:
    better = {"conversation__called_share": after(TROUBLE, 0.05, 0.6), "eval__accuracy": after(10, 0.8, 0.4)}
    assert rings(**better) == {}


def test_one_that_hardly_called_at_the_start_cannot_give_it_up() -> None:
    assert rings(conversation__called_share=after(TROUBLE, 0.0, 0.05), eval__accuracy=0.35) == {}


def test_calls_that_fail_from_the_first_step_to_the_last_ring() -> None:
    (alarm,) = alarms_of(made_run(30, noise=0.0, **{**HEALTHY, "tools__failed_share": 0.8}))
    assert (alarm.alarm, alarm.step) == ("failing_calls", 17)
    assert alarm.message == "80 % of the calls of tools fail"
    assert alarm.evidence["tools/failed_share"]["limit"] == 0.5
    assert "tools.timeout" in alarm.suggestion


def test_a_run_without_tools_does_without_these_alarms() -> None:
    assert rings(**dict.fromkeys(HEALTHY)) == {}
    assert set(TOOL_ALARMS) < set(ALARM_KINDS)


@pytest.mark.parametrize("metric", ["agent__failed_share", "agent__timeout_share"])
def test_an_agent_that_goes_on_failing_rings_its_alarm_and_not_that_of_rules(metric: str) -> None:
    healthy = {"agent__failed_share": 0.0, "agent__timeout_share": 0.0, "reward__crashed_share": 0.0}
    assert first_rings(made_run(noise=0.0, **healthy)) == {}
    broken = healthy | {metric: after(TROUBLE, 0.2, 0.0), "reward__crashed_share": after(TROUBLE, 0.2, 0.0)}
    found = alarms_of(made_run(noise=0.0, **broken))
    assert {alarm.alarm for alarm in found} == {"agent"}
    assert TROUBLE < found[0].step <= TROUBLE + 5
    assert "20 % of the rollouts" in found[0].message or "20 % took too long" in found[0].message


def test_one_step_in_which_agents_fail_rings_nothing() -> None:
    once = {"agent__failed_share": lambda step: 0.3 * (step == TROUBLE), "agent__timeout_share": 0.0}
    assert "agent" not in first_rings(made_run(noise=0.0, **once))
