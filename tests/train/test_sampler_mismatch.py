"""A sampler that differs from the trainer on purpose: in its temperature, or in its precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.train.short_runs import recipe
from trimtab.trainer.model import score
from trimtab.trainer.train.metrics import step_metrics
from trimtab.trainer.train.rollouts import collect_rollouts, evaluate
from trimtab.trainer.train.scoring import Experience, score_rollouts
from trimtab.trainer.train.trainer import RunProgress, Trainer, build_trainer


def collected(**changes: str) -> tuple[Trainer, Experience]:
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    trainer = build_trainer(recipe({"rollout.prompts": "16", **settings}))
    return trainer, score_rollouts(trainer, collect_rollouts(trainer, RunProgress()))


def mismatch(experience: Experience) -> float:
    assert experience.batch.sampler_logp is not None
    return float((experience.batch.sampler_logp - experience.batch.old_logp).abs().mean())


def test_without_either_key_sampler_and_trainer_agree() -> None:
    assert mismatch(collected()[1]) < 1e-5


def test_responses_are_sampled_at_one_temperature_and_scored_at_another() -> None:
    trainer, experience = collected(rollout__sampler_temperature="0.5")
    transcripts = experience.transcripts
    at_half, at_one = (score(trainer.policy, transcripts, temperature, 64, 64).logp for temperature in (0.5, 1.0))
    assert experience.batch.sampler_logp is not None
    assert torch.allclose(experience.batch.sampler_logp, at_half, atol=1e-5)
    assert torch.allclose(experience.batch.old_logp, at_one, atol=1e-5)
    assert mismatch(experience) > 0.05


def test_the_stronger_the_temperature_differs_the_larger_is_the_mismatch() -> None:
    found = [mismatch(collected(rollout__sampler_temperature=value)[1]) for value in ("1.2", "2.0")]
    assert 0.01 < found[0] < found[1]


def test_a_sampler_in_bf16_beside_a_trainer_in_fp32_is_a_small_mismatch() -> None:
    assert 1e-4 < mismatch(collected(rollout__precision="bf16")[1]) < 0.1


def test_the_samplers_precision_is_that_of_the_model_unless_it_is_set() -> None:
    both = mismatch(collected(model__precision="bf16")[1])
    assert both < mismatch(collected(model__precision="bf16", rollout__precision="fp32")[1])


def test_the_effective_sample_share_falls_with_the_mismatch() -> None:
    experiences = [collected(rollout__sampler_temperature=value)[1] for value in ("none", "1.2", "2.0")]
    same, near, far = (step_metrics(each, [])["sampler/effective_sample_share"] for each in experiences)
    assert same == pytest.approx(1.0) and same > near > far > 0
    batch = experiences[2].batch
    assert batch.sampler_logp is not None
    ratios = np.exp((batch.old_logp - batch.sampler_logp).double().numpy())
    assert far == pytest.approx(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum()))


def test_held_out_problems_are_answered_greedily_at_any_temperature() -> None:
    found = [evaluate(build_trainer(recipe({"rollout.sampler_temperature": value}))) for value in ("none", "5.0")]
    assert found[0] == found[1]


@pytest.mark.parametrize("setting", ["rollout.sampler_temperature=0", "rollout.precision=fp8"])
def test_a_wrong_value_names_its_key(setting: str) -> None:
    key, _, value = setting.partition("=")
    with pytest.raises(ValueError, match=key):
        recipe({key: value})
