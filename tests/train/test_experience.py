"""A step's experience: the order of prompts, dynamic sampling, rewards, mini-batches; and sinks that may die."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.config import Config, RewardConfig, parse
from trimtab.objectives import segment_ids
from trimtab.policy import Policy, load_policy
from trimtab.rewards import Verdict
from trimtab.rollout import PromptTokens, Response, SamplingOptions
from trimtab.tasks import Arithmetic
from trimtab.train import experience
from trimtab.train.experience import arrange, collect, encode_prompts, gather_experience, has_spread, reward_of
from trimtab.train.run_folder import RunFolder
from trimtab.train.sinks import Sinks


@dataclass
class Scripted:
    """A sampler that answers some prompts right by turns and the others always wrong."""

    policy: Policy
    mixed_every: int
    asked: list[int]

    def sample(self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions) -> list[list[Response]]:
        groups = []
        for prompt in prompts:
            self.asked.append(prompt.number)
            a, b = self.policy.tokenizer.decode(list(prompt.ids)).rstrip("=").split("+")
            right = self.policy.encode_solution(str(int(a) + int(b)))
            wrong = self.policy.encode_solution("7" if int(a) + int(b) != 7 else "8")
            mixed = prompt.number % self.mixed_every == 0
            tokens = [right if mixed and sample % 2 else wrong for sample in range(options.samples)]
            groups.append([Response(t, [-1.0] * len(t), True, sample=n) for n, t in enumerate(tokens)])
        return groups


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("demo", device="cpu", seed=0)


def config(**sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "objective": {"name": "stapo"},
        "rollout": {"prompts": 4, "samples": 2, "max_new_tokens": 5},
    }
    return parse({key: base.get(key, {}) | sections.get(key, {}) for key in {**base, **sections}})


def test_prompts_come_in_order_and_the_position_moves_on(policy: Policy) -> None:
    sampler = Scripted(policy, 1, [])
    groups, dropped, position = collect(policy, sampler, Arithmetic(), 10, 0, config())
    assert (sampler.asked, dropped, position) == ([10, 11, 12, 13], 0, 14)
    assert [group[0].group for group in groups] == [10, 11, 12, 13]


def test_dynamic_sampling_keeps_groups_with_spread_and_draws_others(policy: Policy) -> None:
    sampler = Scripted(policy, 2, [])
    groups, dropped, position = collect(policy, sampler, Arithmetic(), 0, 0, config(rollout={"dynamic_sampling": True}))
    assert sampler.asked == list(range(12))  # three times as many as wanted
    assert [group[0].group for group in groups] == [0, 2, 4, 6]
    assert all(has_spread(group) for group in groups)
    assert (dropped, position) == (6, 7)  # prompts 7 to 11 are met again


def test_dynamic_sampling_goes_on_for_some_rounds_and_then_makes_do(policy: Policy) -> None:
    sampler = Scripted(policy, 10, [])
    few = config(rollout={"dynamic_sampling": True, "dynamic_max_rounds": 2})
    groups, _, position = collect(policy, sampler, Arithmetic(), 0, 0, few)
    assert [group[0].group for group in groups] == [0, 10]
    assert position == len(sampler.asked) == 12 + 6  # two were found in the first round


def test_a_step_without_any_spread_is_empty_and_whole(policy: Policy) -> None:
    nothing = config(rollout={"dynamic_sampling": True, "dynamic_max_rounds": 1})
    sampler = Scripted(policy, 10**9, [])
    objective = nothing.build_objective()
    experience = gather_experience(policy, sampler, Arithmetic(), objective, None, 1, 0, nothing)
    assert (experience.answers, experience.sizes, experience.batch.tokens) == ([], [], 0)


@pytest.mark.parametrize(("length", "penalty"), [(1, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (10, -1.0)])
def test_the_overlong_penalty_falls_linearly_over_the_buffer(length: int, penalty: float) -> None:
    response = Response([2] * length, [-1.0] * length, True)
    shaped = RewardConfig(correct=1.0, wrong=-1.0, overlong_buffer=4)
    assert reward_of(Verdict("correct", None), response, shaped, limit=10) == pytest.approx(1.0 + penalty)
    assert reward_of(Verdict("wrong", None), response, shaped, limit=10) == pytest.approx(-1.0 + penalty)


def test_minibatches_hold_whole_groups_sorted_by_length(policy: Policy) -> None:
    groups, _, _ = collect(policy, Scripted(policy, 2, []), Arithmetic(), 0, 0, config())
    answers, sizes = arrange(groups, 2)
    assert sizes == [4, 4]
    for part in (answers[:4], answers[4:]):
        lengths = [len(answer.transcript) for answer in part]
        assert lengths == sorted(lengths)
    assert {answer.group for answer in answers[:4]} == {0, 1}


def test_a_batch_carries_what_the_objective_needs(policy: Policy) -> None:
    recipe = config(objective={"name": "sspo + tis"})
    objective = recipe.build_objective()
    experience = gather_experience(policy, Scripted(policy, 2, []), Arithmetic(), objective, None, 0, 0, recipe)
    batch = experience.batch
    assert batch.responses == 8
    assert all(getattr(batch, name) is not None for name in objective.needs)
    assert set(batch.advantage.sign().tolist()) == {-1.0, 0.0, 1.0}
    assert torch.isfinite(objective.loss(batch.old_logp, objective.plan(batch)).loss)


def test_segments_are_made_while_a_gpu_scores(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the scoring, which a GPU is only asked for, and ahead of all that must wait for it; on the host."""
    chosen, order = config(objective={"name": "sspo"}), list[str]()
    objective = chosen.build_objective()

    def noted(name: str) -> Any:
        real = getattr(experience, name)
        return lambda *args, **kwargs: (order.append(name), real(*args, **kwargs))[1]

    for name in ("score", "segment_ids", "TokenBatch"):
        monkeypatch.setattr(experience, name, noted(name))
    monkeypatch.setattr(type(objective), "advantages", lambda self, reward, group: order.append("advantages") or reward)
    made = gather_experience(policy, Scripted(policy, 1, []), Arithmetic(), objective, None, 0, 0, chosen)
    assert order == ["score", "segment_ids", "advantages", "TokenBatch"]
    assert made.batch.segment is not None
    assert made.batch.sequence.tolist() == [n for n, a in enumerate(made.answers) for _ in a.response.tokens]


def test_a_batch_holds_the_numbers_of_its_answers_in_order(policy: Policy) -> None:
    chosen = config(objective={"name": "sspo"})
    objective, sampler = chosen.build_objective(), Scripted(policy, 2, [])
    made = gather_experience(policy, sampler, Arithmetic(), objective, None, 0, 0, chosen)
    batch, answers = made.batch, made.answers
    spoken = [answer.response.tokens for answer in answers]
    assert batch.token is not None and batch.token.tolist() == [token for tokens in spoken for token in tokens]
    assert batch.segment is not None
    assert batch.segment.tolist() == [n for tokens in spoken for n in segment_ids(tokens, policy.tokenizer).tolist()]
    assert batch.sampler_logp is not None and set(batch.sampler_logp.tolist()) == {-1.0}
    assert batch.group is not None and batch.group.tolist() == [answer.group for answer in answers]
    assert batch.reward is not None and batch.reward.tolist() == [answer.reward for answer in answers]
    advantage = objective.advantages(batch.reward, batch.group)
    assert torch.equal(batch.advantage, advantage.repeat_interleave(batch.lengths))


def test_all_that_the_host_makes_goes_to_a_gpu_in_two_copies(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[list[Any]] = []
    real = experience.to_device
    monkeypatch.setattr(experience, "to_device", lambda where, *many: (copies.append([*many]), real(where, *many))[1])
    chosen = config(objective={"name": "sspo"})
    objective, sampler = chosen.build_objective(), Scripted(policy, 2, [])
    made = gather_experience(policy, sampler, Arithmetic(), objective, None, 0, 0, chosen)
    assert [{array.dtype.name for array in copy} for copy in copies] == [{"int64"}, {"float32"}]
    shared = {array.ctypes.data for copy in copies for array in copy}  # without a GPU nothing is copied
    for name in ("token", "sequence", "segment", "group", "reward"):
        assert getattr(made.batch, name).data_ptr() in shared


@pytest.mark.parametrize("change", [-1, 1])
def test_a_sampler_that_lost_count_is_told(policy: Policy, change: int) -> None:
    """A log-probability too many, or one too few, would be taken for the next token's."""

    class Miscounting(Scripted):
        def sample(self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions) -> list[list[Response]]:
            groups = super().sample(prompts, step, options)
            first = groups[0][0]
            groups[0][0] = replace(first, logp=[-1.0] * (len(first.tokens) + change))
            return groups

    chosen = config()
    with pytest.raises(ValueError, match="`sampler_logp` has shape"):
        gather_experience(
            policy, Miscounting(policy, 2, []), Arithmetic(), chosen.build_objective(), None, 0, 0, chosen
        )


def test_prompts_are_encoded_at_once_and_numbered(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [(number, Arithmetic()[number]) for number in (7, 3, 5)]
    expected = [policy.encode(problem.prompt) for _, problem in problems]
    monkeypatch.setattr(Policy, "encode", lambda *_: pytest.fail("one prompt by itself"))
    prompts = encode_prompts(policy, problems, limit=20)
    assert [(prompt.number, prompt.ids) for prompt in prompts] == list(zip((7, 3, 5), expected, strict=True))


def test_a_prompt_that_is_too_long_is_named(policy: Policy) -> None:
    with pytest.raises(ValueError, match="max_prompt_tokens=2"):
        encode_prompts(policy, [(0, Arithmetic()[0])], limit=2)


def test_a_sink_that_dies_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[int] = []

    class Run:
        def log(self, metrics: dict[str, float], step: int) -> None:
            if step == 2:
                raise ConnectionError("gone")
            logged.append(step)

        def finish(self) -> None:
            raise AssertionError("a dead sink is not closed")

    wandb = types.ModuleType("wandb")
    wandb.init = lambda **options: Run()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "trackio", None)
    said: list[str] = []
    sinks = Sinks(config(run={"sinks": ["wandb", "trackio"]}), RunFolder(tmp_path), said.append)
    for step in (1, 2, 3):
        sinks.log(step, {"reward/mean": 0.5})
    sinks.close()
    assert logged == [1]
    assert len(said) == 2
    assert "trackio sink could not be opened" in said[0]
    assert "wandb sink failed" in said[1]
