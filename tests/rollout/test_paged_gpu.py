"""The paged sampler on a GPU: kernels and graphs draw what the native sampler draws, and are made once.

A number drawn may fall on the border of two tokens, which two ways of adding put on different sides: a few samples
may part there. What every one of them was drawn with is still what the trainer measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.rollout.paged_models import CONFIGS, ENDS, count_waits, prompts, tiny, tokens
from trimtab.policy import Policy, Transcript, score
from trimtab.rollout import NativeSampler, PagedSampler, PromptTokens, Response, SamplingOptions

pytestmark = pytest.mark.gpu

ASKED = prompts(1, 63, 64, 65, 66, 130)
OPTIONS = SamplingOptions(samples=8, max_new_tokens=40, seed=3)
SELDOM = frozenset({2})


def policy_of(model: Any, precision: Any) -> Policy:
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=2)
    return Policy(model, tokenizer, torch.device("cuda"), precision)


def off(policy: Policy, asked: Sequence[PromptTokens], groups: list[list[Response]], temperature: float) -> Any:
    """How far log-probabilities are from those that the trainer measures."""
    transcripts = [Transcript(p.ids, r.tokens) for p, group in zip(asked, groups, strict=True) for r in group]
    measured = score(policy, transcripts, temperature, token_budget=4096, head_chunk=512)
    drawn = torch.tensor([logp for group in groups for response in group for logp in response.logp])
    return (measured.logp.cpu() - drawn).abs()


def nearly_all_same(mine: list[list[Response]], theirs: list[list[Response]]) -> None:
    pairs = [(a, b) for ours, others in zip(mine, theirs, strict=True) for a, b in zip(ours, others, strict=True)]
    equal = [a for a, b in pairs if a.tokens == b.tokens and a.finished == b.finished]
    assert len(equal) >= 0.95 * len(pairs), f"{len(equal)} of {len(pairs)} samples are the same"


@pytest.mark.parametrize("family", [*CONFIGS, "lora"])
def test_in_fp32_it_draws_what_the_native_sampler_draws(family: str) -> None:
    model = tiny(family, "cuda")
    mine = PagedSampler(model, ENDS, torch.float32).sample(ASKED, 0, OPTIONS)
    nearly_all_same(mine, NativeSampler(model, ENDS, 0, nullcontext).sample(ASKED, 0, OPTIONS))
    assert off(policy_of(model, "fp32"), ASKED, mine, 1.0).max() < 5e-5


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.7},
        {"temperature": 1.6, "top_k": 7},
        {"top_p": 0.8},
        {"temperature": 1.3, "top_p": 0.9, "top_k": 30},
        {"temperature": 0.0, "samples": 1},
        {"batch": 5},
        {"samples": 128},  # so many that attention takes half pages
    ],
)
def test_it_draws_as_it_is_asked(how: dict[str, Any]) -> None:
    model, options = tiny("qwen3", "cuda"), replace(OPTIONS, **how)
    mine = PagedSampler(model, ENDS, torch.float32).sample(ASKED, 0, options)
    nearly_all_same(mine, NativeSampler(model, ENDS, 0, nullcontext).sample(ASKED, 0, options))


@pytest.mark.parametrize("family", [*CONFIGS, "lora"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_in_bf16_log_probabilities_are_the_trainers_to_rounding(family: str, temperature: float) -> None:
    model = tiny(family, "cuda")
    options = replace(OPTIONS, temperature=temperature)
    mine = PagedSampler(model, ENDS, torch.bfloat16).sample(ASKED, 0, options)
    policy = policy_of(model, "bf16")
    theirs = NativeSampler(model, ENDS, 0, policy.autocast).sample(ASKED, 0, options)
    ours, native = off(policy, ASKED, mine, temperature), off(policy, ASKED, theirs, temperature)
    slack = 3e-2 if family == "lora" else 1e-3  # weights are rounded after the adapter is merged, not each by itself
    assert ours.mean() < 1.5 * native.mean() + slack
    assert ours.max() < 3 * native.max() + 10 * slack


def test_samples_that_give_way_are_what_they_would_have_been(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = count_waits(monkeypatch)
    model, asked = tiny("llama tied", "cuda"), prompts(40, 60, 1, 63, 10)
    options = SamplingOptions(samples=4, max_new_tokens=180, seed=3)
    roomy = PagedSampler(model, SELDOM, torch.float32).sample(asked, 0, options)
    assert not waits
    mine = PagedSampler(model, SELDOM, torch.float32, pages=1).sample(asked, 0, options)
    assert waits, "there was room for all: the test proves nothing"
    pairs = [(a, b) for ours, others in zip(mine, roomy, strict=True) for a, b in zip(ours, others, strict=True)]
    assert sum(a.tokens == b.tokens for a, b in pairs) >= len(pairs) - 2
    assert off(policy_of(model, "fp32"), asked, mine, 1.0).max() < 5e-5


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every graph that is made."""
    made: list[int] = []
    theirs = PagedSampler._graph

    def count(self: PagedSampler, rows: int, *rest: Any) -> Any:
        made.append(rows)
        return theirs(self, rows, *rest)

    monkeypatch.setattr(PagedSampler, "_graph", count)
    return made


def test_graphs_are_made_once(captured: list[int]) -> None:
    model = tiny("qwen2", "cuda")
    sampler = PagedSampler(model, ENDS, torch.bfloat16)
    first = tokens(sampler.sample(ASKED, 0, OPTIONS))
    once = len(captured)
    assert 0 < once == len(set(captured))
    assert tokens(sampler.sample(ASKED, 0, OPTIONS)) == first
    sampler.sample(ASKED, 0, replace(OPTIONS, temperature=0.5, top_k=9, top_p=0.9))
    assert len(set(captured)) == len(captured), "temperature, top-k and top-p need no graph of their own"
    before = len(captured)
    sampler.sample(ASKED, 0, replace(OPTIONS, temperature=0.0))
    assert len(captured) > before, "greedy is another graph"


def test_weights_that_change_reach_the_graphs(captured: list[int]) -> None:
    model = tiny("llama tied", "cuda")
    sampler = PagedSampler(model, ENDS, torch.float32)
    before = tokens(sampler.sample(ASKED, 0, OPTIONS))
    once = list(captured)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    after = sampler.sample(ASKED, 0, OPTIONS)
    assert tokens(after) != before
    assert off(policy_of(model, "fp32"), ASKED, after, 1.0).max() < 5e-5
    weight = model.get_input_embeddings().weight
    weight.data = weight.data * 0.7  # in another place: graphs that hold the old one are of no use
    moved = sampler.sample(ASKED, 0, OPTIONS)
    assert len(captured) > len(once)
    assert off(policy_of(model, "fp32"), ASKED, moved, 1.0).max() < 5e-5
