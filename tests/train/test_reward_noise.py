"""`reward.noise` flips a seeded share of the verdicts behind training rewards, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.train.scripted import FixedTexts, MixedGroups, scripted_trainer
from helpers.train.short_runs import contents, differences, recipe, trained
from trimtab.data import FixedTask, Problem, Sample, SamplingOptions
from trimtab.data.problems import user
from trimtab.record import open_run
from trimtab.trainer.config import Config, load, parse
from trimtab.trainer.model import Policy, load_policy
from trimtab.trainer.train.metrics import METRICS, step_metrics
from trimtab.trainer.train.rewards import choose_flips
from trimtab.trainer.train.rollouts import collect_rollouts, evaluate, sample_groups
from trimtab.trainer.train.scoring import score_rollouts
from trimtab.trainer.train.trainer import RunProgress, build_trainer

OPTIONS = SamplingOptions(samples=8, max_new_tokens=4)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("demo", device="cpu", seed=0)


def config(noise: float, **sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "rollout": {"prompts": 16, "samples": 4, "max_new_tokens": 5},
        "reward": {"noise": noise, "wrong": -1.0, "no_answer": -0.5},
    }
    return parse({key: base.get(key, {}) | sections.get(key, {}) for key in {**base, **sections}})


def graded(policy: Policy, made: Config, texts: Sequence[str] = ("46", "45", "=", "46")) -> list[Sample]:
    """The responses of a step whose prompts all get these texts."""
    task = FixedTask("sums", (Problem(user("12+34="), "46", "number", "sums"),))
    trainer = scripted_trainer(policy, FixedTexts(policy, texts), made, task)
    return [response for group in sample_groups(trainer, RunProgress()).admitted for response in group]


# --- which verdicts are flipped


def test_a_right_answer_may_get_the_reward_of_a_wrong_one_and_the_other_way_round(policy: Policy) -> None:
    responses = graded(policy, config(0.3))
    opposite = {"correct": -1.0, "wrong": 1.0}
    own = {"correct": 1.0, "wrong": -1.0, "no_answer": -0.5}
    for response in responses:
        kind = response.verdict.kind
        assert response.reward == (opposite[kind] if response.flipped else own[kind])
    flipped = {response.verdict.kind for response in responses if response.flipped}
    assert flipped == {"correct", "wrong"}, "the test needs both, and a response without an answer is never flipped"


def test_the_overlong_penalty_comes_on_top_of_the_flipped_reward(policy: Policy) -> None:
    responses = graded(policy, config(0.3, reward={"noise": 0.3, "overlong_buffer": 5}))
    # Two digits and the end token: 3 tokens of a buffer that begins with the first.
    assert {r.reward for r in responses if r.verdict.kind == "correct" and r.flipped} == {-1.0 - 3 / 5}


@pytest.mark.parametrize("value", [-0.1, 0.51, 1, float("nan"), "some"])
def test_a_share_beyond_one_half_is_an_error(value: object) -> None:
    with pytest.raises(ValueError, match=r"reward\.noise"):
        parse({"reward": {"noise": value}})


def test_no_noise_flips_nothing_and_one_half_flips_half() -> None:
    assert not any(flip for row in choose_flips(range(500), 0, OPTIONS, 0.0) for flip in row)
    for noise in (0.1, 0.5):
        flips = [flip for row in choose_flips(range(500), 0, OPTIONS, noise) for flip in row]
        assert sum(flips) / len(flips) == pytest.approx(noise, abs=0.02)


# --- what the choice depends on


def test_the_choice_depends_on_seed_step_prompt_and_sample_alone() -> None:
    whole = choose_flips(range(40), 3, OPTIONS, 0.2)
    parts = [choose_flips([n], 3, SamplingOptions(8, 9, batch_size=1, temperature=0.5), 0.2)[0] for n in range(40)]
    assert parts == whole
    fewer = choose_flips(range(40), 3, SamplingOptions(4, 4), 0.2)
    assert [row[:4] for row in whole] == fewer
    assert choose_flips(range(40), 4, OPTIONS, 0.2) != whole != choose_flips(range(40, 80), 3, OPTIONS, 0.2)
    assert choose_flips(range(40), 3, SamplingOptions(8, 4, seed=1), 0.2) != whole


def test_more_noise_flips_what_less_noise_flips_and_more() -> None:
    little, much = (choose_flips(range(40), 3, OPTIONS, noise) for noise in (0.1, 0.3))
    pairs = [(a, b) for row in zip(little, much, strict=True) for a, b in zip(*row, strict=True)]
    assert all(b for a, b in pairs if a) and any(b and not a for a, b in pairs)


def test_a_resumed_run_flips_the_same_verdicts(tmp_path: Path) -> None:
    changes = {"reward.noise": "0.4", "run.steps": "4"}
    run, _ = trained(tmp_path / "run", changes)
    whole = contents(run.folder.path)
    shutil.rmtree(run.folder.checkpoints / "step-00000004")
    _, log = trained(tmp_path / "run", changes, resume=True)
    assert log.has("resumed from step 2")
    assert not differences(contents(run.folder.path), whole)


# --- where the noise shows


def test_metrics_show_true_accuracy_given_rewards_and_the_flipped_share(policy: Policy) -> None:
    task = FixedTask("sums", (Problem(user("12+34="), "46", "number", "sums"),))
    trainer = scripted_trainer(policy, FixedTexts(policy, ["46", "45", "=", "46"]), config(0.3), task)
    rollouts = collect_rollouts(trainer, RunProgress())
    metrics = step_metrics(score_rollouts(trainer, rollouts), [])
    assert metrics["reward/accuracy"] == 0.5
    assert metrics["reward/mean"] == pytest.approx(sum(r.reward for r in rollouts.responses) / 64)
    assert metrics["reward/flipped_share"] == sum(r.flipped for r in rollouts.responses) / 64 > 0
    assert "reward/flipped_share" in METRICS


def test_a_run_without_noise_has_no_such_metric(policy: Policy) -> None:
    trainer = scripted_trainer(policy, MixedGroups(policy, 1), config(0.0))
    metrics = step_metrics(score_rollouts(trainer, collect_rollouts(trainer, RunProgress())), [])
    assert "reward/flipped_share" not in metrics


def test_dynamic_sampling_looks_at_the_noisy_rewards(policy: Policy) -> None:
    dynamic = {"dynamic_sampling": True, "dynamic_max_rounds": 1}
    right = ["46"] * 4
    assert graded(policy, config(0.0, rollout=dynamic), right) == []
    kept = graded(policy, config(0.3, rollout=dynamic), right)
    assert kept and all(response.verdict.kind == "correct" for response in kept)
    assert {response.reward for response in kept} == {-1.0, 1.0}


def test_held_out_accuracy_has_no_noise() -> None:
    found = [evaluate(build_trainer(recipe({"run.eval_problems": "64", "reward.noise": n}))) for n in ("0", "0.5")]
    assert found[0] == found[1]


def test_records_keep_the_verdict_and_the_reward_that_was_given(tmp_path: Path) -> None:
    trained(tmp_path / "run", {"reward.noise": "0.5", "reward.overlong_buffer": "0", "run.steps": "3"})
    flips = 0
    for step in open_run(tmp_path / "run"):
        rows = zip(*(step.responses[name] for name in ("verdict", "reward", "group", "sample")), strict=True)
        for verdict, reward, group, sample in rows:
            (flip,) = choose_flips([int(group)], step.number - 1, SamplingOptions(4, 4), 0.5)
            flipped = flip[sample] and verdict in ("correct", "wrong")
            assert reward == float((verdict == "correct") != flipped)
            flips += flipped
    assert flips, "the test needs some"


def test_the_key_is_set_on_the_command_line() -> None:
    assert load(None, ["reward.noise=0.2"]).reward.noise == 0.2
    assert load(None).reward.noise == 0.0
