"""The tables of trimtab inside TRL and verl: what was measured, and what was not, is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import engine_tables
import gpu_tables

ABOUT = {"machine": "a GPU", "date": "2026-01-02", "versions": {"python": "3.12", "trl": "1.16.0"}}


def test_learning_inside_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tables, "RESULTS", tmp_path)
    assert engine_tables.learning().startswith("Not measured yet")
    steps = [
        {"step": 1, "reward": 0.0, "entropy": 2.25, "seconds": 60.0},
        {"step": 11, "reward": 0.0625, "entropy": 1.102, "seconds": 80.0},
    ]
    (tmp_path / "trl-learning-vllm-h200.json").write_text(
        json.dumps(ABOUT | {"steps": steps, "command": "x.py --steps 20"})
    )
    (tmp_path / "trl-learning-transformers-h200.json").write_text(json.dumps(ABOUT | {"steps": steps[:1]}))
    made = engine_tables.learning().splitlines()
    assert made[2] == "| vLLM | 11 of 20 | 0 to 0.062 | 2.2 to 1.1 | 2.0 |"
    assert "a GPU, trl 1.16.0; by `benchmarks/trl_learning.py`, 2026-01-02." in made


def test_a_run_of_verl_that_was_killed_and_resumed() -> None:
    def ran(*steps: int) -> dict[str, object]:
        return {"steps": [{"training/global_step": step, "timing_s/gen": 2.0, "timing_s/step": 3.5} for step in steps]}

    made = engine_tables.verl(ABOUT | {"killed": ran(1, 2), "resumed": ran(3)})
    assert made[2] == "| 1, killed | 2.00 | 0.00 | 0.00 | 0.00 | 0.00 | 3.50 |"
    assert made[-1].startswith("| 3, resumed |")
    assert engine_tables.verl(ABOUT | {"killed": {"error": "cut", "steps": []}}) == []
    made = engine_tables.verl(ABOUT | {"killed": ran(1, 2), "resumed": ran() | {"error": "cut"}})
    assert made[-1] == "The run that was resumed ended too early."
