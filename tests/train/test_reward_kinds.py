"""The reward of each kind of verdict, and responses that are excluded from training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.train.scripted import FixedTexts, scripted_trainer
from trimtab.data import FixedTask, Problem, Response, Sample
from trimtab.data.problems import user
from trimtab.grading import VERDICT_KINDS, Verdict, VerdictKind
from trimtab.trainer.config import Config, RewardConfig, load, parse
from trimtab.trainer.model import Policy, load_policy
from trimtab.trainer.train.gates import has_reward_spread
from trimtab.trainer.train.metrics import METRICS, step_metrics
from trimtab.trainer.train.rewards import reward_of
from trimtab.trainer.train.rollouts import (
    collect_rollouts,
    remove_excluded,
    sample_groups,
)
from trimtab.trainer.train.scoring import Experience, score_rollouts
from trimtab.trainer.train.trainer import RunProgress

RESPONSE = Response([2, 3], [-1.0, -1.0], True)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("demo", device="cpu", seed=0)


def reward(kind: VerdictKind, **options: Any) -> float | None:
    return reward_of(Verdict(kind), RESPONSE, RewardConfig(**options), limit=10)


def graded(kind: VerdictKind, group: int = 0, **options: Any) -> Sample:
    value = reward(kind, **options)
    problem = Problem(user("1+1="), "2", "exact", "sums")
    return Sample(
        problem,
        "2",
        [5],
        RESPONSE,
        group,
        verdict=Verdict(kind),
        failed=kind == "crashed",
        reward=value or 0.0,
        excluded=value is None,
    )


def test_by_default_all_but_a_right_answer_get_the_reward_of_a_wrong_one_and_a_crash_is_excluded() -> None:
    assert [reward(kind, wrong=-1.0) for kind in VERDICT_KINDS] == [1.0, -1.0, -1.0, -1.0, -1.0, None]


@pytest.mark.parametrize("kind", ["no_answer", "ambiguous", "too_costly", "crashed"])
def test_each_kind_has_its_own_reward(kind: VerdictKind) -> None:
    assert reward(kind, **{kind: -0.25}) == -0.25
    assert reward(kind, **{kind: "exclude"}) is None
    assert reward(kind, wrong=-0.5, **{kind: "wrong"}) == -0.5
    others: list[VerdictKind] = [other for other in ("no_answer", "ambiguous", "too_costly") if other != kind]
    assert {reward(other, **{kind: -0.25}) for other in others} == {0.0}


def test_the_overlong_penalty_applies_to_every_reward() -> None:
    shaped = {"overlong_buffer": 9, "no_answer": 0.5}
    assert reward("no_answer", **shaped) == pytest.approx(0.5 - 1 / 9)
    assert reward("crashed", **shaped) is None


@pytest.mark.parametrize("value", ["drop", "leave out", True, [1.0], "none"])
def test_a_reward_that_is_neither_number_nor_keyword_is_an_error(value: object) -> None:
    with pytest.raises(ValueError, match=r"reward.no_answer: .* must be a number, 'wrong' .* or 'exclude'"):
        parse({"reward": {"no_answer": value}})


def test_rewards_are_set_on_the_command_line() -> None:
    set_there = load(None, ["reward.no_answer=-0.5", "reward.too_costly=exclude"]).reward
    assert (set_there.no_answer, set_there.too_costly, set_there.crashed) == (-0.5, "exclude", "exclude")


@pytest.mark.parametrize(
    "rule",
    [
        *("math", "strict-box", "dapo", "choice", "number", "boxed", "exact", "countdown"),
        *("gym:countdown", "python:math:gcd"),
    ],
)
def test_a_recipe_may_name_any_rule(rule: str) -> None:
    assert load(None, ["task.name=file", f"task.rule={rule}"]).task.rule == rule


@pytest.mark.parametrize(("rule", "hint"), [("maths", "did you mean math"), ("http", "there are math,")])
def test_an_unknown_rule_is_an_error_that_names_the_nearest(rule: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"task.rule: unknown rule '{rule}': {hint}"):
        load(None, ["task.name=file", f"task.rule={rule}"])


def test_excluded_responses_do_not_count_for_reward_spread() -> None:
    group = [graded("wrong"), graded("wrong"), replace(graded("crashed"), reward=7.0)]
    assert not has_reward_spread(group)
    assert has_reward_spread([*group, graded("correct")])


def test_a_group_with_one_remaining_response_is_excluded_whole() -> None:
    whole = [graded("correct", 0), graded("wrong", 0), graded("crashed", 0)]
    lonely = [graded("correct", 1), graded("crashed", 1), graded("crashed", 1)]
    gone = [graded("crashed", 2)] * 3
    single = [graded("correct", 3)]  # one response per prompt was asked for
    kept, excluded = remove_excluded([whole, lonely, gone, single])
    assert [[a.verdict.kind for a in group] for group in kept] == [["correct", "wrong"], ["correct"]]
    assert [a.group for a in excluded] == [0, 1, 1, 1, 2, 2, 2]


def test_groups_without_excluded_responses_stay_as_they_are() -> None:
    groups = [[graded("correct", 0), graded("no_answer", 0)], [graded("wrong", 1), graded("ambiguous", 1)]]
    assert remove_excluded(groups) == (groups, [])


def four(**sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {"rollout": {"prompts": 2, "samples": 4, "max_new_tokens": 5}}
    return parse({key: base.get(key, {}) | sections.get(key, {}) for key in {**base, **sections}})


def sums(rule: str, answers: Sequence[str]) -> FixedTask:
    return FixedTask("sums", tuple(Problem(user("12+34="), answer, rule, "sums") for answer in answers))


def experience(policy: Policy, task: FixedTask, texts: Sequence[str], config: Config) -> Experience:
    trainer = scripted_trainer(policy, FixedTexts(policy, texts), config, task)
    return score_rollouts(trainer, collect_rollouts(trainer, RunProgress()))


def test_a_batch_holds_only_what_is_trained_on(policy: Policy) -> None:
    quiet = four(reward={"no_answer": "exclude"})
    gathered = experience(policy, sums("number", ["46", "46"]), ["46", "45", "=", "="], quiet)
    assert gathered.batch.responses == len(gathered.rollouts.responses) == sum(gathered.rollouts.minibatch_sizes) == 4
    assert {a.verdict.kind for a in gathered.rollouts.responses} == {"correct", "wrong"}
    assert [a.verdict.kind for a in gathered.rollouts.excluded] == ["no_answer"] * 4
    advantages = sorted(gathered.batch.advantage.tolist())
    assert advantages[0] == pytest.approx(-advantages[-1])  # of two, not of four


def test_a_step_whose_responses_are_all_excluded_has_an_empty_batch(policy: Policy) -> None:
    gathered = experience(policy, sums("number", ["forty-six"]), ["46", "45", "1", "2"], four())
    assert (gathered.rollouts.responses, gathered.rollouts.minibatch_sizes, gathered.batch.tokens) == ([], [], 0)
    assert len(gathered.rollouts.excluded) == 8
    metrics = step_metrics(gathered, [])
    assert metrics["reward/crashed_share"] == 1.0
    assert metrics["reward/excluded"] == 8


def test_the_kinds_are_counted(policy: Policy) -> None:
    gathered = experience(policy, sums("number", ["46", "46"]), ["46", "45", "=", "="], four())
    metrics = step_metrics(gathered, [])
    counted = {name: value for name, value in metrics.items() if name.startswith("reward/")}
    assert counted == {
        "reward/mean": 0.25,
        "reward/accuracy": 0.25,
        "reward/no_answer_share": 0.5,
        "reward/ambiguous_share": 0.0,
        "reward/too_costly_share": 0.0,
        "reward/crashed_share": 0.0,
        "reward/excluded": 0,
    }
    assert counted.keys() <= METRICS.keys()


def test_dynamic_sampling_ignores_excluded_responses(policy: Policy) -> None:
    dynamic = four(
        rollout={"dynamic_sampling": True, "dynamic_max_rounds": 1}, reward={"no_answer": "exclude", "wrong": -1.0}
    )
    task = sums("number", ["46", "45"])
    found = sample_groups(
        scripted_trainer(policy, FixedTexts(policy, ["46", "46", "=", "="]), dynamic, task), RunProgress()
    )
    assert (found.admitted, found.refused) == ([], {"mixed": 6})  # 46 twice and nothing else is no spread


def test_a_custom_rule_grades_a_step(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rule.py").write_text("def ends(response, answer, extra):\n    return response.endswith(answer)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    gathered = experience(policy, sums("python:my_rule:ends", ["6"]), ["46", "45", "6", "7"], four())
    kinds = {a.text: a.verdict.kind for a in gathered.rollouts.responses}
    assert kinds == {"46": "correct", "45": "wrong", "6": "correct", "7": "wrong"}
