"""The benchmark script: its conversion, and what its result says."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.evaluate.small_evals import small, write_sums
from trimtab.data.benchmarks import load_benchmark

SCRIPT = Path(__file__).parents[2] / "benchmarks/evaluate_smollm2.py"
DATA = Path(__file__).parents[2].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the shared data is not here")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("evaluate_smollm2", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_data
def test_converted_data_is_the_same_data(script: ModuleType, tmp_path: Path) -> None:
    script.convert(DATA, tmp_path)
    for name in script.NAMES:
        ours, theirs = load_benchmark(name, tmp_path), load_benchmark(name, DATA)
        assert [(q.id, q.problem) for q in ours] == [(q.id, q.problem) for q in theirs]


def test_a_result_says_where_when_how_fast_and_how_well(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = script.measure(small(tmp_path, problems=3))
    assert "samples 9/9" in capsys.readouterr().out
    assert found["machine"]
    assert found["date"].startswith("20")
    assert set(found["versions"]) == {"python", "torch", "transformers", "trimtab"}
    assert found["this_process"]["samples"] == 9
    assert found["this_process"]["seconds"] > 0
    assert found["this_process"]["tokens_per_second"] > 0
    accuracy = found["metrics"]["gsm8k"]["average"]
    assert accuracy["low"] <= accuracy["mean"] <= accuracy["high"]
    json.dumps(found, allow_nan=False)
    again = script.measure(small(tmp_path, problems=3))
    assert again["this_process"] == {**again["this_process"], "samples": 0, "tokens": 0, "tokens_per_second": None}
    assert again["metrics"] == found["metrics"]


def test_the_command_line_is_an_evaluation(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(script, "measure", lambda wanted: asked.append(wanted) or {"metrics": {}})
    words = ["--data", str(tmp_path), "--problems", "8", "--samples", "2", "--benchmarks", "gsm8k", "--batch", "64"]
    monkeypatch.setattr(sys, "argv", ["evaluate_smollm2.py", *words, "--out", str(tmp_path / "out.json")])
    script.main()
    (wanted,) = asked
    assert (wanted.model, wanted.benchmarks, wanted.problems, wanted.samples) == ("smollm2", "gsm8k", 8, 2)
    assert (wanted.max_new_tokens, wanted.batch, wanted.rule) == (512, 64, "math")
    assert json.loads((tmp_path / "out.json").read_text()) == {"metrics": {}}
    assert "metrics" in capsys.readouterr().out


def test_converting_stops_there(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_sums(tmp_path / "data")
    row = {
        "prompt": "1+1?",
        "reward_model": {"ground_truth": "2"},
        "data_source": "MATH-500",
        "extra_info": {"index": 0},
    }
    (data / "math500.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setattr(sys, "argv", ["x", "--data", str(data), "--convert", str(tmp_path / "new")])
    script.main()
    assert capsys.readouterr().out.startswith("6 problems in ")
    assert (tmp_path / "new/math500.jsonl").read_text() == json.dumps(row) + "\n"
