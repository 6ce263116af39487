"""The checkpoint with the best held-out score is kept, and a run that gets no better may stop early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.train.short_runs import MessageLog, contents, differences, recipe, short_run, trained
from trimtab.cli.summary import closing_summary
from trimtab.trainer.config import find_run_model, load
from trimtab.trainer.train import Run, RunStoppedError, StopReason
from trimtab.trainer.train import run as run_module
from trimtab.trainer.train.loop import train
from trimtab.trainer.train.metrics import BestEvaluation, best_evaluation

SCORES = {0: 0.1, 1: 0.2, 2: 0.5, 3: 0.5, 4: 0.4, 5: 0.6, 6: 0.3}
EVERY_STEP = {"run.eval_every": "1", "run.keep_best": "true", "run.keep_checkpoints": "1"}


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Give the evaluations of each step the scores that the test wants."""
    scores = dict(SCORES)
    original = Run._evaluate

    def evaluate(self: Run) -> dict[str, float]:
        return original(self) | {"eval/accuracy": scores[self.progress.step]}

    monkeypatch.setattr(run_module.Run, "_evaluate", evaluate)
    return scores


def kept(run: Run) -> list[str]:
    return [path.name for path in sorted(run.folder.best.glob("*"))]


def test_the_checkpoint_with_the_best_score_is_kept(scored: dict[int, float], tmp_path: Path) -> None:
    run, _ = trained(tmp_path / "run", EVERY_STEP)
    assert kept(run) == ["step-00000005"]
    best, named = (find_run_model(f"{run.folder.path}@{name}") for name in ("best", "5"))
    assert best == named and best is not None and best.folder.parent.name == "best"
    text = closing_summary(run.config, run.folder, 1.0)
    assert f"best step   5, with a held-out score of 0.6: {run.folder.path}@5, as a model or for train --from" in text


def test_a_run_that_does_not_keep_it_says_so(scored: dict[int, float], tmp_path: Path) -> None:
    run, _ = trained(tmp_path / "run", {"run.eval_every": "1", "run.keep_checkpoints": "1"})
    assert not run.folder.best.exists()
    assert "best step   5, with a held-out score of 0.6: not kept" in closing_summary(run.config, run.folder, 1.0)
    with pytest.raises(ValueError, match=r"has kept no best checkpoint: run.keep_best = true keeps one"):
        find_run_model(f"{run.folder.path}@best")


def test_a_resumed_run_keeps_the_same(scored: dict[int, float], tmp_path: Path) -> None:
    unbroken, _ = trained(tmp_path / "one", EVERY_STEP | {"run.checkpoint_every": "4"})
    broken, log = short_run(tmp_path / "two", EVERY_STEP | {"run.checkpoint_every": "4"})

    def stop(step: int) -> None:
        if step == 6:
            raise KeyboardInterrupt

    log.at_step = stop
    with pytest.raises(KeyboardInterrupt):
        train(broken)
    assert kept(broken) == ["step-00000005"], "which is after the checkpoint that it goes on from"
    trained(tmp_path / "two", EVERY_STEP | {"run.checkpoint_every": "4"}, resume=True)
    assert differences(contents(unbroken.folder.path), contents(broken.folder.path)) == []


def test_a_better_checkpoint_leaves_files_that_somebody_put_beside_the_last(
    scored: dict[int, float], tmp_path: Path
) -> None:
    run, log = short_run(tmp_path / "run", EVERY_STEP)
    notes = tmp_path / "run" / "best" / "step-00000002" / "notes.txt"
    log.at_step = lambda step: notes.write_text("of the user") if step == 3 else None
    train(run)
    assert kept(run) == ["step-00000002", "step-00000005"] and notes.read_text() == "of the user"


def test_a_best_checkpoint_of_a_step_that_counts_no_more_goes(scored: dict[int, float], tmp_path: Path) -> None:
    run, log = short_run(tmp_path / "run", EVERY_STEP | {"run.checkpoint_every": "2", "run.eval_problems": "4"})
    log.at_step = lambda step: (_ for _ in ()).throw(KeyboardInterrupt) if step == 6 else None
    with pytest.raises(KeyboardInterrupt):
        train(run)
    scored |= {5: 0.0, 6: 0.7}  # as on another machine
    again, _ = trained(tmp_path / "run", EVERY_STEP | {"run.checkpoint_every": "2"}, resume=True)
    assert kept(again) == ["step-00000006"]


def test_a_run_stops_after_evaluations_without_a_better_score(scored: dict[int, float], tmp_path: Path) -> None:
    stopping = EVERY_STEP | {"run.early_stop": "2"}
    run, _ = short_run(tmp_path / "run", stopping)
    with pytest.raises(RunStoppedError, match=r"no better held-out score in 2 evaluations: the best is 0.5, of step 2"):
        train(run)
    assert (run.progress.step, run.stopped, kept(run)) == (4, StopReason.NO_BETTER, ["step-00000002"])
    # It goes on if it is told to, and ends as a run that never stopped.
    trained(tmp_path / "run", stopping | {"run.early_stop": "0"}, resume=True)
    trained(tmp_path / "whole", EVERY_STEP)
    assert differences(contents(tmp_path / "run"), contents(tmp_path / "whole")) == []


def test_evaluations_are_counted_over_a_resume(scored: dict[int, float], tmp_path: Path) -> None:
    changes = EVERY_STEP | {"run.steps": "3", "run.early_stop": "2"}
    trained(tmp_path / "run", changes)
    run = Run(recipe(changes | {"run.steps": "6"}), short_run(tmp_path / "run")[0].folder, MessageLog(), resume=True)
    with pytest.raises(RunStoppedError, match="of step 2"):
        train(run)
    assert run.progress.step == 4


@pytest.mark.parametrize(
    ("records", "best"),
    [
        ([], None),
        ([{"step": 1, "reward/mean": 1.0}], None),
        ([{"step": 0, "eval/accuracy": 0.5}, {"step": 2, "eval/accuracy": 0.5}], BestEvaluation(0, 0.5, 1)),
        ([{"step": 0, "eval/accuracy": 0.9, "eval/score": -3.0}, {"step": 2, "eval/accuracy": 0.1, "eval/score": -2.0}],
         BestEvaluation(2, -2.0)),
    ],
)  # fmt: skip
def test_the_best_is_by_the_rules_number_and_else_by_accuracy(records: list[Any], best: BestEvaluation | None) -> None:
    assert best_evaluation(records) == best


@pytest.mark.parametrize("setting", ["run.keep_best=true", "run.early_stop=3"])
def test_without_evaluations_there_is_no_best(setting: str) -> None:
    with pytest.raises(
        ValueError, match=rf"{setting.partition('=')[0]} is about held-out scores, but run.eval_every = 0"
    ):
        load(None, ["run.eval_every=0", setting])
    with pytest.raises(ValueError, match=r"there are no such problems: set task.eval_path"):
        load(None, ["task.name=file", "task.path=x.jsonl", setting])
