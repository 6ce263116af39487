"""Partial rollouts: each token that was sampled is trained on once, with the log-prob and weights of its sampling."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.parallel.thread_ranks import on_ranks, thread_worlds, train_ranks, use_sgd
from helpers.train.ragged import RaggedSampler
from helpers.train.scripted import scripted_trainer, small_config
from helpers.train.short_runs import RunProcess, contents, differences, recipe, trained
from trimtab.data import Response, Sample
from trimtab.record import open_run
from trimtab.trainer.config import parse
from trimtab.trainer.model import Policy, Transcript, load_policy, score
from trimtab.trainer.sampling import rng_keys
from trimtab.trainer.train import checkpoints
from trimtab.trainer.train.curriculum import DifficultyPools, build_curriculum
from trimtab.trainer.train.metrics import METRICS, step_metrics
from trimtab.trainer.train.partial_rollouts import PartialRollouts, lag_metrics, token_lags
from trimtab.trainer.train.rollouts import SampledGroups, collect_rollouts, sample_groups
from trimtab.trainer.train.scoring import score_rollouts
from trimtab.trainer.train.trainer import RunProgress, Trainer

# Responses of up to 12 tokens, of which an untrained model ends some early; two steps' worth are begun ahead.
LAG = {"rollout.max_lag": "2", "rollout.max_new_tokens": "12", "objective": '"dapo"', "run.checkpoint_every": "1"}


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("demo", device="cpu", seed=0)


def lagging_trainer(policy: Policy, max_lag: int, **sections: Any) -> tuple[Trainer, RaggedSampler]:
    rollout = {"max_lag": max_lag, "max_new_tokens": 30} | sections.pop("rollout", {})
    config = small_config(objective={"name": "dapo"}, rollout=rollout, **sections)
    sampler = RaggedSampler(policy, rollout["max_new_tokens"])
    trainer = scripted_trainer(policy, sampler, config)  # type: ignore[arg-type]
    trainer.partial = PartialRollouts((1 + max_lag) * config.rollout.prompts)
    trainer.curriculum = build_curriculum(config, trainer.task)
    return trainer, sampler


def steps_of(trainer: Trainer, sampler: RaggedSampler, steps: int) -> list[SampledGroups]:
    """Sample the groups of some steps, in each with weights of another version."""
    progress, found = RunProgress(), []
    for step in range(steps):
        sampler.version = step
        found.append(sample_groups(trainer, progress))
        progress.position, progress.step = found[-1].position, step + 1
    return found


def tokens_of(group: list[Sample], begun: int, seed: int) -> dict[tuple[int, int], tuple[int, float, int]]:
    """Return token, log-probability and version of all tokens of a group, by random key and position."""
    keys = rng_keys(seed, begun, [group[0].group], len(group)).tolist()
    found = {}
    for sample in group:
        response, key = sample.response, keys[sample.response.sample]
        versions = [version for tokens, version in response.versions for _ in range(tokens)]
        rows = zip(response.tokens.tolist(), response.logp.tolist(), versions, strict=True)
        found |= {(key, position): row for position, row in enumerate(rows)}
    return found


@settings(max_examples=40, deadline=None)
@given(
    max_lag=st.integers(1, 5),
    prompts=st.integers(1, 5),
    samples=st.integers(2, 4),
    slots=st.integers(1, 40),
    longest=st.integers(1, 40),
    seed=st.integers(0, 2**20),
)
def test_each_token_is_trained_once_as_it_was_sampled_and_nothing_is_dropped(
    policy: Policy, max_lag: int, prompts: int, samples: int, slots: int, longest: int, seed: int
) -> None:
    sizes = {"prompts": prompts, "samples": samples, "batch_size": slots, "max_new_tokens": longest}
    trainer, sampler = lagging_trainer(policy, max_lag, rollout=sizes, run={"seed": seed})
    assert trainer.partial is not None
    begun, trained_tokens, found = dict[int, int](), {}, []
    progress = RunProgress()
    for step in range(6):
        sampler.version = step
        before = progress.position
        found.append(sample_groups(trainer, progress))
        begun |= dict.fromkeys(range(before, found[-1].position), step)
        progress.position, progress.step = found[-1].position, step + 1
        assert len(trainer.partial.groups) == max_lag * prompts, "the limit, without the groups of this step"
        ready, _ = trainer.partial.split(trainer.config.sampling_options(samples))
        trained_now = [group[0].group for group in found[-1].admitted]
        assert len(trained_now) == prompts and trained_now == sorted(trained_now)
        assert all(group.number > trained_now[-1] for group in ready), "the oldest finished ones are trained"
        for group in found[-1].admitted:
            rows = tokens_of(group, begun[group[0].group], seed)
            assert not rows.keys() & trained_tokens.keys()
            trained_tokens |= rows
    waiting = {}
    for partial in trainer.partial.groups:
        group = [Sample(trainer.task[0], response=each, group=partial.number) for each in partial.responses]
        waiting |= tokens_of(group, partial.step, seed)
        assert partial.step == begun[partial.number]
    assert not waiting.keys() & trained_tokens.keys()
    assert trained_tokens | waiting == sampler.log
    numbers = [group[0].group for each in found for group in each.admitted] + [g.number for g in trainer.partial.groups]
    assert sorted(numbers) == list(range(progress.position)), "each prompt is trained once or still waits"


def test_the_oldest_responses_get_the_slots(policy: Policy) -> None:
    trainer, sampler = lagging_trainer(policy, 2, rollout={"batch_size": 3})
    steps_of(trainer, sampler, 5)
    # Of a group all responses were begun in one step; keys of older groups come before those of later ones.
    order: dict[int, int] = {}
    for step in range(5):
        for number in range(40):
            for key in rng_keys(0, step, [number], 2).tolist():
                order[key] = number
    assert len(sampler.asked) > 3
    for asked in sampler.asked:
        assert [order[key] for key in asked] == sorted(order[key] for key in asked)


def test_a_larger_lag_takes_fewer_passes_and_waits_for_no_long_response(policy: Policy) -> None:
    passes = []
    for max_lag in (1, 2, 4):
        trainer, sampler = lagging_trainer(policy, max_lag, rollout={"max_new_tokens": 50})
        steps_of(trainer, sampler, 12)
        passes.append(sampler.passes)
    assert passes[0] > passes[1] > passes[2]


def test_gates_and_pools_see_a_group_when_it_is_taken_and_refused_ones_are_replaced(policy: Policy) -> None:
    rounds = {"dynamic_max_rounds": 4, "dynamic_oversample": 1.5}
    gates = {"gates": ["mean_reward"], "problems": "pools", "mean_below": 0.9}  # most means are 0: refused
    trainer, sampler = lagging_trainer(policy, 2, curriculum=gates, rollout=rounds)
    found = steps_of(trainer, sampler, 3)
    assert isinstance(trainer.curriculum, DifficultyPools) and trainer.partial is not None
    for each in found:
        assert each.sampled == len(each.admitted) + each.refused.total()
        assert len(each.admitted) == 4 or each.sampled == 24, "six rounds of the groups that are missing"
    seen = sum(map(len, trainer.curriculum.pools.values()))
    assert 0 < seen <= sum(each.sampled for each in found)
    assert len(trainer.partial.groups) <= 12


def test_problems_that_are_begun_are_not_chosen_again_before_others(policy: Policy) -> None:
    config = parse({"curriculum": {"problems": "pools"}, "task": {"size": 1000}})
    trainer, _ = lagging_trainer(policy, 1)
    pools = DifficultyPools(trainer.task, 0, config.curriculum, config.reward)
    pools.observe([(index, 0.5) for index in range(100)])
    chosen = [index for first in range(0, 40, 10) for index in pools.choose(range(first, first + 10))]
    assert len(set(chosen)) == 40


def test_ratios_are_to_the_weights_that_sampled_and_rules_judge_by_the_present_ones(policy: Policy) -> None:
    for name in ("dapo", "dapo + tis"):
        trainer, sampler = lagging_trainer(policy, 2)
        trainer.objective = parse({"objective": {"name": name}}).build_objective()
        position = steps_of(trainer, sampler, 3)[-1].position
        sampler.version = 3
        rollouts = collect_rollouts(trainer, RunProgress(step=3, position=position))
        experience = score_rollouts(trainer, rollouts)
        batch, lags = experience.batch, experience.lags
        assert lags is not None and {0} < set(lags.tolist())
        transcripts = [Transcript(each.prompt, each.response.tokens) for each in rollouts.responses]
        scored = score(policy, transcripts, 1.0, token_budget=1000, head_chunk=64)
        sampled = torch.from_numpy(np.concatenate([each.response.logp for each in rollouts.responses]))
        old = torch.from_numpy(lags > 0)
        torch.testing.assert_close(batch.sampler_logp, sampled)
        torch.testing.assert_close(batch.entropy, scored.entropy)
        torch.testing.assert_close(batch.judged_logp, scored.logp)
        ratio = np.exp(scored.logp.double().numpy() - sampled.double().numpy())
        share = step_metrics(experience, [])["sampler/effective_sample_share"]
        assert share == pytest.approx(ratio.sum() ** 2 / (ratio**2).sum() / len(ratio), rel=1e-4)
        if "tis" in name:
            assert batch.current_logp is None
            torch.testing.assert_close(batch.old_logp, scored.logp)
        else:
            torch.testing.assert_close(batch.old_logp, torch.where(old, sampled, scored.logp))
            plan = trainer.objective.plan(batch)
            torch.testing.assert_close(plan.old_logp[old], sampled[old])


def test_lags_are_those_of_a_loop() -> None:
    rng = np.random.default_rng(0)
    responses = []
    for sample in range(20):
        versions = [(int(rng.integers(1, 6)), version) for version in sorted(rng.choice(7, rng.integers(1, 4), False))]
        length = sum(tokens for tokens, _ in versions)
        responses.append(Response([1] * length, [-1.0] * length, True, sample, versions=tuple(versions)))
    lags = token_lags(responses, 7)
    expected = [7 - version for each in responses for tokens, version in each.versions for _ in range(tokens)]
    assert lags is not None and lags.tolist() == expected
    assert lag_metrics(responses, lags) == {
        "lag/mean": pytest.approx(np.mean(expected)),
        "lag/max": max(expected),
        "lag/spans_mean": np.mean([len(each.versions) for each in responses]),
    }
    assert token_lags([Response([1], [-1.0], True)], 7) is None


def test_every_recorded_log_prob_is_that_of_the_version_it_names(tmp_path: Path) -> None:
    run, log = trained(tmp_path / "run", LAG | {"run.keep_checkpoints": "100"})
    assert log.has("note: rollout.max_lag = 2", "no correction", "+ tis")
    policy, checked, versions = run.trainer.policy, 0, Counter[int]()
    records = open_run(tmp_path / "run")
    for number in records.steps:
        step = records.step(number)
        version, sampled = step.tokens["version"], step.tokens["sampler_logp"]
        assert (version < number).all()
        versions.update((number - 1 - version).tolist())
        for row in range(len(step.responses["tokens"])):
            part = slice(step.offsets[row], step.offsets[row + 1])
            prompt = policy.tokenizer.encode(step.responses["prompt"][row], add_special_tokens=False)
            transcript = Transcript(prompt, np.asarray(step.tokens["token"][part], dtype=np.int64))
            for each in {*version[part].tolist()}:
                checkpoints.load_weights(policy.model, tmp_path / "run" / "checkpoints" / f"step-{each:08d}")
                logp = score(policy, [transcript], 1.0, token_budget=1000, head_chunk=64).logp.numpy()
                mine = version[part] == each
                np.testing.assert_allclose(logp[mine], sampled[part][mine], atol=2e-4)
                checked += int(mine.sum())
    assert checked > 200 and len(versions) > 1 and versions[0]
    logged = {name for record in run.folder.records() for name in record if name.startswith("lag/")}
    assert logged == {name for name in METRICS if name.startswith("lag/")}


def test_without_a_lag_nothing_of_it_is_kept_or_logged(tmp_path: Path) -> None:
    run, log = trained(tmp_path / "run", {"run.steps": "2", "warm_start.steps": "0"})
    assert not log.has("max_lag") and run.trainer.partial is None
    assert not [name for record in run.folder.records() for name in record if name.startswith("lag/")]
    assert not list(run.folder.path.rglob("rollouts.safetensors"))
    assert "version" not in open_run(run.folder.path).step(1).tokens


KILLED = LAG | {"rollout.max_lag": "1", "curriculum.problems": '"pools"', "curriculum.gates": '["mixed"]'}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    process = RunProcess(tmp_path_factory.mktemp("whole") / "run", KILLED)
    assert process.run() == 0, process.messages
    return contents(process.folder)


@pytest.mark.parametrize(
    "failpoint", ["rollouts.sampled:3", "rollouts.sampled:5", "update.done:5", "step.done:4", "checkpoint.tensors:11"]
)
def test_a_run_that_is_killed_with_unfinished_responses_ends_like_one_that_was_not(
    tmp_path_factory: pytest.TempPathFactory, whole: dict[str, str], failpoint: str
) -> None:
    process = RunProcess(tmp_path_factory.mktemp("killed") / "run", KILLED, failpoint=failpoint)
    assert process.run() < 0, "it was killed"
    kept = checkpoints.read(checkpoints.list_checkpoints(process.folder / "checkpoints")[-1])
    lengths, finished = (kept.tensors["rollouts"][name] for name in ("length", "finished"))
    assert bool(((lengths > 0) & (finished == 0)).any()), "the checkpoint has responses that were cut"
    assert process.resumed().run() == 0
    assert not differences(contents(process.folder), whole)


def test_all_ranks_have_the_same_groups_and_train_as_many() -> None:
    base = {"warm_start.steps": "0", "rollout.prompts": "4", "rollout.samples": "3", "update.per_step": "1"}
    config = recipe(LAG | base)
    ranks = train_ranks(config, 2, 4)
    seen: set[tuple[int, int]] = set()
    for one, other in zip(ranks[0].tokens, ranks[1].tokens, strict=True):
        assert one == other
        assert len(one) == 12
        trained_now = {(group, sample) for group, sample, *_ in one}
        assert not trained_now & seen
        seen |= trained_now
    first, second = (rank.trainer.partial for rank in ranks)
    assert first is not None and second is not None and len(first.groups) == 8
    for name, value in first.state().items():
        assert torch.equal(value, second.state()[name])
    assert ranks[0].progress == ranks[1].progress
    assert torch.equal(ranks[0].weights, ranks[1].weights)
    numbers = {group for group, _ in seen} | {group.number for group in first.groups}
    assert numbers == set(range(ranks[0].progress.position))


def test_a_rank_that_need_not_finish_a_group_takes_part_in_sampling_of_a_sharded_policy(policy: Policy) -> None:
    trainer, sampler = lagging_trainer(replace(policy, sharded=True), 2, rollout={"prompts": 1})
    worlds = thread_worlds(2)
    trainers = [replace(trainer, world=world, partial=PartialRollouts(3), seconds={}) for world in worlds]
    found = on_ranks(worlds, lambda rank: steps_of(trainers[rank], sampler, 4))
    for one, other in zip(*found, strict=True):
        assert [s.response for g in one.admitted for s in g] == [s.response for g in other.admitted for s in g]
        assert len(one.admitted) == 1
    assert [] in sampler.asked, "one of them was called with nothing to sample"


def test_micro_batches_change_nothing_but_rounding() -> None:
    config = LAG | {"warm_start.steps": "0", "update.per_step": "1"}
    small, large = (
        train_ranks(recipe(config | {"update.token_budget": size}), 1, 3, use_sgd)[0] for size in ("32", "4096")
    )
    assert small.tokens == large.tokens and small.metrics[-1]["lag/max"] > 0
    torch.testing.assert_close(small.weights, large.weights, rtol=0, atol=1e-5)


def test_a_state_comes_back_and_a_wrong_one_is_refused(policy: Policy) -> None:
    trainer, sampler = lagging_trainer(policy, 2)
    steps_of(trainer, sampler, 3)
    assert trainer.partial is not None
    state, size = trainer.partial.state(), len(trainer.task)
    again = PartialRollouts(12)
    again.load_state(state, 2, 3, size, 100)
    assert again.groups == trainer.partial.groups
    PartialRollouts(12).load_state(PartialRollouts(12).state(), 2, 0, size, 100)
    wrong: list[dict[str, torch.Tensor]] = [
        {"token": state["token"] + 100},
        {"token": state["token"][1:]},
        {"logp": state["logp"].double()},
        {"problem": state["problem"] - size},
        {"step": state["step"] + 3},
        {"span_version": state["span_version"] + 3},
        {"span_tokens": state["span_tokens"] + 1},
        {"finished": state["finished"] * 2 + 2},
        {"length": state["length"] + 1},
    ]
    for change in wrong:
        with pytest.raises(ValueError, match="rollouts/"):
            PartialRollouts(12).load_state(state | change, 2, 3, size, 100)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"rollout": {"engine": "vllm"}}, "rollout.engine = 'vllm', which does not go on with a response"),
        ({"agent": {"command": ["a"]}}, "does not work with an agent"),
        ({"tools": {"use": ["calculator"]}, "rollout": {"max_turns": 2}}, "conversations with tools"),
        ({"update": {"old_stats": "sampled"}}, "use 'scored'"),
        ({"objective": {"name": "dapo", "token_stats": "old"}}, "objective.token_stats = 'old'"),
        ({"rollout": {"top_p": 0.9}}, "rollout.top_p = 0.9 and rollout.top_k = 0"),
        ({"rollout": {"sampler_temperature": 0.5}}, "rollout.sampler_temperature = 0.5"),
    ],
)
def test_what_a_lag_does_not_work_with_is_refused_in_words(table: dict[str, Any], words: str) -> None:
    parse(table)
    with pytest.raises(ValueError, match=f"rollout.max_lag = 1 does not work with .*{words}|{words}"):
        parse(table | {"rollout": table.get("rollout", {}) | {"max_lag": 1}})


@pytest.mark.parametrize(("name", "noted"), [("dapo", True), ("dapo + icepop", False), ("dppo", False), ("gspo", True)])
def test_a_run_says_whether_it_has_a_correction(name: str, noted: bool) -> None:
    config = parse({"objective": {"name": name}, "rollout": {"max_lag": 1}})
    assert bool(config.lag_note) is noted
    assert not parse({"objective": {"name": name}}).lag_note
