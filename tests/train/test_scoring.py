"""Scoring: the token batch of a step holds what its responses and the objective say it should."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from helpers.train.scripted import MixedGroups, scripted_trainer, small_config
from trimtab.data import PromptTokens, Response, SamplingOptions
from trimtab.objectives import segment_ids
from trimtab.trainer.model import Policy, load_policy
from trimtab.trainer.train.rollouts import collect_rollouts
from trimtab.trainer.train.scoring import Experience, score_rollouts
from trimtab.trainer.train.trainer import RunProgress, Trainer


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("demo", device="cpu", seed=0)


def collected(trainer: Trainer, position: int = 0) -> Experience:
    return score_rollouts(trainer, collect_rollouts(trainer, RunProgress(position=position)))


def test_a_step_without_responses_has_an_empty_batch(policy: Policy) -> None:
    one_round = small_config(rollout={"dynamic_sampling": True, "dynamic_max_rounds": 1})
    experience = collected(scripted_trainer(policy, MixedGroups(policy, 10**9), one_round), position=1)
    assert experience.batch.tokens == 0 and list(experience.minibatches()) == []


def test_a_batch_has_every_field_that_the_objective_needs(policy: Policy) -> None:
    trainer = scripted_trainer(policy, MixedGroups(policy, 2), small_config(objective={"name": "sspo + tis"}))
    batch, objective = collected(trainer).batch, trainer.objective
    assert batch.responses == 8
    assert all(getattr(batch, name) is not None for name in objective.needs)
    assert set(batch.advantage.sign().tolist()) == {-1.0, 0.0, 1.0}
    assert torch.isfinite(objective.loss(batch.old_logp, objective.plan(batch)).loss)


def test_a_batch_holds_the_numbers_of_its_responses_in_order(policy: Policy) -> None:
    trainer = scripted_trainer(policy, MixedGroups(policy, 2), small_config(objective={"name": "sspo"}))
    experience = collected(trainer)
    batch, responses = experience.batch, experience.rollouts.responses
    tokens = [response.response.tokens.tolist() for response in responses]
    assert batch.token is not None and batch.token.tolist() == [token for each in tokens for token in each]
    assert batch.sequence.tolist() == [n for n, each in enumerate(tokens) for _ in each]
    assert batch.segment is not None
    assert batch.segment.tolist() == [n for each in tokens for n in segment_ids(each, policy.tokenizer).tolist()]
    assert batch.sampler_logp is not None and set(batch.sampler_logp.tolist()) == {-1.0}
    assert batch.group is not None and batch.group.tolist() == [response.group for response in responses]
    assert batch.reward is not None and batch.reward.tolist() == [response.reward for response in responses]
    advantage = trainer.objective.advantages(batch.reward, batch.group)
    assert torch.equal(batch.advantage, advantage.repeat_interleave(batch.lengths))


def test_the_minibatches_make_up_the_batch(policy: Policy) -> None:
    trainer = scripted_trainer(policy, MixedGroups(policy, 2), small_config(update={"per_step": 2}))
    experience = collected(trainer)
    minibatches = list(experience.minibatches())
    assert [(minibatch.number, minibatch.first) for minibatch in minibatches] == [(0, 0), (1, 4)]
    assert torch.equal(torch.cat([m.batch.old_logp for m in minibatches]), experience.batch.old_logp)
    transcripts = [transcript for minibatch in minibatches for transcript in minibatch.transcripts]
    responses = [(response.prompt, response.response.tokens) for response in experience.rollouts.responses]
    assert [t.ids.tolist() for t in transcripts] == [[*prompt, *tokens.tolist()] for prompt, tokens in responses]


@pytest.mark.parametrize("change", [-1, 1])
def test_a_sampler_with_a_wrong_number_of_log_probs_is_an_error(policy: Policy, change: int) -> None:
    """One too many, or one too few, would be taken for the next token's."""

    class Miscounting(MixedGroups):
        def sample(self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions) -> list[list[Response]]:
            groups = super().sample(prompts, step, options)
            first = groups[0][0]
            groups[0][0] = replace(first, logp=[-1.0] * (len(first.tokens) + change))
            return groups

    with pytest.raises(ValueError, match="`sampler_logp` has shape"):
        collected(scripted_trainer(policy, Miscounting(policy, 2), small_config()))
