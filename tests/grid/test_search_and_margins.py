"""Margins are the strongest stress that most seeds survive, and the search finds them with few runs."""

from __future__ import annotations

import pytest

from trimtab.experiments.grid import Axis, AxisTable, RunFigures, parse_axis
from trimtab.experiments.grid.plan import check_search, next_value

LR = Axis("update.lr", ("1", "2", "4", "8"))


def run(objective: str, value: str, seed: int, survived: bool | None) -> RunFigures:
    return RunFigures(
        objective, LR.key, value, seed, "", "", "", survived, "", None, 1, 0.0, 0.5, None, None, {}, 1.0, {}
    )


def runs(objective: str, **survivors: str) -> list[RunFigures]:
    """Runs by value: `x2="110"` are the seeds that survive the value 2."""
    return [
        run(objective, value.removeprefix("x"), seed, None if lived == "?" else lived == "1")
        for value, seeds in survivors.items()
        for seed, lived in enumerate(seeds)
    ]


def test_a_margin_is_the_strongest_stress_that_two_of_three_seeds_survive() -> None:
    grid = runs("a", x1="111", x2="110", x4="100", x8="000") + runs("b", x1="111", x2="111", x4="111", x8="011")
    found = AxisTable(LR, ["a", "b"], grid).margins
    assert (found["a"].value, found["b"].value) == ("2", "8")
    assert (found["a"].multiple, found["b"].multiple) == (1.0, 4.0)
    assert (found["a"].low, found["a"].high) == ("1", "4")
    assert AxisTable(LR, ["a", "b"], grid).stable == "2"


def test_an_objective_that_survives_nothing_has_no_margin() -> None:
    grid = runs("a", x1="000", x2="000") + runs("b", x1="111", x2="000")
    found = AxisTable(LR, ["a", "b"], grid).margins
    assert found["a"].value is None
    assert found["b"].multiple is None
    assert AxisTable(LR, ["a", "b"], grid).stable is None


def test_a_setting_holds_only_if_enough_seeds_are_known_to_survive() -> None:
    assert AxisTable(LR, ["a"], runs("a", x1="111", x2="11?", x4="1??", x8="???")).margins["a"].value == "2"


def test_one_seed_has_a_margin_without_an_interval() -> None:
    found = AxisTable(LR, ["a"], runs("a", x1="1", x2="0")).margins["a"]
    assert (found.value, found.low, found.high) == ("1", None, None)


def search(axis: Axis, limit: float) -> dict[str, bool]:
    """What a search tries for an objective that breaks above a limit."""
    falling = float(axis.values[0]) > float(axis.values[1])
    tried: dict[str, bool] = {}
    while (value := next_value(axis, tried)) is not None:
        assert value not in tried
        tried[value] = float(value) >= limit if falling else float(value) <= limit
    return tried


@pytest.mark.parametrize("limit", [0.9e-5, 1e-5, 3e-5, 1.1e-4, 9e-4, 2e-3])
def test_the_search_brackets_the_margin_within_a_factor(limit: float) -> None:
    tried = search(Axis("update.lr", ("1e-5", "1e-3")), limit)
    lived = [float(value) for value, survived in tried.items() if survived]
    broken = [float(value) for value, survived in tried.items() if not survived]
    if broken and lived:
        assert max(lived) <= limit < min(broken)
        assert min(broken) / max(lived) <= 1.5
    assert len(tried) <= 9


def test_the_search_stops_at_its_ends() -> None:
    assert search(Axis("update.lr", ("1e-5", "1e-3")), 1e-6) == {"1e-5": False}
    assert list(search(Axis("update.lr", ("1", "3")), 9)) == ["1", "2", "3"]


def test_the_search_goes_down_where_stress_is_a_smaller_value_and_takes_whole_numbers_only() -> None:
    assert list(search(Axis("rollout.prompts", ("32", "4")), 8)) == ["32", "16", "8", "4"]


@pytest.mark.parametrize(
    ("limit", "tried"),
    [(0, ["1"]), (1, ["1", "3", "2"]), (2, ["1", "3", "2"]), (3, ["1", "3", "4"]), (9, ["1", "3", "4"])],
)
def test_a_list_of_values_is_bisected_after_the_weakest(limit: float, tried: list[str]) -> None:
    axis = parse_axis("update.lr=1,2,3,4")
    check_search(axis)
    assert list(search(axis, limit)) == tried


@pytest.mark.parametrize("axis", ["update.lr=1e-5", "reward.noise=0,0.5", "model.precision=a,b"])
def test_a_search_needs_two_positive_numbers(axis: str) -> None:
    with pytest.raises(ValueError, match="two positive numbers"):
        check_search(parse_axis(axis))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("update.lr", "write section.key=value,value"),
        ("update.lr=", "write section.key=value,value"),
        ("update.lr=1,,2", "write section.key=value,value"),
        ("=1,2", "write section.key=value,value"),
        ("update.lr=1,2,1", "1 is given twice"),
        ("update.lr=1,3,2", "order of rising stress"),
    ],
)
def test_an_axis_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_axis(text)


def test_an_axis_of_words_keeps_their_order() -> None:
    assert parse_axis("model.precision = fp32, bf16").values == ("fp32", "bf16")
