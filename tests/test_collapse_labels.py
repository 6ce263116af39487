"""The rule for a collapse says what one sees: it agrees with 85 curves that were labelled without it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def agreement() -> Iterator[ModuleType]:
    """Import the benchmark's module."""
    sys.path.insert(0, str(BENCHMARKS))
    yield import_module("collapse_agreement")
    sys.path.remove(str(BENCHMARKS))
    sys.modules.pop("collapse_agreement")


def test_the_rule_agrees_with_every_label_that_was_sure(agreement: ModuleType) -> None:
    judged = agreement.judged_runs()
    sure = [each for each in judged if each.label != "unsure"]
    assert len(judged) == 85 and len(sure) == 82
    assert [each.run for each in sure if each.label != each.rule] == []
    assert agreement.kappa([(each.label, each.rule) for each in sure]) == 1.0


def test_where_the_eye_was_unsure_the_rule_decides_by_the_end_of_the_run(agreement: ModuleType) -> None:
    unsure = {each.run: each.rule for each in agreement.judged_runs() if each.label == "unsure"}
    assert unsure == {
        "stability-h200 gspo 0.0001 seed 1": "alive",  # fell from 0.44 to 0.15, and its last evaluation is 0.29
        "demo grpo 0.0016 seed 1": "collapsed",  # fell from 0.42 to 0.06, has regained 0.12 after 100 steps
        "demo sspo 0.0007 seed 0": "collapsed",  # fell from 0.38 to 0.01, has regained 0.06
    }


def test_kappa_is_agreement_beyond_chance(agreement: ModuleType) -> None:
    assert agreement.kappa([("a", "a"), ("b", "b")]) == 1.0
    assert agreement.kappa([("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")]) == 0.0
