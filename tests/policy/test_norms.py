"""Fused norms: the numbers of transformers' norm in autocast's type, forward and backward, and nothing where unsure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, Qwen2Config, Qwen3Config

from trimtab.policy.norms import RmsNorm, fuse_norms, unfuse_norms, why_not_fused

SIZE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = [LlamaConfig(**SIZE), Qwen2Config(**SIZE), Qwen3Config(**SIZE, head_dim=8)]


def model_of(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.3)
    return model


def hidden_of(model: Any, dtype: torch.dtype | None = torch.bfloat16) -> Tensor:
    ids = torch.arange(24).view(2, 12)
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        hidden: Tensor = model.model(input_ids=ids).last_hidden_state
    return hidden


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_value_and_gradients_are_those_of_the_formula(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(3, 5, 16, requires_grad=True), torch.rand(16, requires_grad=True)
    grad = torch.randn(3, 5, 16)
    out = RmsNorm.apply(x, weight, 1e-5, dtype)  # type: ignore[no-untyped-call]
    assert out.dtype == dtype
    mine = torch.autograd.grad((out.float() * grad).sum(), (x, weight))
    right = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight
    theirs = torch.autograd.grad((right * grad).sum(), (x, weight))
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.float(), right, rtol=tolerance, atol=tolerance)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_a_model_with_fused_norms_gives_the_same_hidden_states(config: Any) -> None:
    model = model_of(config)
    exact, before = hidden_of(model, None), hidden_of(model).float()
    fuse_norms(model)
    after = hidden_of(model)
    assert after.dtype == torch.bfloat16
    off = (after.float() - exact).norm()
    assert off <= 1.5 * (before - exact).norm() + 2e-3 * exact.norm()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_gradients_are_as_near_the_exact_ones_as_before(config: Any) -> None:
    model = model_of(config)

    def gradient(dtype: torch.dtype | None) -> Tensor:
        model.zero_grad()
        hidden_of(model, dtype).float().square().sum().backward()
        return torch.cat([p.grad.flatten() for p in model.model.parameters() if p.grad is not None])

    exact, before = gradient(None), gradient(torch.bfloat16)
    fuse_norms(model)
    after = gradient(torch.bfloat16)
    assert (after - exact).norm() <= 1.5 * (before - exact).norm()


def test_without_autocast_nothing_changes_to_the_bit() -> None:
    model = model_of(CONFIGS[0])
    before = hidden_of(model, None)
    fuse_norms(model)
    assert torch.equal(hidden_of(model, None), before)


def test_fewer_and_smaller_tensors_are_kept_for_the_backward_pass() -> None:
    model = model_of(CONFIGS[0])

    def kept() -> int:
        found: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = hidden_of(model)
        del hidden
        return sum(found.values())

    before = kept()
    fuse_norms(model)
    assert kept() < 0.8 * before


def test_fusing_twice_and_undoing_it() -> None:
    model = model_of(CONFIGS[1])
    before = hidden_of(model)
    fuse_norms(model)
    fuse_norms(model)
    names = list(model.state_dict())
    unfuse_norms(model)
    assert torch.equal(hidden_of(model), before)
    assert list(model.state_dict()) == names
    assert not any("forward" in vars(module) for module in model.modules())


def test_another_family_is_left_alone() -> None:
    model = model_of(GemmaConfig(**SIZE, head_dim=8))
    fuse_norms(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert why_not_fused(model) == ""


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_the_probe_is_content_with_norms_that_are_right(config: Any) -> None:
    model = model_of(config)
    fuse_norms(model)
    assert why_not_fused(model) == ""


def test_the_probe_finds_wrong_values_wrong_gradients_and_missing_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(CONFIGS[0])
    fuse_norms(model)
    right = RmsNorm.forward, RmsNorm.backward

    def missing(*_: Any) -> Tensor:
        raise NotImplementedError("no such kernel")

    wrong = [
        ("forward", lambda *given: right[0](*given) * 1.1, "10% off"),
        ("backward", lambda *given: tuple(g if g is None else g * 1.5 for g in right[1](*given)), "50% off"),
        ("forward", missing, "no such kernel"),
    ]
    for name, function, words in wrong:
        with monkeypatch.context() as patched:
            patched.setattr(RmsNorm, name, staticmethod(function))
            assert words in why_not_fused(model)
    assert why_not_fused(model) == ""


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_on_a_gpu_the_fused_kernels_are_right(config: Any) -> None:
    model = model_of(config).cuda()
    fuse_norms(model)
    assert why_not_fused(model) == ""
