"""The study's results keep what a later call and the docs need."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import study
import study_pages
from result_file import about
from trimtab.experiments.grid import parse_axis, read_stress
from trimtab.objectives import objective


def test_an_archive_has_the_runs_that_have_ended_without_their_weights(tmp_path: Path) -> None:
    for name, files in {"a": ("metrics.jsonl", "ended.json", "model.bin"), "b": ("metrics.jsonl",)}.items():
        (tmp_path / "runs" / name).mkdir(parents=True)
        for file in files:
            (tmp_path / "runs" / name / file).write_text(file)
    (tmp_path / "runs" / study.ABOUT).write_text("{}")
    study.pack(tmp_path / "runs", tmp_path / "runs.tar.xz")
    (tmp_path / "new" / "a").mkdir(parents=True)
    (tmp_path / "new" / "a" / "metrics.jsonl").write_text("newer")
    study.unpack(tmp_path / "runs.tar.xz", tmp_path / "new")
    found = {str(p.relative_to(tmp_path / "new")): p.read_text() for p in (tmp_path / "new").rglob("*.*")}
    assert found == {"about.json": "{}", "a/metrics.jsonl": "newer", "a/ended.json": "ended.json"}


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (study, study_pages):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    lrs = ("update.lr=1e-4,1e-3",)
    small = study.Study("small", "demo", "addition", ("grpo", "stapo"), lrs, ("run.steps=11",), seeds=2)
    test = small.test(tmp_path / "runs")
    for run in test.runs(test.cells())[:-1]:  # the last one has not been run
        run.folder.create(run.config)
        lines = [{"step": step, "eval/accuracy": 0.5, "policy/entropy": 1.0} for step in range(12)]
        run.folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run.folder.path / "ended.json").write_text('{"state": "finished", "why": "", "steps": 11}')
    (tmp_path / "runs" / study.ABOUT).write_text(json.dumps(about("small", torch.device("cpu"))))
    study.save_result(small, "demo", tmp_path / "runs")
    return tmp_path / "stress-demo.json"


def test_a_result_is_the_stress_test_with_machine_versions_and_date(result: Path) -> None:
    table = json.loads(result.read_text())
    assert {"what", "date", "machine", "versions", "command", "runs"} <= set(table)
    assert len(read_stress(result).tables[0].runs) == 7


def test_tables_and_picture_are_made_from_a_result(result: Path) -> None:
    stored = read_stress(result)
    text = study_pages.stress_tables("demo")
    assert all(f"| {name} |" in text for name in stored.objectives)
    picture = ElementTree.fromstring(study_pages.heat_maps([("A & B", "demo")]))
    words = [node.text for node in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "A & B" in words
    assert set(stored.objectives) <= set(words)


def test_a_sentence_takes_its_figures_from_a_result(result: Path) -> None:
    found = [study_pages.fact("demo", "grpo", "1e-4", figure) for figure in ("seeds", "accuracy", "entropy")]
    assert found == ["2 of 2", "50.0%", "1.00"]
    assert study_pages.fact("demo", "gspo", "1e-4", "seeds") == "(not run yet)"


def test_an_objective_without_runs_has_no_row(result: Path) -> None:
    kept = [line for line in result.read_text().splitlines() if not line.lstrip().startswith('{"objective": "stapo"')]
    result.write_text("\n".join(kept))
    text = study_pages.stress_tables("demo")
    assert "| grpo |" in text and "| stapo |" not in text


def test_a_result_that_is_missing_has_no_tables(result: Path) -> None:
    assert study_pages.stress_tables("nowhere") == ""


def test_every_test_of_the_study_names_what_exists() -> None:
    for each in study.STUDIES.values():
        assert [objective(name).name for name in each.objectives] == [
            name.partition("(")[0] for name in each.objectives
        ]
        assert all(parse_axis(axis).values for axis in each.axes)
