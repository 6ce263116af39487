"""Runs whose rollouts have several branches: each counts as one in advantages, means and metrics, and is recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.insight.exact_plans import assert_plans_come_again
from helpers.parallel.thread_ranks import Trained, train_ranks, use_sgd
from helpers.train.branching import branching, cut_into_branches
from helpers.train.short_runs import recipe, trained
from trimtab.data import Problem, Response, Sample, by_rollout
from trimtab.grading import Verdict
from trimtab.insight.replay import replay
from trimtab.record import open_run
from trimtab.trainer.config import RewardConfig
from trimtab.trainer.train.gates import has_reward_spread
from trimtab.trainer.train.metrics import term_metrics
from trimtab.trainer.train.rollouts import Rollouts, remove_excluded

SHORT = {"run.steps": "2", "run.eval_every": "0", "run.checkpoint_every": "0", "update.token_budget": "40"}
# The mean of the ratios of tokens is that of the branches only if each token has its own.
TOKEN_RATIOS = ("grpo", "dapo", "stapo(tau_p=0.2)", "stare(gate=none)", "grpo(aggregation=seq-mean-token-sum)")
BASE = {"warm_start.steps": "0", "rollout.prompts": "4", "rollout.samples": "3", "update.per_step": "2"}


def sample(
    number: int, branch: int | None, reward: float, group: int = 0, length: int = 2, kind: str = "wrong"
) -> Sample:
    response = Response(list(range(1, length + 1)), [-1.0] * length, True, number)
    verdict = Verdict(kind)  # type: ignore[arg-type]
    problem = Problem((), "1", "", "made")
    return Sample(problem, "", [1], response, group, branch=branch, verdict=verdict, reward=reward, terms={"b": reward})


def ranks(objective: str, size: int, changes: dict[str, str] | None = None) -> list[Trained]:
    return train_ranks(recipe(BASE | {"objective": f'"{objective}"'} | (changes or {})), size, 2, use_sgd)


@pytest.mark.parametrize("objective", TOKEN_RATIOS)
def test_a_run_of_responses_cut_into_branches_is_the_run_of_whole_ones(objective: str) -> None:
    (whole,) = ranks(objective, 1)
    with branching():
        (cut,) = ranks(objective, 1)
    assert cut.seen[0][1].responses > whole.seen[0][1].responses
    assert (cut.weights - whole.weights).norm() < 1e-4 * (whole.weights - whole.start).norm()
    for mine, other in zip(cut.metrics, whole.metrics, strict=True):
        assert mine.keys() == other.keys()
        per_response = {"response/length_mean", "response/truncated_share", "response/repetition_share"}
        for name in other.keys() - per_response:
            if not name.startswith(("time/", "memory/")):
                assert mine[name] == pytest.approx(other[name], rel=1e-4, abs=1e-4, nan_ok=True), name


@pytest.mark.parametrize("objective", ["gspo", "sspo", "stapo(tau_p=0.2)"])
def test_ranks_train_on_branches_as_one_process(objective: str) -> None:
    with branching():
        (alone,), several = ranks(objective, 1), ranks(objective, 3)
    for rank in several:
        assert rank.tokens == alone.tokens
        for mine, other in zip(rank.plans, alone.plans, strict=True):
            torch.testing.assert_close(mine.scale, other.scale)
        assert (rank.weights - alone.weights).norm() < 1e-4 * (alone.weights - alone.start).norm()


def test_shared_passes_of_prompts_take_branches_with_prompts_of_their_own() -> None:
    with branching():
        (plain,), (shared,) = (ranks("grpo", 1, {"update.shared_prompts": value}) for value in ("false", "true"))
    assert (shared.weights - plain.weights).norm() < 1e-3 * (plain.weights - plain.start).norm()


@pytest.mark.parametrize(
    "objective", ["stapo(tau_p=0.2)", "gspo", "sspo", "stare(gate=none,aggregation=seq-mean-token-mean)"]
)
def test_the_record_of_branches_gives_the_plan_again(objective: str, tmp_path: Path) -> None:
    with branching():
        trained(tmp_path / "run", {**SHORT, "objective": f'"{objective}"'})
    records = open_run(tmp_path / "run")
    assert_plans_come_again(records)
    step = records.step(1)
    rows = list(zip(step.responses["group"], step.responses["sample"], step.responses["branch"], strict=True))
    assert len(set(rows)) == len(rows)
    assert step.rollouts is not None
    assert len(set(step.rollouts)) == len({row[:2] for row in rows}) < len(rows)
    by_branch = dict(zip(rows, range(len(rows)), strict=True))
    for (group, number, branch), row in by_branch.items():
        if branch:
            before = by_branch[group, number, branch - 1]
            said = records.vocabulary.decode(step._ids(before)[:1])
            assert step.responses["prompt"][row] == step.responses["prompt"][before] + said


def test_a_replay_says_how_many_rollouts_the_branches_are_of(tmp_path: Path) -> None:
    with branching():
        trained(tmp_path / "cut", {**SHORT, "objective": '"grpo"'})
    trained(tmp_path / "whole", {**SHORT, "objective": '"grpo"'})
    cut, whole = (replay(tmp_path / name, ["recorded", "dr_grpo"]) for name in ("cut", "whole"))
    rollouts = sum(len(set(step.rollouts or ())) for step in open_run(tmp_path / "cut"))
    assert any(f"branches of {rollouts} rollouts" in note for note in cut.notes)
    assert not any("branches" in note for note in whole.notes)
    assert "branch" not in open_run(tmp_path / "whole").step(1).responses


def test_metrics_of_a_run_of_branches_count_rollouts(tmp_path: Path) -> None:
    """Beside the run of whole responses, which has the same rewards."""
    changes = {**SHORT, "objective": '"grpo"', "run.steps": "1"}
    trained(tmp_path / "whole", changes)
    with branching():
        trained(tmp_path / "cut", changes)
    cut, whole = (
        json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0]) for name in ("cut", "whole")
    )
    for name in (name for name in whole if name.startswith(("reward/", "groups/", "tokens/count"))):
        assert cut[name] == pytest.approx(whole[name]), name
    assert cut["response/length_mean"] < whole["response/length_mean"]


def test_responses_of_one_rollout_are_together_and_all_others_alone() -> None:
    branches = [sample(0, 0, 1.0), sample(1, 0, 0.0), sample(0, 1, 1.0), sample(0, 0, 1.0, group=1)]
    assert [[branches.index(each) for each in rollout] for rollout in by_rollout(branches)] == [[0, 2], [1], [3]]
    plain = [replace(each, branch=None) for each in branches]
    assert [len(rollout) for rollout in by_rollout(plain)] == [1, 1, 1, 1]


def test_the_mean_reward_of_a_term_is_over_rollouts() -> None:
    group = [sample(0, 0, 1.0), sample(0, 1, 0.5), sample(1, 0, 0.0)]
    config = RewardConfig(terms={"b": {"rule": "length", "options": {"free": 2, "limit": 6}}})  # type: ignore[dict-item]
    for each in group:
        each.terms = {"task": 1.0, "b": each.reward}
    assert term_metrics([group], config)["rewards/b"] == pytest.approx(0.375)


def test_a_single_remaining_rollout_is_left_out_however_many_branches_it_has() -> None:
    one = [sample(0, 0, 1.0), sample(0, 1, 1.0)]
    lost = sample(1, 0, 0.0)
    lost.excluded = True
    kept, excluded = remove_excluded([[*one, lost]])
    assert (kept, len(excluded)) == ([], 3)
    kept, excluded = remove_excluded([one])
    assert (kept, excluded) == ([one], [])
    other = sample(2, 0, 0.0)
    kept, excluded = remove_excluded([[*one, lost, other]])
    assert (kept, excluded) == ([[*one, other]], [lost])


def test_a_group_whose_branches_differ_has_a_signal() -> None:
    assert has_reward_spread([sample(0, 0, 1.0), sample(0, 1, 0.0), sample(1, 0, 0.5)])
    assert not has_reward_spread([sample(0, 0, 1.0), sample(0, 1, 1.0), sample(1, 0, 1.0)])


def test_other_processes_learn_which_branch_a_response_is() -> None:
    (made,) = Rollouts([sample(3, 5, 1.0)], [1]).responses
    sent = made.to_train()
    assert (sent.branch, sent.response.sample, sent.reward) == (5, 3, 1.0)


def test_the_helper_gives_every_token_to_one_branch() -> None:
    whole = sample(2, None, 1.0, length=5)
    parts = cut_into_branches(whole)
    assert [part.response.tokens.tolist() for part in parts] == [[1], [2], [3, 4, 5]]
    assert [list(part.prompt) for part in parts] == [[1], [1, 1], [1, 1, 2]]
