"""The warm start stops once the held-out accuracy reaches its target, and its cache remembers that."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from torch import Tensor

from helpers.train.short_runs import recipe
from trimtab.trainer.train.checkpoints import trained_parameters
from trimtab.trainer.train.trainer import build_trainer
from trimtab.trainer.train.warm_start import warm_start

STEPS = {"warm_start.steps": "6", "warm_start.eval_every": "2", "warm_start.target_accuracy": "0.5"}


@dataclass
class StepCounter:
    """A reporter that collects the steps of a warm start and fails at any message."""

    steps: list[int] = field(default_factory=list)

    def message(self, text: str) -> None:
        if "warning" in text:
            pytest.fail(text)

    def warm(self, step: int, steps: int, loss: float) -> None:
        self.steps.append(step)

    def step(self, step: int, steps: int, metrics: object, samples: object = ()) -> None:
        pytest.fail("an RL step")

    def close(self) -> None:
        pass


def run_warm_start(
    folder: Path, evaluations: Sequence[dict[str, float]], changes: dict[str, str] | None = None
) -> tuple[list[int], dict[str, Tensor]]:
    """The steps of a warm start whose evaluations return these metrics, and the weights afterwards."""
    trainer, reporter = build_trainer(recipe(STEPS | (changes or {}))), StepCounter()
    results = iter(evaluations)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trimtab.trainer.train.warm_start.evaluate", lambda trainer: next(results))
        (folder / "cache").mkdir(parents=True, exist_ok=True)
        warm_start(trainer, folder / "cache", reporter)
    assert next(results, None) is None, "it evaluated less often than it should"
    return reporter.steps, {name: value.clone() for name, value in trained_parameters(trainer.policy.model).items()}


def accuracies(*values: float) -> list[dict[str, float]]:
    return [{"eval/accuracy": value} for value in values]


@pytest.mark.parametrize(("values", "last"), [([0.5], 2), ([0.4, 0.9], 4), ([0.1, 0.2, 0.3], 6), ([0.1, 0.2, 0.7], 6)])
def test_it_stops_at_the_first_evaluation_that_reaches_the_target(
    tmp_path: Path, values: list[float], last: int
) -> None:
    assert run_warm_start(tmp_path, accuracies(*values))[0] == list(range(1, last + 1))


def test_without_a_target_it_never_evaluates(tmp_path: Path) -> None:
    assert run_warm_start(tmp_path, [], {"warm_start.target_accuracy": "1.0"})[0] == [1, 2, 3, 4, 5, 6]


def test_a_cached_warm_start_that_reached_its_target_is_not_trained_further(tmp_path: Path) -> None:
    _, before = run_warm_start(tmp_path, accuracies(0.4, 0.6))
    steps, after = run_warm_start(tmp_path, [])
    assert steps == []
    assert all(before[name].equal(after[name]) for name in before)


def test_another_interval_of_evaluation_is_another_warm_start(tmp_path: Path) -> None:
    run_warm_start(tmp_path, accuracies(0.4, 0.6))
    assert run_warm_start(tmp_path, accuracies(0.1, 0.2, 0.6), {"warm_start.eval_every": "1"})[0] == [1, 2, 3]


def test_without_held_out_problems_it_runs_to_its_last_step(tmp_path: Path) -> None:
    assert run_warm_start(tmp_path, [{}, {}, {}])[0] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "row", ['{"prompt": "", "solution": "4"}', '{"prompt": "2 + 2"}', '{"prompt": 3, "solution": "4"}']
)
def test_a_row_without_prompt_or_solution_is_an_error_that_names_it(tmp_path: Path, row: str) -> None:
    solutions = tmp_path / "solutions.jsonl"
    solutions.write_text('{"prompt": "1 + 1", "solution": "2"}\n' + row + "\n")
    with pytest.raises(ValueError, match=r"solutions\.jsonl, row 2: .*`(prompt|solution)`"):
        run_warm_start(tmp_path, [], {"warm_start.path": f'"{solutions}"'})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_it_after_the_step_and_nothing_is_lost(tmp_path: Path, number: int) -> None:
    _, whole = run_warm_start(tmp_path / "whole", accuracies(0.1, 0.2, 0.3))

    class Stopper(StepCounter):
        def message(self, text: str) -> None:
            assert text.startswith(("finishing this step", f"{signal.Signals(number).name} received: finishing"))

        def warm(self, step: int, steps: int, loss: float) -> None:
            super().warm(step, steps, loss)
            if step == 3:  # no evaluation, and so no checkpoint, would be due
                signal.raise_signal(number)

    before = signal.signal(number, signal.default_int_handler)
    (tmp_path / "stopped" / "cache").mkdir(parents=True)
    trainer, reporter = build_trainer(recipe(STEPS)), Stopper()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trimtab.trainer.train.warm_start.evaluate", lambda trainer: {"eval/accuracy": 0.1})
        with pytest.raises(KeyboardInterrupt):
            warm_start(trainer, tmp_path / "stopped" / "cache", reporter)
    signal.signal(number, before)
    assert reporter.steps == [1, 2, 3]
    steps, resumed = run_warm_start(tmp_path / "stopped", accuracies(0.2, 0.3))
    assert steps == [4, 5, 6]
    assert all(whole[name].equal(resumed[name]) for name in whole)
