"""New weights reach vLLM before the next rollout: tied and untied heads, biases and LoRA."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.vllm import vllm_models as small
from trimtab.trainer.model import Policy
from trimtab.trainer.sampling.vllm import VllmSampler
from trimtab.trainer.train.build import build_sampler

pytest.importorskip("vllm", reason="make test-vllm has an environment with it", exc_type=ImportError)

ROUNDING = 1e-4  # the weights grow from test to test, and rounding with them; stale weights show by more than 0.01

# Options of the model's config, and of loading it.
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tied": ({}, {}),
    "untied": ({"tie_word_embeddings": False}, {}),
    "lora": ({}, {"lora_rank": 4}),
    "biases": ({"kind": "qwen2", "hidden_size": 128}, {}),
    "without a head in vLLM": ({"kind": "gemma2", "query_pre_attn_scalar": 32, "attn_logit_softcapping": None}, {}),
}


@pytest.fixture(scope="module", params=list(FORMS))
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    pytest.importorskip("peft")
    made, loaded = FORMS[request.param]
    return small.load(small.save_model(tmp_path_factory.mktemp("form"), **made), **loaded)


@pytest.fixture(scope="module")
def sampler(policy: Policy) -> VllmSampler:
    made = build_sampler(policy, small.rollout())
    assert isinstance(made, VllmSampler)
    return made


def test_new_weights_take_effect(policy: Policy, sampler: VllmSampler) -> None:
    prompts = small.prompts(policy, [*small.PROMPTS, small.LONG])
    before = sampler.sample(prompts, 0, small.OPTIONS)
    assert small.mismatch(policy, prompts, before) < 1e-5
    for seed in range(2):
        shift(policy, seed)
        assert small.mismatch(policy, prompts, before) > 0.1
        after = sampler.sample(prompts, 0, small.OPTIONS)  # the long prompt was in vLLM's cache
        assert small.mismatch(policy, prompts, after) < ROUNDING
        before = after


def test_a_change_of_one_number_in_the_head_takes_effect(policy: Policy, sampler: VllmSampler) -> None:
    if hasattr(policy.model, "get_base_model"):
        pytest.skip("LoRA leaves the head as it is")
    prompts = small.prompts(policy)
    sampler.sample(prompts, 0, small.OPTIONS)
    with torch.no_grad():
        policy.lm_head.weight[5] += 1.0
    assert small.mismatch(policy, prompts, sampler.sample(prompts, 0, small.OPTIONS)) < ROUNDING


@pytest.mark.parametrize("kind", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_an_optimizers_step_takes_effect(policy: Policy, sampler: VllmSampler, kind: dict[str, bool]) -> None:
    """Torch does not count the writes of a fused optimizer: relying on its counter would keep the old weights."""
    prompts = small.prompts(policy)
    before = sampler.sample(prompts, 0, small.OPTIONS)
    optimizer = torch.optim.AdamW([p for p in policy.model.parameters() if p.requires_grad], lr=0.03, **kind)
    ids = torch.tensor([[2, 3, 4]])
    policy.model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert small.mismatch(policy, prompts, before) > 0.01
    assert small.mismatch(policy, prompts, sampler.sample(prompts, 0, small.OPTIONS)) < ROUNDING


def test_the_policy_and_vllm_share_no_memory(
    policy: Policy, sampler: VllmSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {name: weight.clone() for name, weight in policy.model.state_dict().items()}
    before = sampler.sample(small.prompts(policy), 0, small.OPTIONS)
    assert all(torch.equal(weight, ours[name]) for name, weight in policy.model.state_dict().items())
    shift(policy, 8)
    with monkeypatch.context() as held:
        held.setattr(sampler, "_load_weights", lambda: None)
        assert sampler.sample(small.prompts(policy), 0, small.OPTIONS) == before
    assert sampler.sample(small.prompts(policy), 0, small.OPTIONS) != before


def shift(policy: Policy, seed: int) -> None:
    """Change all trained weights: LoRA's B starts at zero, so a change of A alone would have no effect."""
    parts = torch.nn.ParameterList([p for p in policy.model.parameters() if p.requires_grad])
    small.shift(parts, 0.05, seed)
