"""Rollouts: the order of prompts, dynamic sampling, the overlong penalty, mini-batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.train.scripted import MixedGroups, scripted_trainer, small_config
from helpers.train.short_runs import trained
from trimtab.data import Arithmetic, Response
from trimtab.grading import Verdict
from trimtab.trainer.config import RewardConfig
from trimtab.trainer.model import Policy, load_policy
from trimtab.trainer.train.gates import has_reward_spread
from trimtab.trainer.train.prompts import encode_prompts
from trimtab.trainer.train.rewards import reward_of
from trimtab.trainer.train.rollouts import (
    MOST_SOURCES,
    accuracy_by_source,
    collect_rollouts,
    sample_groups,
    split_into_minibatches,
)
from trimtab.trainer.train.trainer import RunProgress


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("demo", device="cpu", seed=0)


def test_prompts_come_in_order_and_the_position_advances(policy: Policy) -> None:
    sampler = MixedGroups(policy, 1)
    found = sample_groups(scripted_trainer(policy, sampler, small_config()), RunProgress(position=10))
    assert (sampler.sampled, found.refused.total(), found.position) == ([10, 11, 12, 13], 0, 14)
    assert [group[0].group for group in found.admitted] == [10, 11, 12, 13]


def test_dynamic_sampling_keeps_groups_with_reward_spread_and_samples_others(policy: Policy) -> None:
    sampler = MixedGroups(policy, 2)
    trainer = scripted_trainer(policy, sampler, small_config(rollout={"dynamic_sampling": True}))
    found = sample_groups(trainer, RunProgress())
    assert sampler.sampled == list(range(12))  # three times as many as needed
    assert [group[0].group for group in found.admitted] == [0, 2, 4, 6]
    assert all(has_reward_spread(group) for group in found.admitted)
    assert (found.refused, found.position) == ({"mixed": 6}, 7)  # prompts 7 to 11 are sampled again


def test_dynamic_sampling_goes_on_with_fewer_groups_after_its_last_round(policy: Policy) -> None:
    sampler = MixedGroups(policy, 10)
    two_rounds = small_config(rollout={"dynamic_sampling": True, "dynamic_max_rounds": 2})
    found = sample_groups(scripted_trainer(policy, sampler, two_rounds), RunProgress())
    assert [group[0].group for group in found.admitted] == [0, 10]
    assert found.position == len(sampler.sampled) == 12 + 6  # the first round found two


def test_a_step_in_which_no_group_has_reward_spread_has_no_responses(policy: Policy) -> None:
    one_round = small_config(rollout={"dynamic_sampling": True, "dynamic_max_rounds": 1})
    rollouts = collect_rollouts(
        scripted_trainer(policy, MixedGroups(policy, 10**9), one_round), RunProgress(position=1)
    )
    assert (rollouts.responses, rollouts.minibatch_sizes) == ([], [])


@pytest.mark.parametrize(("length", "penalty"), [(1, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (10, -1.0)])
def test_the_overlong_penalty_grows_linearly_over_the_buffer(length: int, penalty: float) -> None:
    response = Response([2] * length, [-1.0] * length, True)
    shaped = RewardConfig(correct=1.0, wrong=-1.0, overlong_buffer=4)
    assert reward_of(Verdict("correct"), response, shaped, limit=10) == pytest.approx(1.0 + penalty)
    assert reward_of(Verdict("wrong"), response, shaped, limit=10) == pytest.approx(-1.0 + penalty)


def test_minibatches_hold_whole_groups_sorted_by_length(policy: Policy) -> None:
    groups = sample_groups(scripted_trainer(policy, MixedGroups(policy, 2), small_config()), RunProgress()).admitted
    responses, sizes = split_into_minibatches(groups, 2)
    assert sizes == [4, 4]
    for minibatch in (responses[:4], responses[4:]):
        lengths = [len(response) for response in minibatch]
        assert lengths == sorted(lengths)
    assert {response.group for response in responses[:4]} == {0, 1}


def test_prompts_are_numbered_and_encoded_as_one_by_one(policy: Policy) -> None:
    problems = [(number, Arithmetic()[number]) for number in (7, 3, 5)]
    expected = [(number, policy.encode(problem.prompt)) for number, problem in problems]
    assert [(prompt.number, prompt.ids) for prompt in encode_prompts(policy, problems, limit=20)] == expected


def test_a_prompt_that_is_too_long_is_an_error(policy: Policy) -> None:
    with pytest.raises(ValueError, match="max_prompt_tokens=2"):
        encode_prompts(policy, [(0, Arithmetic()[0])], limit=2)


def test_accuracy_is_split_by_data_source_where_there_are_several() -> None:
    assert accuracy_by_source("eval/accuracy", ["a", "a"], [True, False]) == {}
    found = accuracy_by_source("eval/accuracy", ["math/hard", "b", "b", "b\x1b"], [True, True, False, False])
    assert found == {"eval/accuracy/b": 0.5, "eval/accuracy/b\\x1b": 0.0, "eval/accuracy/math_hard": 1.0}
    many = [str(n) for n in range(50)]
    assert "x/a\\nb" in accuracy_by_source("x", ["a\nb", "b"], [True, True])
    assert len(accuracy_by_source("x", [*many, "7"], [True] * 51)) == MOST_SOURCES
    assert "x/7" in accuracy_by_source("x", [*many, "7"], [True] * 51), "the most frequent"


def test_a_run_on_several_sources_measures_each(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{n}+1=", "reward_model": {"ground_truth": str(n + 1)}, "data_source": f"set{n % 2}"}
        for n in range(6)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    changes: dict[str, str | None] = {
        "task.size": None,
        "task.digits": None,
        "task.name": "file",
        "task.rule": "number",
    }
    changes |= {"task.path": str(data), "task.eval_path": str(data), "run.eval_problems": "20"}
    changes |= {"run.steps": "1", "warm_start.steps": "0"}
    run, _ = trained(tmp_path / "run", changes)
    before, after = run.folder.records()
    assert before["eval/problems"] == 6, "fewer than run.eval_problems"
    assert {"eval/accuracy/set0", "eval/accuracy/set1"} <= before.keys() & after.keys()
    assert {"reward/accuracy/set0", "reward/accuracy/set1"} <= after.keys()
