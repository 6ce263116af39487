"""The figures on real runs: what is a lead, a miss and a false alarm; they are those of the alarms as they are."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def real() -> Iterator[ModuleType]:
    """Import the benchmark's module."""
    sys.path.insert(0, str(BENCHMARKS))
    yield import_module("alarms_real")
    sys.path.remove(str(BENCHMARKS))
    sys.modules.pop("alarms_real")


def test_leads_misses_and_false_alarms_are_counted_by_run(real: ModuleType) -> None:
    learns = [(0, 0.0), (10, 0.1), (20, 0.6)]
    runs = [
        real.RealRun(1, 30, learns, {}, {"clip": 20}),
        real.RealRun(1, 30, learns, {}, {"clip": 35, "collapse": 40}),
        real.RealRun(1, 30, learns, {}, {}),
        real.RealRun(1, None, learns, {}, {"clip": 15}),  # held-out accuracy rose by 0.5 after it
        real.RealRun(1, None, learns, {}, {"clip": 25}),
    ]
    result = real.figures(runs, [run.replayed for run in runs])
    clip, collapse = result["alarms"]
    assert (result["runs"], result["collapsed"]) == (5, 3)
    assert (clip["leads"], clip["before"], clip["before_certain"], clip["missed"]) == ([-5, 10], 1, 2, 1)
    assert (clip["false"], clip["false_still_learning"]) == (2, 1)
    assert collapse["leads"] == [-10]
    assert result["any"]["rang"] == 4


def test_the_figures_in_the_docs_are_those_of_the_alarms_as_they_are(real: ModuleType) -> None:
    """After a change of the alarms: `python benchmarks/alarms_real.py`, then `make docs`."""
    known = json.loads((BENCHMARKS / "results/alarms-smollm2.json").read_text())
    runs = real.read_runs(BENCHMARKS / "results/stability-h200.json")
    assert real.parts(runs, real.unseen_runs()) == known["parts"]


def test_the_tables_show_the_alarms_of_today_and_a_sentence_tells_of_those_before(real: ModuleType) -> None:
    learns = [(0, 0.0), (10, 0.1), (20, 0.6)]
    runs = [real.RealRun(1, 30, learns, {"clip": 10}, {"clip": 20}), real.RealRun(1, None, learns, {"ratio": 5}, {})]
    made = real.markdown({"made_from": "made runs", "date": "2026-01-02", "parts": real.parts(runs, [])})
    assert "rang before 1 of the 1 collapses, and in 1 of the 1 other runs." in made
    assert "| `clip` | 1/1 | 10 (10 to 10) | 0 | 0/1 | 0 | 0 |" in made
    assert "`ratio`" not in made


def test_the_tables_in_the_docs_are_made_from_the_figures(real: ModuleType) -> None:
    known = json.loads((BENCHMARKS / "results/alarms-smollm2.json").read_text())
    assert real.markdown(known) == (BENCHMARKS / "results/alarms-smollm2.md").read_text()
