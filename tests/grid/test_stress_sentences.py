"""A stress test is told in sentences, and read back from its file whatever is in it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from helpers.stress.made_stress import made_stress
from trimtab.experiments.grid import AxisTable, parse_axis, read_stress
from trimtab.experiments.grid.plan import possible_values


def table(folder: Path, objectives: tuple[str, ...], **survivors: tuple[str, ...]) -> AxisTable:
    """A table whose values are 1, 2, ...: `x2=("11", "10")` are the seeds that survive 2, by objective."""
    (made,) = read_stress(
        made_stress(folder, {k.removeprefix("x"): v for k, v in survivors.items()}, objectives)
    ).tables
    return made


@pytest.mark.parametrize(
    ("one", "two", "sentence"),
    [
        (("111", "111"), ("000", "111"), "b held longest, up to 2; a up to 1. Nothing stronger was tried."),
        (("111", "111"), ("000", "000"), "a and b held equally long, up to 1."),
        (("000", "111"), ("000", "000"), "b held longest, up to 1; a not at all."),
        (("000", "100"), ("000", "000"), "no objective survived any of it."),
        (("---", "---"), ("---", "---"), "no objective survived any of it; no run collapsed, but none learned."),
        (("--0", "---"), ("000", "00?"), "no objective survived any of it; 5 of 11 never learned."),
        (("111", "111"), ("???", "???"), "a and b held equally long, up to 1."),
    ],
)
def test_the_headline_says_what_was_pushed_and_who_held_longest(
    tmp_path: Path, one: tuple[str, str], two: tuple[str, str], sentence: str
) -> None:
    assert table(tmp_path, ("a", "b"), x1=one, x2=two).headline() == f"update.lr was pushed from 1 to 2: {sentence}"


def test_one_objective_and_one_value_have_a_headline_too(tmp_path: Path) -> None:
    assert (
        table(tmp_path, ("a",), x1=("1",)).headline() == "update.lr was 1: a held up to 1. Nothing stronger was tried."
    )
    assert table(tmp_path, ("a",), x1=("?",)).headline() == "update.lr: no run has finished yet."


def test_each_objective_is_described_with_its_interval_and_what_happens_beyond(tmp_path: Path) -> None:
    made = table(
        tmp_path, ("a", "b", "c"), x1=("111", "111", "000"), x2=("110", "111", "000"), x4=("000", "111", "0??")
    )
    assert made.describe("a") == (
        "a holds up to update.lr = 2 (2 of 3 seeds survive, 95 % interval 1 to 2). "
        "At 4, 0 of 3 seeds survive, and collapses are at step 12 (median)."
    )
    assert made.describe("b") == (
        "b holds up to update.lr = 4 (3 of 3 seeds survive), 2 times a's. Nothing stronger was tried."
    )
    assert made.describe("c").startswith("c survives none of the values. At 1, 0 of 3 seeds survive")
    assert table(tmp_path, ("a",), x1=("?",)).describe("a") == "a: no run has finished yet."


def test_runs_that_never_learned_are_told_apart_from_those_that_collapsed(tmp_path: Path) -> None:
    made = table(tmp_path, ("a", "b"), x1=("--0", "---"))
    assert made.describe("a") == (
        "a survives none of the values. "
        "At 1, 0 of 3 seeds survive, and collapses are at step 12 (median); 2 of 3 never learned."
    )
    assert made.describe("b") == (
        "b survives none of the values. At 1, 0 of 3 seeds survive; no run collapsed, but none learned."
    )


@pytest.mark.parametrize(
    ("seeds", "margin"),
    [
        ("1", "the one seed survives."),
        ("11", "both seeds survive, in brackets its 95 % interval over seeds."),
        ("111", "two of three seeds survive, in brackets its 95 % interval over seeds."),
    ],
)
def test_the_legend_fits_the_number_of_seeds(tmp_path: Path, seeds: str, margin: str) -> None:
    assert table(tmp_path, ("a",), x1=(seeds,)).legend().startswith(f"Margin: the strongest stress that {margin}")


def test_the_setting_that_all_survive_is_one_that_each_survives(tmp_path: Path) -> None:
    """Also if one objective breaks at a value below its margin."""
    made = table(tmp_path, ("a", "b"), x1=("111", "111"), x2=("000", "111"), x4=("111", "000"))
    assert [margin.value for margin in made.margins.values()] == ["4", "2"]
    assert made.stable == "1"


def test_a_test_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    stored = json.loads((made_stress(tmp_path) / "stress.json").read_text())
    (read,) = read_stress(tmp_path).tables
    assert [json.loads(json.dumps(asdict(run))) for run in read.runs] == stored["runs"]
    assert {name: margin.value for name, margin in read.margins.items()} == {
        name: margin["value"] for name, margin in stored["axes"][0]["margins"].items()
    }


RUN = {"objective": "a", "axis": "k", "value": "1"}


@pytest.mark.parametrize(
    "changes",
    [
        {"runs": 5}, {"runs": [5]}, {"runs": [RUN]}, {"runs": {}}, {"runs": None}, {"axes": []},
        {"axes": [{"key": "k"}]},
        {"axes": [{"key": "k", "values": []}]}, {"axes": [{"key": 1, "values": ["1"]}]}, {"objectives": []},
        {"objectives": "grpo"}, {"command": None}, {"recipe": ["demo"]},
        {"objectives": [str(n) for n in range(500)], "axes": [{"key": "k", "values": [str(n) for n in range(500)]}]},
    ],
)  # fmt: skip
def test_a_foreign_file_gives_words(tmp_path: Path, changes: dict[str, Any]) -> None:
    made_stress(tmp_path, changes=changes)
    with pytest.raises(ValueError, match="holds no stress test: "):
        read_stress(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accuracy_end", 1e999), ("accuracy_end", "much"), ("steps", -1), ("steps", 2**40), ("collapse_step", "x"),
        ("curves", {"eval/accuracy": [[1, 2, 3]]}), ("curves", {"eval/accuracy": [[-1, 2]]}), ("curves", [1]),
        ("curves", {"eval/accuracy": [[1, float("nan")]]}), ("touched", {"x": "y"}), ("value", {"a": 1}),
        ("survived", 7),
    ],
)  # fmt: skip
def test_a_run_with_impossible_figures_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    stored = json.loads((made_stress(tmp_path) / "stress.json").read_text())
    stored["runs"][3][name] = value
    (tmp_path / "stress.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"holds no stress test: runs\.3\."):
        read_stress(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "9" * 5_000, "null", "\udcff", '{"a": 1}'])
def test_a_damaged_file_gives_words(tmp_path: Path, text: str) -> None:
    (tmp_path / "stress.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match="holds no stress test"):
        read_stress(tmp_path)


def test_the_values_that_a_search_doubles_through_are_known_before_it_starts() -> None:
    assert possible_values(parse_axis("update.per_step=1,6")) == ["1", "2", "4", "6"]
