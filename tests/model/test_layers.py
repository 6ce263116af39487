"""Fused layers compute what transformers' layers do, keep fewer tensors, and are not used where they might not."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GemmaConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from helpers.model import layer_kernel_cases
from helpers.model.layer_kernel_cases import CONFIGS, SIZE, cases, model_of, packed
from helpers.triton_interpreter import case_errors
from trimtab.trainer.model import loading
from trimtab.trainer.model.layers import (
    FusedAddRMSNorm,
    Kernels,
    RoPE,
    SwiGLU,
    fuse_layers,
    fusion_unsupported_reason,
    gpu_kernels,
    unfuse_layers,
)
from trimtab.trainer.model.packed import packed_hidden_states

ON_GPU = cases([40, 576, 2048, 5120], [(9, 3, 64), (16, 8, 128), (5, 1, 80)], 3000)


def nothing(*tensors: object, **named: object) -> None:
    """A kernel that writes nothing."""


NO_KERNELS = Kernels(*[nothing] * 6)  # attention is the real one


def test_interpreted_kernels_match_the_formulas() -> None:
    assert not case_errors(Path(layer_kernel_cases.__file__))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ON_GPU)
def test_on_a_gpu_kernels_match_the_formulas(name: str, dtype: torch.dtype) -> None:
    ON_GPU[name](torch.device("cuda"), dtype)


def hidden_of(model: Any, **options: Any) -> Tensor:
    ids = torch.arange(24).view(2, 12)
    hidden: Tensor = model.model(input_ids=ids, **options).last_hidden_state
    return hidden


@pytest.mark.parametrize("name", CONFIGS)
def test_calls_that_cannot_be_fused_are_bit_equal_to_transformers_layers(name: str) -> None:
    model = model_of(CONFIGS[name])
    fused = copy.deepcopy(model)
    fuse_layers(fused, NO_KERNELS)  # a call of a kernel would leave garbage
    assert torch.equal(hidden_of(model), hidden_of(fused)), "two rows in fp32"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(hidden_of(model), hidden_of(fused)), "two rows"
        ids = torch.arange(6)[None]
        right, found = (some.generate(ids, max_new_tokens=4, do_sample=False) for some in (model, fused))
    assert torch.equal(right, found), "a cache"
    sequences = packed(torch.device("cpu"), 4, 2)
    assert torch.equal(packed_hidden_states(model.model, sequences), packed_hidden_states(fused.model, sequences)), (
        "packed in fp32"
    )


def test_fusing_twice_and_undoing_it() -> None:
    model = model_of(CONFIGS["qwen2"])
    names = list(model.state_dict())
    fuse_layers(model, NO_KERNELS)
    fuse_layers(model, NO_KERNELS)
    assert sum("forward" in vars(module) for module in model.modules()) == SIZE["num_hidden_layers"] + 1
    assert list(model.state_dict()) == names
    unfuse_layers(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("config", [GemmaConfig(**SIZE, head_dim=8), LlamaConfig(**SIZE, hidden_act="gelu")])
def test_other_families_and_activations_are_left_alone(config: Any) -> None:
    model = model_of(config)
    fuse_layers(model, NO_KERNELS)
    assert not any("forward" in vars(module) for module in model.modules())
    assert fusion_unsupported_reason(model) == ""


class OwnLayer(LlamaDecoderLayer):
    """A subclass that doubles its output."""

    def forward(self, *args: Any, **options: Any) -> Any:
        return 2 * super().forward(*args, **options)


class OwnNorm(LlamaRMSNorm):
    """A subclass that doubles its output."""

    def forward(self, hidden_states: Tensor) -> Any:
        return 2 * super().forward(hidden_states)


class Wrapped(torch.nn.Module):
    """A layer inside another module, as some libraries leave it."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.layer(*args, **options)


def with_own_layer(model: Any) -> None:
    model.layers[1].__class__ = OwnLayer


def with_own_norm(model: Any) -> None:
    model.norm.__class__ = OwnNorm


def with_own_inner_norm(model: Any) -> None:
    model.layers[1].input_layernorm.__class__ = OwnNorm


def with_patched_mlp(model: Any) -> None:
    whole = model.layers[1].mlp.forward
    model.layers[1].mlp.forward = lambda x: 2 * whole(x)


def with_wrapped_layer(model: Any) -> None:
    model.layers[0] = Wrapped(model.layers[0])


@pytest.mark.parametrize(
    "change", [with_own_layer, with_own_norm, with_own_inner_norm, with_patched_mlp, with_wrapped_layer]
)
def test_a_model_with_a_changed_module_is_left_alone(change: Callable[[Any], None]) -> None:
    """Only the first layer is tried, so a change in another one must be found beforehand."""
    model = model_of(CONFIGS["llama"])
    change(model.model)
    fused = copy.deepcopy(model)
    fuse_layers(fused, NO_KERNELS)
    assert fusion_unsupported_reason(fused) == ""
    sequences = packed(torch.device("cpu"), 4, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(packed_hidden_states(model.model, sequences), packed_hidden_states(fused.model, sequences))


def test_a_kv_cache_given_with_packed_sequences_is_filled() -> None:
    model = model_of(CONFIGS["llama"])
    fuse_layers(model, NO_KERNELS)
    ids, cache = torch.arange(6)[None], DynamicCache(config=model.config)
    cu_seqlens = torch.tensor([0, 6], dtype=torch.int32)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        model.model(input_ids=ids, past_key_values=cache, cu_seq_lens_q=cu_seqlens, max_length_q=6)
    assert cache.get_seq_length() == 6


def test_a_mask_is_refused_with_packed_sequences_as_before() -> None:
    model = model_of(CONFIGS["llama"])
    fuse_layers(model, NO_KERNELS)
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    cu_seqlens = torch.tensor([0, 6], dtype=torch.int32)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(NotImplementedError, match="mask"):
        model.model(torch.arange(6)[None], mask, cu_seq_lens_q=cu_seqlens, max_length_q=6, use_cache=False)


@pytest.mark.parametrize("function", [FusedAddRMSNorm, RoPE, SwiGLU])
def test_second_derivatives_are_refused(function: Any) -> None:
    """Autograd would leave the kernels out of them."""
    x = torch.randn(3, 2, 4, requires_grad=True)
    angles = torch.ones(3, 4)
    given = {
        FusedAddRMSNorm: (x, None, torch.ones(4), 1e-5, torch.float32),
        RoPE: (x, x, angles, angles, 1e-5),
        SwiGLU: (x, x),
    }[function]
    out = function.apply(NO_KERNELS, *given)
    loss = (out if isinstance(out, Tensor) else out[-1]).square().sum() + x.pow(3).sum()
    torch.autograd.grad(loss, x, retain_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_a_copy_of_a_fused_model_runs_its_own_layers() -> None:
    model = model_of(CONFIGS["llama"])
    fuse_layers(model, NO_KERNELS)
    twin = copy.deepcopy(model)
    assert twin.model.layers[0].forward.args[0] is twin.model.layers[0]


def test_wrong_values_and_missing_kernels_are_found_by_trying() -> None:
    model = model_of(CONFIGS["qwen3"])
    fuse_layers(model, NO_KERNELS)
    assert "off" in fusion_unsupported_reason(model)

    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no such kernel")

    fuse_layers(model, Kernels(*[missing] * 6))
    assert "no such kernel" in fusion_unsupported_reason(model)


def test_layers_that_compute_something_else_are_not_fused_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(CONFIGS["llama"])
    monkeypatch.setattr(loading, "gpu_kernels", lambda: NO_KERNELS)
    with pytest.warns(UserWarning, match=r"the layers of LlamaForCausalLM are not fused, which is slower .* off\)"):
        loading._fuse_if_supported(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_without_triton_layers_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(CONFIGS["llama"])
    monkeypatch.setitem(sys.modules, "trimtab.trainer.model.kernels.layers", None)
    loading._fuse_if_supported(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_fewer_and_smaller_tensors_are_kept_for_the_backward_pass() -> None:
    model = model_of(CONFIGS["llama"])

    def kept() -> int:
        found: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.autocast("cpu", dtype=torch.bfloat16),
        ):
            hidden = packed_hidden_states(model.model, packed(torch.device("cpu"), *[4] * 50))
        del hidden
        return sum(found.values())

    before = kept()
    fuse_layers(model, NO_KERNELS)
    assert kept() < 0.7 * before


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_on_a_gpu_every_family_is_fused(name: str) -> None:
    model = model_of(CONFIGS[name], torch.device("cuda"))
    fuse_layers(model, gpu_kernels())
    assert fusion_unsupported_reason(model) == ""
