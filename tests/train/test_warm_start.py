"""The warm start stops once the held-out accuracy is good enough, and remembers that it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.train.short_runs import short_run
from trimtab.train.loop import build_trainer
from trimtab.train.warm_start import parameters, warm_start

STEPS = {"warm_start.steps": "6", "warm_start.eval_every": "2", "warm_start.target_accuracy": "0.5"}


def warmed(folder: Path, accuracies: list[float], changes: dict[str, str] | None = None) -> tuple[list[int], Any]:
    """The steps that were made while evaluations gave these accuracies, and the weights afterwards."""
    config = short_run(folder / "run", STEPS | (changes or {}))[0].config
    trainer, steps, seen = build_trainer(config), [], iter(accuracies)
    warm_start(
        trainer.policy,
        trainer.task,
        config,
        folder / "cache",
        lambda step, _all, _loss: steps.append(step),
        lambda: {"eval/accuracy": next(seen)},
        pytest.fail,
    )
    assert next(seen, None) is None, "it looked less often than it should"
    return steps, {name: value.clone() for name, value in parameters(trainer.policy).items()}


@pytest.mark.parametrize(
    ("accuracies", "made"),
    [([0.5], 2), ([0.4, 0.9], 4), ([0.1, 0.2, 0.3], 6), ([0.1, 0.2, 0.7], 6)],
)
def test_it_stops_at_the_first_look_that_is_good_enough(tmp_path: Path, accuracies: list[float], made: int) -> None:
    assert warmed(tmp_path, accuracies)[0] == list(range(1, made + 1))


def test_without_a_goal_it_never_looks(tmp_path: Path) -> None:
    assert warmed(tmp_path, [], {"warm_start.target_accuracy": "1.0"})[0] == [1, 2, 3, 4, 5, 6]


def test_what_was_good_enough_is_not_trained_further(tmp_path: Path) -> None:
    _, before = warmed(tmp_path, [0.4, 0.6])
    steps, after = warmed(tmp_path, [])
    assert steps == []
    assert all(before[name].equal(after[name]) for name in before)


def test_a_finer_look_is_another_warm_start(tmp_path: Path) -> None:
    warmed(tmp_path, [0.4, 0.6])
    assert warmed(tmp_path, [0.1, 0.2, 0.6], {"warm_start.eval_every": "1"})[0] == [1, 2, 3]


def test_a_task_without_accuracy_is_warmed_to_the_end(tmp_path: Path) -> None:
    config = short_run(tmp_path / "run", STEPS)[0].config
    trainer, steps = build_trainer(config), []
    looks = iter([{}, {}, {}])
    warm_start(
        trainer.policy,
        trainer.task,
        config,
        tmp_path / "cache",
        lambda step, _all, _loss: steps.append(step),
        lambda: next(looks),
        pytest.fail,
    )
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "row", ['{"prompt": "", "solution": "4"}', '{"prompt": "2 + 2"}', '{"prompt": 3, "solution": "4"}']
)
def test_a_row_that_teaches_nothing_is_named(tmp_path: Path, row: str) -> None:
    solutions = tmp_path / "solutions.jsonl"
    solutions.write_text('{"prompt": "1 + 1", "solution": "2"}\n' + row + "\n")
    with pytest.raises(ValueError, match=r"solutions\.jsonl.*2.*needs `prompt` and `solution`"):
        warmed(tmp_path, [], {"warm_start.path": f'"{solutions}"'})
