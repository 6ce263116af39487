"""vLLM samples as the native sampler does: from the policy's distribution, with a seed of its own for every sample."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.vllm import vllm_models as small
from trimtab.data import PromptTokens, Response, Sampler
from trimtab.trainer.model import Policy
from trimtab.trainer.sampling.sampling import filter_top_k_top_p
from trimtab.trainer.train.build import build_sampler

pytest.importorskip("vllm", reason="make test-vllm has an environment with it", exc_type=ImportError)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return small.load(small.save_model(tmp_path_factory.mktemp("tied")))


@pytest.fixture(scope="module")
def sampler(policy: Policy) -> Sampler:
    return build_sampler(policy, small.rollout())


def test_all_samples_of_a_prompt_come_back_in_order(policy: Policy, sampler: Sampler) -> None:
    groups = sampler.sample(small.prompts(policy), 0, small.OPTIONS)
    assert [len(group) for group in groups] == [6] * 5
    for group in groups:
        assert [response.sample for response in group] == list(range(6))
        for response in group:
            assert 1 <= len(response.tokens) == len(response.logp) <= 9
            assert response.finished == (response.tokens[-1] in policy.eos_token_ids)
            assert not any(token in policy.eos_token_ids for token in response.tokens[:-1])
    ends = [response.finished for group in groups for response in group]
    assert any(ends) and not all(ends)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_log_probabilities_are_the_trainers_to_rounding(policy: Policy, sampler: Sampler, temperature: float) -> None:
    prompts = small.prompts(policy)
    groups = sampler.sample(prompts, 0, replace(small.OPTIONS, temperature=temperature))
    assert small.mismatch(policy, prompts, groups, temperature) < 1e-5


@pytest.mark.parametrize("cut", [{"top_p": 0.8}, {"top_k": 3}, {"top_p": 0.9, "top_k": 5}])
def test_log_probabilities_are_those_after_top_k_and_top_p(
    policy: Policy, sampler: Sampler, cut: dict[str, float]
) -> None:
    prompts, options = small.prompts(policy), replace(small.OPTIONS, temperature=0.7, **cut)
    groups = sampler.sample(prompts, 0, options)
    for prompt, group in zip(prompts, groups, strict=True):
        for response in group:
            logits = _logits(policy, prompt, response) / options.temperature
            logp = filter_top_k_top_p(logits, options).log_softmax(-1)
            expected = logp.gather(1, torch.tensor(response.tokens)[:, None]).squeeze(1)
            torch.testing.assert_close(torch.tensor(response.logp), expected, atol=1e-5, rtol=0)
    # The tokens that are kept share the mass of those that are not.
    assert small.mismatch(policy, prompts, groups, 0.7) > 0.01


def test_the_same_seed_gives_the_same_samples(policy: Policy, sampler: Sampler) -> None:
    first = sampler.sample(small.prompts(policy), 3, small.OPTIONS)
    assert sampler.sample(small.prompts(policy), 3, small.OPTIONS) == first


def test_what_else_is_in_the_batch_does_not_matter(policy: Policy, sampler: Sampler) -> None:
    together = small.tokens(sampler.sample(small.prompts(policy), 0, small.OPTIONS))
    alone = [small.tokens(sampler.sample(small.prompts(policy, [t]), 0, small.OPTIONS))[0] for t in small.PROMPTS]
    assert alone == together
    backwards = small.tokens(sampler.sample(small.prompts(policy)[::-1], 0, small.OPTIONS))
    assert backwards[::-1] == together
    fewer = small.tokens(sampler.sample(small.prompts(policy), 0, replace(small.OPTIONS, samples=2)))
    assert fewer == [group[:2] for group in together]


def test_another_seed_step_or_prompt_number_gives_other_samples(policy: Policy, sampler: Sampler) -> None:
    prompts = small.prompts(policy)
    base = small.tokens(sampler.sample(prompts, 0, small.OPTIONS))
    assert len({tuple(response) for group in base for response in group}) > 20
    assert small.tokens(sampler.sample(prompts, 1, small.OPTIONS)) != base
    assert small.tokens(sampler.sample(prompts, 0, replace(small.OPTIONS, seed=5))) != base
    renumbered = [PromptTokens(prompt.ids, prompt.number + 100) for prompt in prompts]
    assert small.tokens(sampler.sample(renumbered, 0, small.OPTIONS)) != base


def test_samples_follow_the_policys_distribution(policy: Policy, sampler: Sampler) -> None:
    (prompt,) = small.prompts(policy, ["12+34="])
    (group,) = sampler.sample([prompt], 0, replace(small.OPTIONS, samples=3000, max_new_tokens=1))
    with torch.no_grad():
        expected = policy.model(input_ids=torch.tensor([prompt.ids])).logits[0, -1].softmax(-1)
    shares = torch.bincount(torch.tensor([r.tokens[0] for r in group]), minlength=len(expected)) / 3000
    assert (shares - expected).abs().max() < 4 * (0.25 / 3000) ** 0.5  # four standard errors of the worst share


def test_greedy_responses_are_the_native_samplers(policy: Policy, sampler: Sampler) -> None:
    options = replace(small.OPTIONS, samples=1, temperature=0.0)
    ours = build_sampler(policy).sample(small.prompts(policy), -1, options)
    theirs = sampler.sample(small.prompts(policy), -1, options)
    assert small.tokens(theirs) == small.tokens(ours)
    torch.testing.assert_close(small.logp_of(theirs), small.logp_of(ours), atol=1e-5, rtol=0)
    assert [r.finished for (r,) in theirs] == [r.finished for (r,) in ours]


def test_a_prompt_that_leaves_no_room_for_a_response_is_refused(policy: Policy, sampler: Sampler) -> None:
    prompts = [PromptTokens([2] * 210, 0)]
    with pytest.raises(ValueError, match=r"prompt of 210 tokens and a response of up to 9 .* 216: lower rollout\."):
        sampler.sample(prompts, 0, small.OPTIONS)
    assert sampler.sample([PromptTokens([2] * 207, 0)], 0, small.OPTIONS)


@pytest.mark.parametrize("temperature", [0.001, 3.0])
def test_a_temperature_outside_of_vllms_range_is_refused(policy: Policy, sampler: Sampler, temperature: float) -> None:
    with pytest.raises(ValueError, match=r"rollout\.temperature=.* 0\.01 to 2; set rollout\.engine='native'"):
        sampler.sample(small.prompts(policy), 0, replace(small.OPTIONS, temperature=temperature))


def test_no_prompts_give_no_responses(sampler: Sampler) -> None:
    assert sampler.sample([], 0, small.OPTIONS) == []


def _logits(policy: Policy, prompt: PromptTokens, response: Response) -> torch.Tensor:
    ids = torch.tensor([[*prompt.ids, *response.tokens]])
    with torch.no_grad():
        logits: torch.Tensor = policy.model(input_ids=ids).logits[0, len(prompt.ids) - 1 : -1].float()
    return logits
