"""The data of a stress test's page: cells, curves and words as its runs say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from helpers.insight.report_runs import Made, data_of, decode_array, make_run
from helpers.stress.made_stress import FELL, STEPS, made_stress
from trimtab.cli import app
from trimtab.insight.report.page import stress_page_data


def page(folder: Path) -> dict[str, Any]:
    title, data = stress_page_data(folder)
    assert title == "Stress test of demo"
    return data["stress"]


def report(*words: object) -> Result:
    result = CliRunner().invoke(app, ["report", *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_cells_say_how_many_seeds_survived_and_where_the_margin_is(tmp_path: Path) -> None:
    (axis,) = page(made_stress(tmp_path))["axes"]
    assert axis["values"] == ["3e-4", "1e-3", "3e-3"]
    assert axis["meaning"].startswith("AdamW's learning rate")
    shown = [
        [(f"{c['survived']}/{c['runs']}", c["kind"], c["word"], c["margin"]) for c in row] for row in axis["cells"]
    ]
    assert shown == [
        [("3/3", "all", "survives", False), ("2/3", "most", "most survive", True), ("0/3", "none", "collapsed", False)],
        [("3/3", "all", "survives", False), ("3/3", "all", "survives", True), ("1/2", "few", "too few survive", False)],
    ]
    assert axis["cells"][0][2]["accuracy"] == "1.0%"
    assert axis["cells"][1][2]["seeds"][1] == "seed 1: failed: no"


def test_cells_without_a_result_say_so(tmp_path: Path) -> None:
    (axis,) = page(made_stress(tmp_path, {"1": ("1", ""), "2": ("?", "1")}))["axes"]
    words = [[cell["word"] for cell in row] for row in axis["cells"]]
    assert words == [["survives", "not finished"], ["not run", "survives"]]


def test_curves_are_by_stress_and_objective_with_shared_scales(tmp_path: Path) -> None:
    (axis,) = page(made_stress(tmp_path))["axes"]
    accuracy, score, entropy = axis["metrics"]
    assert [each["name"] for each in (accuracy, score, entropy)] == ["eval/accuracy", "eval/score", "policy/entropy"]
    assert accuracy["steps"] == [0, STEPS] and accuracy["range"] == pytest.approx([0.01, 0.82])
    assert [len(chart) for chart in accuracy["charts"]] == [2, 2, 2]
    two_of_three = accuracy["charts"][1][0]
    assert [seed["collapse"] for seed in two_of_three["seeds"]] == [None, None, FELL]
    # The mean goes no further than the run that was ended early.
    assert decode_array(two_of_three["mean"]["steps"])[-1] == FELL + 10
    assert decode_array(two_of_three["mean"]["values"])[0] == pytest.approx(0.41)
    assert decode_array(two_of_three["seeds"][0]["steps"])[-1] == STEPS


def test_the_page_has_all_runs_the_words_and_the_command(tmp_path: Path) -> None:
    shown = page(made_stress(tmp_path))
    assert len(shown["runs"]) == 18 and shown["runs"][0][:4] == ["grpo", "update.lr = 3e-4", "0", "survived"]
    assert shown["missing"] == ["sspo + s2t-3e-3-seed1: failed: no"]
    assert [word for word, _ in shown["words"]] == ["survives", "collapsed", "holds, margin"]
    assert shown["command"].startswith("trimtab stress grpo 'sspo + s2t' --axis update.lr=3e-4,1e-3,3e-3")
    assert shown["summary"] == [
        "update.lr was pushed from 3e-4 to 3e-3: grpo and sspo + s2t held equally long, up to 1e-3."
    ]


def test_every_axis_has_its_own_map_and_sentence(tmp_path: Path) -> None:
    ends = {"k.a": "0", "k.b": "1"}
    folders = [made_stress(tmp_path / key, {"1": ("1",), "2": (end,)}, ("a",), key) for key, end in ends.items()]
    one, two = (json.loads((folder / "stress.json").read_text()) for folder in folders)
    both = {**one, "axes": one["axes"] + two["axes"], "runs": one["runs"] + two["runs"]}
    (tmp_path / "stress.json").write_text(json.dumps(both))
    shown = page(tmp_path)
    assert shown["summary"] == [
        "k.a was pushed from 1 to 2: a held up to 1.",
        "k.b was pushed from 1 to 2: a held up to 2. Nothing stronger was tried.",
    ]
    assert [[cell["margin"] for cell in axis["cells"][0]] for axis in shown["axes"]] == [[True, False], [False, True]]


def test_long_texts_are_truncated(tmp_path: Path) -> None:
    name = "x" * 100_000
    made_stress(tmp_path, {name: ("10?", "000")}, (name, name + "y"), key=name)
    assert len(json.dumps(page(tmp_path))) < 60_000


def test_curves_of_another_program_are_sorted_and_absurd_values_left_out(tmp_path: Path) -> None:
    stored = json.loads((made_stress(tmp_path, {"1": ("1",)}, ("a",)) / "stress.json").read_text())
    stored["runs"][0]["curves"] = {"eval/accuracy": [[9, 0.5], [3, 1e300], [1, 0.25], [9, 0.75]], "x": []}
    (tmp_path / "stress.json").write_text(json.dumps(stored))
    (axis,) = page(tmp_path)["axes"]
    ((line,),) = axis["metrics"][0]["charts"]
    assert decode_array(line["mean"]["steps"]).tolist() == [1, 9]
    assert decode_array(line["mean"]["values"]).tolist() == [0.25, 0.75]
    assert axis["metrics"][1]["charts"] == [[None]]


def test_a_key_that_is_no_key_of_a_recipe_has_no_meaning(tmp_path: Path) -> None:
    for key in ("no.such", "update", "update.", "", "objective.name.x", "constructor.__proto__"):
        (axis,) = page(made_stress(tmp_path, key=key))["axes"]
        assert axis["meaning"] == ""


def test_the_command_writes_the_page_into_the_tests_folder(tmp_path: Path) -> None:
    result = report(made_stress(tmp_path / "test"))
    assert result.exit_code == 0 and f"written: {tmp_path / 'test' / 'report.html'}" in result.stdout
    assert "stress" in data_of((tmp_path / "test" / "report.html").read_text())


def test_a_stress_test_cannot_be_mixed_with_runs_or_steps(tmp_path: Path) -> None:
    test, run = made_stress(tmp_path / "test"), make_run(tmp_path / "run", Made(steps=1))
    for words in ([test, run, "--out", tmp_path / "x.html"], [test, "--step", 1], [test, "--objective", "gspo"]):
        result = report(*words)
        assert result.exit_code == 2 and "holds a stress test" in result.stderr
    assert not (tmp_path / "x.html").exists()


def test_a_damaged_file_gives_words_and_no_page(tmp_path: Path) -> None:
    (made_stress(tmp_path) / "stress.json").write_text('{"runs": [')
    result = report(tmp_path)
    assert result.exit_code == 2 and "holds no stress test" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "report.html").exists()
