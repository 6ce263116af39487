"""Cases for the kernels of a fused layer, forward and backward, against plain formulas and transformers' layers.

Run as a script (in Triton's interpreter) it prints a JSON object: the error of each case, or "".
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from helpers.triton_interpreter import run_cases
from trimtab.trainer.model.layers import (
    FusedAddRMSNorm,
    RoPE,
    SwiGLU,
    fuse_layers,
    fusion_unsupported_reason,
    gpu_kernels,
)
from trimtab.trainer.model.packed import PackedBatch, packed_hidden_states, use_packed_attention

Case = Callable[[torch.device, torch.dtype], None]
HOST = torch.device("cpu")
EPS = 1e-5

SIZE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZE),
    "llama, biases": LlamaConfig(**SIZE, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SIZE),
    "qwen3": Qwen3Config(**SIZE, head_dim=16),
    "qwen3, odd heads": Qwen3Config(**SIZE, head_dim=12),
}


def model_of(config: Any, device: torch.device = HOST) -> Any:
    """Return a model with random weights, norms and biases included: values of 1 or 0 would hide mistakes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        for name, weight in model.named_parameters():
            torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
    use_packed_attention(model)
    return model.to(device)


def packed(device: torch.device, *lengths: int) -> PackedBatch:
    """Return a packed batch of sequences of these lengths."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    ids = (positions * 7 + 3) % SIZE["vocab_size"]
    return PackedBatch(ids.to(device), positions.to(device), cu_seqlens.to(device), max(lengths))


def normal(seed: int, *shape: int) -> Tensor:
    """Return normal numbers that are the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compare(kernel: Callable[..., Any], formula: Callable[..., Any], inputs: list[Tensor], dtype: torch.dtype) -> None:
    """Compare values and gradients by all inputs; those of `formula` are computed in fp64."""
    tolerance = 3e-2 if dtype != torch.float32 else 2e-5
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    outputs, expected = kernel(*leaves), formula(*exact)
    d_outputs = [normal(100 + n, *out.shape).to(out.device) for n, out in enumerate(expected)]
    for out, right in zip(outputs, expected, strict=True):
        torch.testing.assert_close(out.double(), right, rtol=tolerance, atol=tolerance)
    found = torch.autograd.grad(outputs, leaves, [d.to(o.dtype) for d, o in zip(d_outputs, outputs, strict=True)])
    right = torch.autograd.grad(expected, exact, [d.double() for d in d_outputs])
    for one, other in zip(found, right, strict=True):
        assert one.dtype != torch.float64
        off = float((one.double() - other).norm() / other.norm())
        assert off <= (1e-2 if dtype != torch.float32 else 1e-5), off


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def fused_add_rms_norm(
    width: int, rows: int, with_delta: bool, residual_used: bool, device: torch.device, dtype: torch.dtype
) -> None:
    kernels = gpu_kernels()
    x, delta, weight = (t.to(device) for t in (normal(0, 1, rows, width), normal(1, 1, rows, width), normal(2, width)))
    x[0, -1] = delta[0, -1] = 0  # eps alone keeps this row finite
    inputs = [x, weight, *([delta.to(dtype)] if with_delta else [])]

    def kernel(x: Tensor, weight: Tensor, delta: Tensor | None = None) -> tuple[Tensor, ...]:
        total, out = FusedAddRMSNorm.apply(kernels, x, delta, weight, EPS, dtype)  # type: ignore[no-untyped-call]
        return (total, out) if residual_used else (out,)

    def formula(x: Tensor, weight: Tensor, delta: Tensor | None = None) -> tuple[Tensor, ...]:
        total = x if delta is None else x + delta
        return (total, rms_norm(total, weight)) if residual_used else (rms_norm(total, weight),)

    compare(kernel, formula, inputs, dtype)


def rope(heads: int, kv: int, d: int, tokens: int, normed: bool, device: torch.device, dtype: torch.dtype) -> None:
    kernels = gpu_kernels()
    angle = normal(3, tokens, d // 2).repeat(1, 2).to(device)
    inputs = [normal(4, tokens, heads, d).to(device, dtype), normal(5, tokens, kv, d).to(device, dtype)]
    inputs += [normal(6, d).to(device), normal(7, d).to(device)] if normed else []

    def kernel(q: Tensor, k: Tensor, *norms: Tensor) -> tuple[Tensor, ...]:
        rotated: tuple[Tensor, ...] = RoPE.apply(kernels, q, k, angle.cos(), angle.sin(), EPS, *norms)  # type: ignore[no-untyped-call]
        return rotated

    def formula(q: Tensor, k: Tensor, *norms: Tensor) -> tuple[Tensor, ...]:
        c, s = angle.double().cos()[:, None], angle.double().sin()[:, None]
        if norms:
            q, k = rms_norm(q, norms[0]), rms_norm(k, norms[1])
        return tuple(x * c + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * s for x in (q, k))

    compare(kernel, formula, inputs, dtype)


def swiglu(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
    kernels = gpu_kernels()
    inputs = [(normal(seed, rows, width) * 4).to(device, dtype) for seed in (8, 9)]
    inputs[0].view(-1)[:2] = torch.tensor([-200.0, 200.0])  # exp must not overflow
    compare(
        lambda *pair: (SwiGLU.apply(kernels, *pair),),  # type: ignore[no-untyped-call]
        lambda gate, up: (silu(gate) * up,),
        inputs,
        dtype,
    )


def frozen(device: torch.device, dtype: torch.dtype) -> None:
    """Weights that are not trained get no gradient, and the gradients of inputs stay right."""
    kernels = gpu_kernels()
    x, weight = normal(0, 1, 3, 16).to(device).requires_grad_(), normal(2, 16).to(device)
    (found,) = torch.autograd.grad(FusedAddRMSNorm.apply(kernels, x, None, weight, EPS, torch.float32)[1].sum(), x)  # type: ignore[no-untyped-call]
    (right,) = torch.autograd.grad(rms_norm(x, weight).sum(), x)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    q = normal(4, 3, 2, 8).to(device).requires_grad_()
    ones = torch.ones(3, 8, device=device)
    rotated = RoPE.apply(kernels, q, q.detach(), ones, 0 * ones, EPS, weight[:8], weight[8:])  # type: ignore[no-untyped-call]
    (found,) = torch.autograd.grad(rotated[0].sum(), q)
    (right,) = torch.autograd.grad(rms_norm(q, weight[:8]).sum(), q)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def model(name: str, checkpoints: str, device: torch.device, dtype: torch.dtype) -> None:
    """Hidden states and gradients are as close to fp64 as those of transformers' layers."""
    assert_as_close_as_plain(model_of(CONFIGS[name], device), device, checkpoints)


def hooked(where: str, device: torch.device, dtype: torch.dtype) -> None:
    """Hooks see and change the same tensors as with transformers' layers."""
    plain = model_of(CONFIGS["qwen3"], device)
    layer = plain.model.layers[1]
    module = {"layer": plain.model.layers[0], "norm": layer.input_layernorm, "mlp": layer.mlp}[where]
    module.register_forward_hook(lambda module, args, out: torch.as_tensor(out) * 2)
    assert_as_close_as_plain(plain, device)


def strided(device: torch.device, dtype: torch.dtype) -> None:
    """The residual is not contiguous."""
    plain = model_of(CONFIGS["llama"], device)
    plain.model.embed_tokens.register_forward_hook(lambda module, args, out: out.mT.contiguous().mT)
    assert_as_close_as_plain(plain, device)


def idle(device: torch.device, dtype: torch.dtype) -> None:
    """A layer whose MLP outputs zeros: the gradient of the norm before it is 0."""
    plain = model_of(CONFIGS["llama"], device)
    torch.nn.init.zeros_(plain.model.layers[0].mlp.down_proj.weight)
    assert_as_close_as_plain(plain, device)


def all_hidden_states(device: torch.device, dtype: torch.dtype) -> None:
    """`output_hidden_states` returns those of every layer."""
    plain = model_of(CONFIGS["llama"], device)
    fused = copy.deepcopy(plain)
    fuse_layers(fused, gpu_kernels())
    plain.config.output_hidden_states = fused.config.output_hidden_states = True
    states: list[Any] = []
    for some in (plain, fused):
        some.model.register_forward_hook(lambda module, args, out: states.append(out.hidden_states))
        forward_backward(some, device, torch.bfloat16)
    for one, other in zip(*states, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def with_lora(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """With LoRA linear layers are of another class, and norms are not trained."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        plain = get_peft_model(model_of(CONFIGS[name]), LoraConfig(r=2, target_modules="all-linear"))
        for parameter_name, weight in plain.named_parameters():
            if "lora" in parameter_name:  # a fresh adapter changes nothing, and half of its gradients are 0
                torch.nn.init.normal_(weight, std=0.1)
    assert_as_close_as_plain(plain.to(device).get_base_model(), device)


def assert_as_close_as_plain(plain: Any, device: torch.device, checkpoints: str = "") -> None:
    """Compare the fused and the plain model in bf16 with the plain one in fp64."""
    fused = copy.deepcopy(plain)
    fuse_layers(fused, gpu_kernels())
    assert fusion_unsupported_reason(fused) == ""
    fused = copy.deepcopy(fused)  # a copy must run its own layers
    if checkpoints:
        fused.train()
        fused.gradient_checkpointing_enable({"use_reentrant": checkpoints == "reentrant"})
        fused.enable_input_require_grads()
    exact = forward_backward(copy.deepcopy(plain).double(), device, None)
    before, after = (forward_backward(some, device, torch.bfloat16) for some in (plain, fused))
    for right, one, other in zip(exact, before, after, strict=True):
        apart = float((other.double() - right).norm())
        assert apart <= 1.3 * float((one.double() - right).norm()) + 2e-3 * float(right.norm())
        assert apart <= 0.1 * float(right.norm())


def forward_backward(model: Any, device: torch.device, dtype: torch.dtype | None) -> list[Tensor]:
    """Return the hidden states, and the gradients of all parameters concatenated."""
    with torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        hidden = packed_hidden_states(model.model, packed(device, 5, 1, 3))
    d_hidden = normal(10, *hidden.shape).to(device, hidden.dtype)
    parameters = [parameter for parameter in model.model.parameters() if parameter.requires_grad]
    hidden.backward(d_hidden)
    return [hidden.detach(), torch.cat([parameter.grad.flatten() for parameter in parameters])]


def cases(widths: list[int], heads: list[tuple[int, int, int]], rows: int) -> dict[str, Case]:
    """Return every case by its name."""
    made: dict[str, Case] = {"frozen weights": frozen}
    for width, (with_delta, used) in product(widths, ((False, True), (True, True), (True, False), (False, False))):
        name = f"fused_add_rms_norm {width}{', delta' if with_delta else ''}{', residual used' if used else ''}"
        made[name] = partial(fused_add_rms_norm, width, rows, with_delta, used)
    for (h, kv, d), normed in product(heads, (False, True)):
        made[f"rope {h}/{kv}x{d}{', QK-norm' if normed else ''}"] = partial(rope, h, kv, d, rows, normed)
    for width in widths:
        made[f"swiglu {width}"] = partial(swiglu, rows, width)
    for name, checkpoints in (*product(CONFIGS, ("", "checkpointed")), ("llama", "reentrant")):
        made[f"model {name}, {checkpoints}".removesuffix(", ")] = partial(model, name, checkpoints)
    for name in ("llama", "qwen3"):
        made[f"model {name}, LoRA"] = partial(with_lora, name)
    made |= {f"model qwen3, hook of a {where}": partial(hooked, where) for where in ("layer", "norm", "mlp")}
    return made | {"strided residual": strided, "idle MLP": idle, "every hidden state": all_hidden_states}


INTERPRETED = cases([1, 40, 64], [(6, 2, 16), (3, 3, 24), (8, 1, 2)], 7)
# Each takes seconds in the interpreter, and another case runs the same lines.
SLOW = (
    "model llama", "model llama, checkpointed", "model llama, biases, checkpointed", "model qwen2, checkpointed",
    "model qwen3, odd heads, checkpointed", "model qwen3, LoRA",
    "model qwen3, hook of a mlp", "model qwen3, hook of a norm",
)  # fmt: skip


def main() -> None:
    from trimtab.trainer.model.kernels import layers as layer_kernels
    from trimtab.trainer.model.kernels import rope as rope_kernels

    layer_kernels.ELEMENTS = rope_kernels.PAIRS = 64
    layer_kernels.PROGRAMS = rope_kernels.PROGRAMS = 3  # each program has several rows, and the last ones fewer
    run_cases(INTERPRETED, SLOW)


if __name__ == "__main__":
    main()
