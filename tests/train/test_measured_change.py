"""`update.measure_every`: how a step's updates moved the entropy of its own tokens, measured without a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers.train.short_runs import contents, recipe, trained
from trimtab.files import read_json_lines
from trimtab.trainer.model import score
from trimtab.trainer.train import loop
from trimtab.trainer.train.loop import train_step
from trimtab.trainer.train.scoring import Experience
from trimtab.trainer.train.trainer import RunProgress, Trainer, build_trainer

METRIC = "update/entropy_change"
TRIM = {"objective": '"dapo + trim(floor=9)"', "run.steps": "4", "run.eval_every": "0", "run.checkpoint_every": "1"}


def entropy_now(trainer: Trainer, experience: Experience) -> float:
    """The mean entropy of a step's tokens under the policy as it is."""
    transcripts = experience.transcripts
    config = trainer.config
    scores = score(trainer.policy, transcripts, config.rollout.temperature, 10**6, config.update.head_chunk)
    return float(scores.entropy.mean())


@pytest.mark.parametrize(
    "changes",
    [{}, {"update.passes": "2", "update.per_step": "1"}, {"rollout.temperature": "0.7"}, {"update.lr": "1e-9"}],
)
def test_it_is_the_change_of_the_same_tokens_mean_entropy_by_all_updates_of_the_step(
    changes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Experience, float]] = []
    scored = loop.score_rollouts

    def noted(trainer: Trainer, *rest: object) -> Experience:
        experience = scored(trainer, *rest)  # type: ignore[arg-type]
        seen.append((experience, entropy_now(trainer, experience)))
        return experience

    monkeypatch.setattr(loop, "score_rollouts", noted)
    trainer, progress = build_trainer(recipe({**TRIM, "update.measure_every": "1", **changes})), RunProgress()
    for _ in range(2):
        metrics = train_step(trainer, progress).metrics
        experience, before = seen[-1]
        expected = entropy_now(trainer, experience) - before
        assert metrics[METRIC] == pytest.approx(expected, abs=1e-6)
        assert abs(expected) < 1e-6 if "update.lr" in changes else abs(expected) > 1e-4


@pytest.fixture(scope="module")
def never(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that measures nothing."""
    folder = tmp_path_factory.mktemp("never") / "run"
    trained(folder, TRIM)
    return folder


def logged(folder: Path) -> dict[int, float]:
    return {record["step"]: record[METRIC] for record in read_json_lines(folder / "metrics.jsonl") if METRIC in record}


def test_it_is_not_measured_unless_asked_for(never: Path) -> None:
    assert logged(never) == {}


@pytest.mark.parametrize(("every", "steps"), [("1", [1, 2, 3, 4]), ("2", [1, 3]), ("3", [1, 4]), ("9", [1])])
def test_it_is_measured_at_the_first_step_and_every_so_many_after_it_and_changes_nothing_else(
    every: str, steps: list[int], never: Path, tmp_path: Path
) -> None:
    trained(tmp_path / "run", {**TRIM, "update.measure_every": every})
    assert list(logged(tmp_path / "run")) == steps
    with_it, without = contents(tmp_path / "run"), contents(never)
    weights = [name for name in without if name.endswith(".safetensors")]
    assert len(weights) >= 4 and all(with_it[name] == without[name] for name in weights)
    for step in range(1, 5):
        record, expected = (json.loads(of[f"step {step}"]) for of in (with_it, without))
        record.pop(METRIC, None)
        assert record == expected


def test_dropout_of_the_updates_is_neither_measured_nor_disturbed() -> None:
    settings = {**TRIM, "model.lora_rank": "4", "model.lora_dropout": "0.5", "warm_start.steps": "0"}
    weights, changes = [], []
    for every in ("0", "1", "1"):
        trainer, progress = build_trainer(recipe({**settings, "update.measure_every": every})), RunProgress()
        metrics = [loop.scheduled_step(trainer, progress).metrics for _ in range(3)]
        changes.append([each.get(METRIC) for each in metrics])
        weights.append([weight.detach().clone() for weight in trainer.policy.model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(weights[0], weights[1], strict=True))
    assert changes[0] == [None] * 3 and changes[1] == changes[2]


def test_a_step_without_tokens_has_nothing_to_measure() -> None:
    none_mixed = {"rollout.dynamic_sampling": "true", "rollout.dynamic_max_rounds": "1", "reward.overlong_buffer": "0"}
    settings = {**TRIM, **none_mixed, "update.measure_every": "1", "warm_start.steps": "0", "rollout.samples": "2"}
    trainer = build_trainer(recipe(settings))
    metrics = train_step(trainer, RunProgress()).metrics
    assert metrics["tokens/count"] == 0
    assert METRIC not in metrics
