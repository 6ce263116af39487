"""Conversations over vLLM, with an engine that samples by its own rule: a request for every message."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.sampling.turns import RandomTurns
from trimtab.data import PromptTokens, Response, SamplingOptions
from trimtab.trainer.sampling import VllmSampler, VllmSettings, rng_keys
from trimtab.trainer.sampling import vllm as module

ENDS = frozenset({2, 3})
PROMPTS = [PromptTokens([7, 8, 9], 0), PromptTokens([11], 5)]
OPTIONS = SamplingOptions(samples=6, max_new_tokens=40, seed=4)


@dataclass
class Engine:
    """An engine whose tokens depend on the request's seed and token ids."""

    params: list[Any] = field(default_factory=list)

    def generate(self, requests: Sequence[dict[str, list[int]]], params: Sequence[Any], use_tqdm: bool) -> list[Any]:
        self.params += params
        pairs = zip(requests, params, strict=True)
        return [SimpleNamespace(outputs=[self.output(each["prompt_token_ids"], how)]) for each, how in pairs]

    def output(self, ids: list[int], how: Any) -> Any:
        rng, tokens = random.Random(f"{how.seed} {ids}"), list[int]()
        while len(tokens) < how.max_tokens and not (tokens and tokens[-1] in how.stop_token_ids):
            tokens.append(rng.randrange(2, 20))
        logprobs = SimpleNamespace(token_ids=tokens, logprobs=[-token / 10 for token in tokens])
        reason = "stop" if tokens[-1] in how.stop_token_ids else "length"
        return SimpleNamespace(finish_reason=reason, token_ids=tokens, logprobs=logprobs)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(module, "_running", [made])
    return made


def sample(engine: Engine, turns: RandomTurns | None, max_model_len: int = 300) -> list[list[Response]]:
    sampler = VllmSampler.__new__(VllmSampler)
    embeddings = SimpleNamespace(num_embeddings=211)
    sampler.model, sampler.eos_token_ids = SimpleNamespace(get_input_embeddings=lambda: embeddings), ENDS
    sampler.autocast, sampler.settings = nullcontext, VllmSettings(torch.float32, max_model_len)
    sampler._vllm, sampler._engine = SimpleNamespace(SamplingParams=SimpleNamespace), engine
    sampler._sleeps, sampler._load_weights = False, lambda: None  # type: ignore[method-assign]
    return sampler.sample(PROMPTS, 0, OPTIONS, turns)


def test_conversations_hold_what_was_sampled_and_replied(engine: Engine) -> None:
    turns = RandomTurns()
    groups = sample(engine, turns)
    turns.check(groups, ENDS, OPTIONS.max_new_tokens)
    responses = [response for group in groups for response in group]
    assert all(r.logp.tolist() == pytest.approx((-r.sampled_tokens / 10).tolist()) for r in responses)
    assert max(len(response.observed) for response in responses) > 2
    assert {response.finished for response in responses} == {True, False}


def test_the_order_of_replies_changes_nothing(engine: Engine) -> None:
    assert sample(engine, RandomTurns(order=1)) == sample(engine, RandomTurns(order=2, max_delay=0))


def test_every_message_has_a_seed_of_its_own_and_the_first_that_of_a_single_response(engine: Engine) -> None:
    alone = sample(engine, None)
    seeds = [params.seed for params in engine.params]
    assert seeds == (rng_keys(4, 0, [0, 5], 6) & (2**63 - 1)).tolist()
    engine.params.clear()
    conversations = sample(engine, RandomTurns())
    assert [params.seed for params in engine.params[:12]] == seeds
    assert len({params.seed for params in engine.params}) == len(engine.params) > 12
    for single, conversation in zip(chain(*alone), chain(*conversations), strict=True):
        assert conversation.messages[0].tolist() == single.tokens.tolist()


def test_replies_that_vllm_has_no_room_for_are_an_error(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"a response of up to 40, with replies of up to 120, exceed .* of 150"):
        sample(engine, RandomTurns(), max_model_len=150)
