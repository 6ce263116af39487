"""The native sampler: each sample has random numbers of its own, and its log-probabilities are the trainer's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from trimtab.data import PromptTokens, Response, SamplingOptions
from trimtab.trainer.model import Policy, Transcript, load_policy, score
from trimtab.trainer.sampling import NativeSampler, PagedSampler
from trimtab.trainer.sampling.sampling import filter_top_k_top_p, rng_keys, sample_tokens, uniform

PROMPTS = ["1+1=", "12+34=", "7-3=", "99*9=", "0+0="]
OPTIONS = SamplingOptions(samples=6, max_new_tokens=9, seed=4)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("demo", device="cpu", seed=3)


@pytest.fixture(scope="module")
def sampler(policy: Policy) -> NativeSampler:
    return NativeSampler(policy.model, policy.eos_token_ids, policy.pad_token_id, policy.autocast)


def prompts(policy: Policy, texts: Sequence[str] = PROMPTS) -> list[PromptTokens]:
    return [PromptTokens(policy.tokenizer.encode(text), PROMPTS.index(text)) for text in texts]


def tokens(groups: list[list[Response]]) -> list[list[list[int]]]:
    return [[response.tokens.tolist() for response in group] for group in groups]


def test_all_samples_of_a_prompt_come_back_in_order(policy: Policy, sampler: NativeSampler) -> None:
    groups = sampler.sample(prompts(policy), 0, OPTIONS)
    assert [len(group) for group in groups] == [6] * 5
    for group in groups:
        assert [response.sample for response in group] == list(range(6))
        for response in group:
            assert 1 <= len(response.tokens) == len(response.logp) <= 9
            ended = response.tokens[-1] in policy.eos_token_ids
            assert response.finished == ended
            assert not any(token in policy.eos_token_ids for token in response.tokens[:-1])


@pytest.mark.parametrize("batch_size", [1, 6, 13, 1000])
def test_what_else_is_in_the_batch_does_not_matter(policy: Policy, sampler: NativeSampler, batch_size: int) -> None:
    together = tokens(sampler.sample(prompts(policy), 0, OPTIONS))
    assert tokens(sampler.sample(prompts(policy), 0, replace(OPTIONS, batch_size=batch_size))) == together
    alone = [tokens(sampler.sample(prompts(policy, [text]), 0, OPTIONS))[0] for text in PROMPTS]
    assert alone == together
    fewer = tokens(sampler.sample(prompts(policy), 0, replace(OPTIONS, samples=2)))
    assert fewer == [group[:2] for group in together]


def test_another_seed_step_or_prompt_number_gives_other_samples(policy: Policy, sampler: NativeSampler) -> None:
    base = tokens(sampler.sample(prompts(policy), 0, OPTIONS))
    assert tokens(sampler.sample(prompts(policy), 0, OPTIONS)) == base
    assert tokens(sampler.sample(prompts(policy), 1, OPTIONS)) != base
    assert tokens(sampler.sample(prompts(policy), 0, replace(OPTIONS, seed=5))) != base
    renumbered = [PromptTokens(prompt.ids, prompt.number + 100) for prompt in prompts(policy)]
    assert tokens(sampler.sample(renumbered, 0, OPTIONS)) != base


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_the_trainers_to_rounding(
    policy: Policy, sampler: NativeSampler, temperature: float
) -> None:
    batch = prompts(policy)
    groups = sampler.sample(batch, 0, replace(OPTIONS, temperature=temperature))
    transcripts = [Transcript(p.ids, r.tokens) for p, group in zip(batch, groups, strict=True) for r in group]
    measured = score(policy, transcripts, temperature, token_budget=64, head_chunk=7)
    sampled = torch.tensor([lp for group in groups for r in group for lp in r.logp])
    assert (measured.logp - sampled).abs().max() < 5e-6


def test_greedy_takes_the_most_probable_token(policy: Policy, sampler: NativeSampler) -> None:
    (group,) = sampler.sample(prompts(policy, ["12+34="]), 0, replace(OPTIONS, samples=2, temperature=0.0))
    assert group[0].tokens.tolist() == group[1].tokens.tolist()
    ids = prompts(policy, ["12+34="])[0].ids
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([ids])).logits[0, -1]
    assert group[0].tokens[0] == int(logits.argmax())


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(40_000, 4)
    token, logp = sample_tokens(logits, rng_keys(0, 0, range(40_000), 1), 0, OPTIONS)
    expected = logits[0].softmax(-1)
    shares = torch.bincount(token, minlength=4) / 40_000
    assert (shares - expected).abs().max() < 0.01
    torch.testing.assert_close(logp, expected.log()[token])


def test_a_token_of_probability_zero_is_never_sampled() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(10_000, 5)
    token, logp = sample_tokens(logits, rng_keys(1, 0, range(10_000), 1), 0, OPTIONS)
    assert set(token.tolist()) == {1, 3}
    assert torch.isfinite(logp).all()


def test_top_k_and_top_p_cut_the_tail() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]])
    kept = torch.isfinite(filter_top_k_top_p(logits, replace(OPTIONS, top_k=2)))
    assert kept.tolist() == [[True, True, False, False, False]]
    p = logits.softmax(-1)[0]
    kept = torch.isfinite(filter_top_k_top_p(logits.flip(1), replace(OPTIONS, top_p=float(p[0]) + 0.01)))
    assert kept.tolist() == [[False, False, False, True, True]]
    assert torch.isfinite(filter_top_k_top_p(logits, replace(OPTIONS, top_p=1e-9))).sum() == 1


def test_random_numbers_are_uniform_and_independent_of_order() -> None:
    keys = rng_keys(7, 3, range(1000), 8)
    numbers = torch.stack([uniform(keys, position) for position in range(20)])
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(numbers.mean().item() - 0.5) < 0.005
    assert abs(torch.corrcoef(numbers[:2])[0, 1].item()) < 0.05
    assert len(keys.unique()) == 8000
    assert torch.equal(rng_keys(7, 3, [5], 8), keys[40:48])


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": 0},
        {"max_new_tokens": 0},
        {"batch_size": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"seed": 2**70},
    ],
    ids=str,
)
def test_invalid_options_are_named(wrong: dict[str, float]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        replace(OPTIONS, **wrong)


@pytest.mark.parametrize("paged", [False, True], ids=["native", "paged"])
@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_token_outside_of_the_vocabulary_is_named(
    policy: Policy, sampler: NativeSampler, paged: bool, token: int
) -> None:
    chosen = PagedSampler(policy.model, policy.eos_token_ids, torch.float32) if paged else sampler
    with pytest.raises(ValueError, match=rf"prompt 1 holds token {token}, but the model's vocabulary is 0 to \d+"):
        chosen.sample([PromptTokens([3], 0), PromptTokens([3, token, 4], 1)], 0, OPTIONS)
    with pytest.raises(ValueError, match="prompt 0 has no tokens"):
        chosen.sample([PromptTokens([], 0)], 0, OPTIONS)
