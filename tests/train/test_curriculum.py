"""A curriculum in a run: problems by pools, gates, metrics, and the same results after a kill and on several ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from helpers.parallel.thread_ranks import train_ranks
from helpers.train.scripted import MixedGroups, scripted_trainer, small_config
from helpers.train.short_runs import RunProcess, contents, differences, recipe, trained
from trimtab.cli.summary import closing_summary
from trimtab.data import Sample
from trimtab.trainer.config import Config, parse
from trimtab.trainer.model import Policy, load_policy
from trimtab.trainer.train import checkpoints, describe_metric
from trimtab.trainer.train.curriculum import build_curriculum
from trimtab.trainer.train.metrics import METRICS
from trimtab.trainer.train.rollouts import collect_rollouts, sample_groups
from trimtab.trainer.train.trainer import RunProgress, Trainer

POOLS = {"curriculum.problems": '"pools"', "curriculum.gates": '["mixed", "mean_reward"]'}
# Long responses are penalized, so mean rewards are below 0, and rewards differ in most groups.
POOLS |= {"curriculum.mean_above": "-0.6", "rollout.dynamic_max_rounds": "2"}


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("demo", device="cpu", seed=0)


def trainer_of(policy: Policy, mixed_every: int, curriculum: dict[str, Any], **sections: Any) -> Trainer:
    config = small_config(curriculum=curriculum, **sections)
    trainer = scripted_trainer(policy, MixedGroups(policy, mixed_every), config)
    trainer.curriculum = build_curriculum(config, trainer.task)
    return trainer


def numbers(groups: list[list[Sample]]) -> list[int]:
    return [group[0].group for group in groups]


def test_the_gate_mixed_is_dynamic_sampling(policy: Policy) -> None:
    gate = sample_groups(trainer_of(policy, 2, {"gates": ["mixed"]}), RunProgress())
    dynamic = sample_groups(trainer_of(policy, 2, {}, rollout={"dynamic_sampling": True}), RunProgress())
    assert numbers(gate.admitted) == numbers(dynamic.admitted) == [0, 2, 4, 6]
    assert (gate.position, gate.refused) == (dynamic.position, dynamic.refused) == (7, {"mixed": 6})


def test_a_group_counts_for_the_first_gate_that_refuses_it(policy: Policy) -> None:
    keys = {"gates": ["mean_reward", "mixed"], "mean_above": 0.1}
    found = sample_groups(trainer_of(policy, 3, keys, rollout={"dynamic_max_rounds": 1}), RunProgress())
    assert found.refused == {"mean_reward": 8}
    found = sample_groups(trainer_of(policy, 1, {**keys, "mean_below": 0.5}), RunProgress())
    assert (found.admitted, set(found.refused)) == ([], {"mean_reward"}), "a mean of one half is not below one half"


def test_without_pools_and_gates_there_is_no_metric_and_no_state(tmp_path: Path, policy: Policy) -> None:
    run, _ = trained(tmp_path / "run", {"run.steps": "1", "warm_start.steps": "0"})
    assert run.trainer.curriculum is None
    assert not [name for record in run.folder.records() for name in record if name.startswith("curriculum/")]
    assert "curriculum" not in checkpoints.read(checkpoints.list_checkpoints(run.folder.checkpoints)[-1]).state
    dynamic = trainer_of(policy, 2, {}, rollout={"dynamic_sampling": True})
    assert collect_rollouts(dynamic, RunProgress()).curriculum == {}


def test_groups_that_gates_refuse_are_observed_too(policy: Policy) -> None:
    trainer = trainer_of(policy, 2, {"problems": "pools", "gates": ["mixed"]}, rollout={"dynamic_oversample": 2.0})
    found = collect_rollouts(trainer, RunProgress())
    assert found.curriculum["curriculum/pool_normal"] == found.curriculum["curriculum/pool_hard"] == 4
    assert found.curriculum["curriculum/admitted_share"] == 0.5
    assert found.curriculum["curriculum/refused_mixed"] == found.dropped_groups == 4


def test_a_run_logs_its_pools_and_what_gates_refuse(tmp_path: Path) -> None:
    run, _ = trained(tmp_path / "run", POOLS)
    records = run.folder.records()
    logged = {name for record in records for name in record if name.startswith("curriculum/")}
    assert {f"curriculum/pool_{name}" for name in ("unseen", "hard", "normal", "easy", "solved")} <= logged
    assert {"curriculum/admitted_share", "curriculum/refused_mixed", "curriculum/refused_mean_reward"} <= logged
    assert logged <= METRICS.keys() and all(map(describe_metric, logged))
    steps = [record for record in records if "curriculum/pool_hard" in record]
    assert any(0 < record["curriculum/admitted_share"] < 1 for record in steps)
    assert all(sum(record[name] for name in record if "/pool_" in name) == 10 for record in steps)
    assert "problems           " in closing_summary(run.config, run.folder, 1.0)
    kept = checkpoints.read(checkpoints.list_checkpoints(run.folder.checkpoints)[-1]).state["curriculum"]
    assert run.trainer.curriculum is not None and kept == run.trainer.curriculum.state_dict()


@pytest.mark.parametrize("failpoint", ["step.done:5", "checkpoint.manifest:4", "line.torn:4"])
def test_a_run_with_pools_that_is_killed_and_resumed_ends_like_one_that_was_not(
    tmp_path_factory: pytest.TempPathFactory, whole: dict[str, str], failpoint: str
) -> None:
    process = RunProcess(tmp_path_factory.mktemp("killed") / "run", POOLS, failpoint=failpoint)
    assert process.run() < 0, "it was killed"
    assert process.resumed().run() == 0
    assert not differences(contents(process.folder), whole)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    process = RunProcess(tmp_path_factory.mktemp("whole") / "run", POOLS)
    assert process.run() == 0
    return contents(process.folder)


def test_a_run_started_from_another_with_the_same_curriculum_goes_on_with_its_pools(tmp_path: Path) -> None:
    first, _ = trained(tmp_path / "first", POOLS | {"run.steps": "2"})
    start = {"model.start_from": json.dumps(str(first.folder.path)), "warm_start.steps": "0", "run.steps": "1"}
    assert first.trainer.curriculum is not None
    for changes, same in ((POOLS, True), (POOLS | {"curriculum.hard_share": "0.2"}, False)):
        run, _ = trained(tmp_path / f"second-{same}", changes | start)
        saved = checkpoints.read(run.folder.checkpoints / "step-00000000").state["curriculum"]
        assert (saved == first.trainer.curriculum.state_dict()) is same


def test_several_ranks_choose_and_admit_what_one_does() -> None:
    base = {"warm_start.steps": "0", "objective": '"grpo"', "rollout.prompts": "4", "rollout.samples": "3"}
    config = recipe(base | POOLS | {"update.per_step": "1"})
    several, one = train_ranks(config, 3, 3), train_ranks(config, 1, 3)[0]
    assert all(rank.tokens == one.tokens and rank.progress == one.progress for rank in several)
    assert several[0].trainer.curriculum is not None and one.trainer.curriculum is not None
    assert several[0].trainer.curriculum.state_dict() == one.trainer.curriculum.state_dict()
    for ours, alone in zip(several[1].metrics, one.metrics, strict=True):
        names = [name for name in alone if name.startswith("curriculum/")]
        assert names and [ours[name] for name in names] == [alone[name] for name in names]


# --- the recipe's section


@pytest.mark.parametrize(
    ("curriculum", "words"),
    [
        ({"problems": "pool"}, "did you mean pools"),
        ({"gates": ["mixt"]}, "did you mean mixed"),
        ({"gates": ["mixed", "mixed"]}, "names a gate twice"),
        (
            {"problems_options": {"a": 1}},
            "they are for problems of your own; those of uniform are keys of this section",
        ),
        ({"hard_share": 0.2}, 'hard_share = 0.2 is about problems = "pools": set that too, or leave it out'),
        ({"mean_below": 0.9}, 'mean_below = 0.9 is about gates = ["mean_reward"]: set that too, or leave it out'),
        ({"problems": "pools", "unseen_share": 0.0}, "curriculum.unseen_share = 0.0: must be more than 0"),
        ({"problems": "pools", "max_hard": 0.8}, "max_hard must be below min_easy"),
        ({"gates": ["mean_reward"], "mean_above": 1.0}, "mean_above = 1.0 must be below mean_below = 1.0"),
    ],
)
def test_a_wrong_key_says_what_would_be_right(curriculum: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse({"curriculum": curriculum})


def test_a_gate_for_mixed_groups_needs_groups() -> None:
    with pytest.raises(ValueError, match=r'curriculum\.gates = \["mixed"\] needs rollout\.samples of 2 or more, not 1'):
        parse({"curriculum": {"gates": ["mixed"]}, "rollout": {"samples": 1}})


def test_dynamic_sampling_is_the_first_gate_and_counts_once() -> None:
    config: Config = parse({"rollout": {"dynamic_sampling": True}, "curriculum": {"gates": ["mean_reward", "mixed"]}})
    assert config.gates == ["mixed", "mean_reward"]
