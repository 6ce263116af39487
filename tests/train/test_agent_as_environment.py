"""An agent and an environment of the old kind that play the same game: the same tokens, plan and loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from helpers.agents.tokenizers_of_models import CHATML, hermes, small_tokenizer
from helpers.train.scripted import scripted_trainer
from helpers.train.scripted_turns import trainer_with_tools
from trimtab.data import FixedTask, Problem, PromptTokens, Requests, Response, Sample, SamplingOptions, user
from trimtab.trainer.config import Config, parse
from trimtab.trainer.model import Policy
from trimtab.trainer.train.agents import build_agent_pool, build_agent_use
from trimtab.trainer.train.rollouts import collect_rollouts
from trimtab.trainer.train.scoring import score_responses, transcripts_of
from trimtab.trainer.train.trainer import RunProgress, Trainer

# What the policy writes in each rollout: right at once, near and then right, never, and without a guess.
SCRIPTS = [
    [hermes("guess", number="42"), "It is 42."],
    [f"Let me see.\n{hermes('guess', number='7')}", hermes("guess", number="42"), "It is 42."],
    [hermes("guess", number="50"), "I give up."],
    ["42"],
]
LIMITS = {"prompts": 1, "samples": len(SCRIPTS), "max_new_tokens": 300, "max_prompt_tokens": 600}


class ScriptedRequests:
    """Answers the requests of agents that run one after another with these messages."""

    def __init__(self, policy: Policy, scripts: Sequence[Sequence[str]]) -> None:
        self.messages = [policy.encode_solution(message) for script in scripts for message in script]

    def sample(self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions) -> list[list[Response]]:
        raise NotImplementedError

    def serve(self, requests: Requests, options: SamplingOptions) -> None:
        while (taken := requests.take(block=True)) is not None:
            for request in taken:
                tokens = self.messages.pop(0)
                requests.answer(request, Response(tokens, [-1.0] * len(tokens), True))


@pytest.fixture(scope="module")
def policy() -> Policy:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = small_tokenizer(CHATML)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=1_024, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Policy(Qwen3ForCausalLM(config).eval(), tokenizer, torch.device("cpu"))


def settings(objective: str, **sections: dict[str, Any]) -> Config:
    rollout = LIMITS | sections.pop("rollout", {})
    return parse({"objective": objective, "rollout": rollout, **sections})


def environment_trainer(policy: Policy, objective: str, task: FixedTask) -> Trainer:
    turns = {"max_turns": 3, "max_observation_tokens": 60}
    config = settings(objective, task={"environment": "python:helpers.train.bad_tools:Game"}, rollout=turns)
    return trainer_with_tools(policy, config, SCRIPTS, task)


def agent_trainer(policy: Policy, objective: str, task: FixedTask) -> Trainer:
    config = settings(objective, agent={"run": "python:helpers.train.own_agents:play", "concurrency": 1})
    sampler = ScriptedRequests(policy, SCRIPTS)
    trainer = scripted_trainer(policy, sampler, config, task)
    trainer.agent_use = build_agent_use(config, policy, sampler, build_agent_pool(config))
    return trainer


def planned(trainer: Trainer) -> tuple[list[Sample], dict[str, torch.Tensor]]:
    """Sample and grade a step; return its responses, and all of what their update is made of."""
    try:
        samples = collect_rollouts(trainer, RunProgress()).responses
        batch = score_responses(trainer, samples, transcripts_of(samples))
        assert (batch.rollout is not None) == (trainer.agent_use is not None)
        plan = trainer.objective.plan(batch)
        moved = batch.old_logp + torch.linspace(-0.5, 0.5, len(batch.old_logp))
        result, gradient = trainer.objective.loss_and_grad(moved, plan)
    finally:
        trainer.close()
    numbers = {
        name: getattr(plan, name) for name in ("advantage", "weight", "scale", "clip_low", "clip_high", "reason")
    }
    return samples, {"old_logp": batch.old_logp, "loss": result.loss, "gradient": gradient, **numbers}


@pytest.mark.parametrize("objective", ["grpo", "gspo", "sspo", "stapo", "stare"])
def test_an_agent_is_trained_as_an_environment_that_says_the_same(policy: Policy, objective: str) -> None:
    task = FixedTask("game", (Problem(user("Find my number."), "42", "exact", "game"),))
    samples, numbers = planned(environment_trainer(policy, objective, task))
    agents, other_numbers = planned(agent_trainer(policy, objective, task))
    assert sorted(each.reward for each in samples) == [0.0, 0.5, 1.0, 1.0]
    assert sum(len(each.response.observed) for each in samples) == 4
    for one, other in zip(samples, agents, strict=True):
        assert (one.response.sample, one.reward) == (other.response.sample, other.reward)
        assert policy.tokenizer.decode(one.prompt) == policy.tokenizer.decode(other.prompt)
        assert list(one.prompt) == list(other.prompt)
        assert one.response.tokens.tolist() == other.response.tokens.tolist()
        assert one.response.observed == other.response.observed
    assert float(numbers["loss"]) != 0 and numbers["gradient"].abs().max() > 0
    for name, value in numbers.items():
        assert torch.equal(value, other_numbers[name]), name
