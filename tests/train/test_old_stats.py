"""`update.old_stats = "sampled"`: the sampler's figures stand in for a forward pass over the responses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.train.short_runs import recipe
from trimtab.trainer.sampling import PagedSampler
from trimtab.trainer.train.loop import train_step
from trimtab.trainer.train.rollouts import collect_rollouts, evaluate
from trimtab.trainer.train.scoring import score_rollouts
from trimtab.trainer.train.trainer import RunProgress, Trainer, build_trainer

SAMPLED = {"update.old_stats": "sampled"}


def trainer_of(settings: dict[str, str]) -> Trainer:
    return build_trainer(recipe({"rollout.prompts": "16", "objective.name": "stare", **settings}))


@pytest.mark.parametrize(
    "settings",
    [{}, {"rollout.temperature": "0.7"}, {"rollout.top_p": "0.6"}, {"rollout.top_k": "3"}, {"rollout.batch_size": "8"}],
)
def test_the_samplers_figures_are_the_scored_ones_up_to_rounding(settings: dict[str, str]) -> None:
    batches = []
    for which in ({}, SAMPLED):
        trainer = trainer_of(settings | which)
        batches.append(score_rollouts(trainer, collect_rollouts(trainer, RunProgress())).batch)
    scored, sampled = batches
    assert torch.equal(scored.token, sampled.token)  # type: ignore[arg-type]
    for name in ("old_logp", "entropy", "sum_p2", "sum_p2_logp"):
        assert torch.allclose(getattr(scored, name), getattr(sampled, name), atol=2e-5), name


def test_steps_are_those_of_a_scored_run_up_to_rounding_and_take_no_scoring_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = []
    for which in ({}, SAMPLED):
        trainer, progress = trainer_of({"update.per_step": "2", **which}), RunProgress()
        metrics = [train_step(trainer, progress).metrics for _ in range(3)]
        assert all(each["groups/mixed_share"] > 0 for each in metrics)
        weights.append([p.detach() for p in trainer.policy.model.parameters()])

        def fail(*_: Any, **__: Any) -> None:
            raise AssertionError("a forward pass over the responses")

        monkeypatch.setattr("trimtab.trainer.train.scoring.score", fail)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*weights, strict=True))


def test_current_statistics_of_later_updates_are_scored() -> None:
    trainer = trainer_of({"update.per_step": "2", "update.token_stats": "current", **SAMPLED})
    assert train_step(trainer, RunProgress()).metrics["update/skipped"] == 0


def test_greedy_evaluation_has_no_moments() -> None:
    assert 0 <= evaluate(trainer_of(SAMPLED))["eval/accuracy"] <= 1


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rollout.engine": "vllm"}, "rollout.engine = 'vllm'"),
        ({"model.precision": "bf16"}, "model.precision = 'bf16'"),
        ({"rollout.precision": "bf16"}, "rollout.precision = 'bf16'"),
        ({"rollout.sampler_temperature": "0.5"}, "rollout.sampler_temperature = 0.5"),
        ({"tools.use": '["python"]', "rollout.max_turns": "2"}, "conversations with tools"),
    ],
)
def test_where_the_figures_would_be_others_the_recipe_is_refused(settings: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        recipe(SAMPLED | settings)


def test_a_sampler_on_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = object.__new__(PagedSampler)
    monkeypatch.setattr("trimtab.trainer.train.trainer.build_sampler", lambda *_: paged)
    with pytest.raises(ValueError, match="not on a GPU; use 'scored'"):
        trainer_of(SAMPLED)
