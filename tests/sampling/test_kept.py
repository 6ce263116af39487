"""The tokens that top-k and top-p kept: what the native sampler returns is what it sampled from, and what is scored."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.sampling.paged_models import EOS, VOCABULARY, prompts, tiny
from helpers.sampling.requests import ArrivingRequests, requests_for
from helpers.sampling.turns import RandomTurns
from trimtab.data import KeptTokens, PromptTokens, Request, Response, SamplingOptions
from trimtab.own_parts import OwnPartError
from trimtab.trainer.model import Policy, Transcript, score
from trimtab.trainer.sampling import NativeSampler
from trimtab.trainer.sampling.own_sampler import OwnSampler
from trimtab.trainer.sampling.sampling import Extras, filter_top_k_top_p, sample_tokens, sample_with_extras

BATCH = prompts(1, 20, 64, 33)
OPTIONS = SamplingOptions(samples=4, max_new_tokens=30, seed=3)
ENDS = frozenset({*EOS, *range(40, 52)})
TRUNCATIONS = [{"top_p": 0.9}, {"top_k": 20}, {"top_p": 0.5, "temperature": 0.7}, {"top_p": 0.8, "top_k": 20}]


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama tied")


def sampler(model: Any, **how: bool) -> NativeSampler:
    return NativeSampler(model, ENDS, 0, nullcontext, **how)


def policy_of(model: Any) -> Policy:
    return Policy(model, SimpleNamespace(pad_token_id=0, eos_token_id=2), torch.device("cpu"), "fp32")


def check(model: Any, pairs: list[tuple[Any, Response]], options: SamplingOptions) -> None:
    """Over what was kept the trainer's log-probabilities are the sampler's, to rounding; over all tokens not."""
    sampled = torch.tensor([logp for _, response in pairs for logp in response.logp])
    kept = [Transcript(prompt, r.tokens, r.observed, r.kept) for prompt, r in pairs]
    assert all(transcript.kept is not None for transcript in kept)
    measured = score(policy_of(model), kept, options.temperature, token_budget=1000, head_chunk=64)
    torch.testing.assert_close(measured.logp, sampled, rtol=0, atol=2e-5)
    # The set itself is that of the filter on the training forward's logits.
    whole = score(policy_of(model), [replace(t, kept=None) for t in kept], options.temperature, 1000, 64)
    missing = 1 - (whole.logp - measured.logp).exp()  # the mass that was left out
    assert (missing > -1e-4).all() and missing.mean() > 0.05
    if options.top_p < 1 and not options.top_k:
        assert (missing <= 1 - options.top_p + 1e-4).all()
    if options.top_k:
        assert all((t.kept.counts <= options.top_k).all() for t in kept if t.kept is not None)


@pytest.mark.parametrize("how", TRUNCATIONS)
def test_log_probs_over_the_kept_tokens_are_the_samplers(llama: Any, how: dict[str, Any]) -> None:
    options = replace(OPTIONS, **how)
    plain = sampler(llama).sample(BATCH, 1, options)
    groups = sampler(llama, with_kept=True).sample(BATCH, 1, options)
    assert groups == plain and all(r.kept is None for group in plain for r in group)
    check(llama, [(p.ids, r) for p, group in zip(BATCH, groups, strict=True) for r in group], options)


def test_so_they_are_in_conversations(llama: Any) -> None:
    options = replace(OPTIONS, top_p=0.9)
    groups = sampler(llama, with_kept=True).sample(BATCH, 1, options, RandomTurns())
    pairs = [(p.ids, r) for p, group in zip(BATCH, groups, strict=True) for r in group]
    assert any(response.observed for _, response in pairs)
    check(llama, pairs, options)


def test_so_they_are_in_answers_to_requests_also_where_one_is_stopped(llama: Any) -> None:
    options = replace(OPTIONS, top_k=20)
    asked = [request for group in requests_for(BATCH, 1, options) for request in group]
    asked[0] = Request(asked[0].prompt, asked[0].key, 30, stop=lambda tokens: 3 if len(tokens) > 5 else None)
    requests = ArrivingRequests(asked, max_delay=9)
    sampler(llama, with_kept=True).serve(requests, options)
    assert len(requests.answers[asked[0]].tokens) <= 5
    check(llama, [(request.prompt, response) for request, response in requests.answers.items()], options)


@pytest.mark.parametrize("options", [OPTIONS, replace(OPTIONS, top_p=0.9, temperature=0.0)])
def test_where_nothing_is_left_out_there_are_none(llama: Any, options: SamplingOptions) -> None:
    groups = sampler(llama, with_kept=True).sample(BATCH, 1, options)
    assert all(response.kept is None for group in groups for response in group)


def test_moments_are_those_of_what_was_kept(llama: Any) -> None:
    options = replace(OPTIONS, top_p=0.9)
    groups = sampler(llama, with_kept=True, with_moments=True).sample(BATCH, 1, options)
    rows = [(p.ids, r) for p, group in zip(BATCH, groups, strict=True) for r in group]
    scored = score(policy_of(llama), [Transcript(p, r.tokens, kept=r.kept) for p, r in rows], 1.0, 1000, 64)
    moments = np.concatenate([r.moments for _, r in rows if r.moments is not None], axis=1)
    torch.testing.assert_close(torch.from_numpy(moments), torch.stack(list(scored)), rtol=0, atol=5e-5)


@given(
    seed=st.integers(0, 10_000),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 20, 500]),
    ties=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_the_kept_tokens_are_those_of_the_filter(seed: int, top_p: float, top_k: int, ties: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 70, generator=generator) * 3
    logits = logits.round() if ties else logits
    keys = torch.randint(-(2**62), 2**62, (6,), generator=generator)
    options = SamplingOptions(1, 1, 0.8, top_p, top_k)
    (token, logp), kept = sample_with_extras(logits, keys, 3, options, Extras(kept=True))
    plain = sample_tokens(logits, keys, 3, options)
    assert torch.equal(token, plain[0]) and torch.equal(logp, plain[1])
    if not options.truncates:
        assert kept is None
        return
    assert kept is not None and kept.contains(token.numpy()).all()
    filtered = filter_top_k_top_p(logits / 0.8, options)
    np.testing.assert_array_equal(kept.mask(), (filtered > -torch.inf).numpy())


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ("all", r"kept='all': a trimtab.data.KeptTokens of 2 rows of a vocabulary of 10"),
        (KeptTokens.from_mask(np.ones((3, 10), bool)), "2 rows of a vocabulary of 10, a row for each sampled token"),
        (KeptTokens.from_mask(np.ones((2, 9), bool)), "of a vocabulary of 10"),
        (KeptTokens.from_mask(np.eye(10, dtype=bool)[[6, 3]]), "a sampled token that is not among the `kept` tokens"),
    ],
)
def test_wrong_ones_of_a_users_sampler_are_named(kept: Any, message: str) -> None:
    class Talking:
        """Gives every prompt the same response."""

        def sample(self, prompts: Any, step: int, options: SamplingOptions) -> list[list[Response]]:
            return [[Response([6, 2], [-1.0, -1.0], True, kept=kept)] for _ in prompts]

    with pytest.raises(OwnPartError, match=f"(?s)response 0 to prompt 0 has .*{message}"):
        OwnSampler("python:mine:Talking", Talking(), 10).sample([PromptTokens([5], 0)], 0, SamplingOptions(1, 3))


def test_the_vocabulary_is_the_models(llama: Any) -> None:
    (response,), *_ = sampler(llama, with_kept=True).sample(BATCH, 1, replace(OPTIONS, samples=1, top_k=2))
    assert response.kept is not None
    assert response.kept.vocabulary == len(llama.lm_head.weight) >= max(VOCABULARY, 1)
