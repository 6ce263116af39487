"""Decoder layers with everything between the matrix products fused.

A decoder layer of transformers is some forty operations, most of which read and write whole activations. Here it is
four kernels between the linear layers: residual add with RMSNorm (twice), RoPE, SwiGLU. The residual is fp32, inputs
of linear layers have autocast's dtype, and values are rounded where transformers rounds them.

Between layers pass two tensors, (tokens, width): the residual, and the MLP's output (`delta`) that the next norm's
kernel adds to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trimtab.trainer.attention import causal_attention
from trimtab.trainer.parallel import unsharded_class

FAMILIES = ("llama", "qwen2", "qwen3")  # model types whose layers are computed here
TOLERANCE = 0.05  # relative distance to transformers' layer, in output and gradients: bf16 rounding is well below

LayerState = Tensor | tuple[Tensor, Tensor]  # hidden states as transformers passes them, or (residual, delta)


@dataclass(frozen=True)
class Kernels:
    """The kernels of a fused layer; all but attention write into tensors that the caller allocates."""

    fused_add_rms_norm: Callable[..., None]
    fused_add_rms_norm_backward: Callable[..., None]
    rope: Callable[..., None]
    rope_backward: Callable[..., None]
    swiglu: Callable[..., None]
    swiglu_backward: Callable[..., None]
    attention: Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor] = causal_attention


def gpu_kernels() -> Kernels:
    """Return the Triton kernels; raises ModuleNotFoundError without Triton."""
    from trimtab.trainer.model.kernels.layers import (
        fused_add_rms_norm,
        fused_add_rms_norm_backward,
        swiglu,
        swiglu_backward,
    )
    from trimtab.trainer.model.kernels.rope import rope, rope_backward

    return Kernels(fused_add_rms_norm, fused_add_rms_norm_backward, rope, rope_backward, swiglu, swiglu_backward)


def fuse_layers(causal_lm: Any, kernels: Kernels) -> None:
    """Replace the `forward` of a model's layers; other families, and models with changed modules, stay as they are.

    Only packed sequences under autocast take the fused way. All other calls, and layers with hooks inside, go through
    transformers' layers as before.
    """
    family, backbone = causal_lm.config.model_type, causal_lm.base_model
    if family not in FAMILIES or causal_lm.config.hidden_act != "silu":
        return
    inner = [module for layer in backbone.layers for module in layer.children()]
    if not all(_is_unchanged(family, module) for module in (*backbone.layers, *inner, backbone.norm)):
        return
    for layer in backbone.layers:
        layer.forward = partial(_layer_forward, layer, kernels)
    backbone.norm.forward = partial(_final_norm_forward, backbone.norm, kernels)


def unfuse_layers(causal_lm: Any) -> None:
    """Undo `fuse_layers`."""
    for module in causal_lm.modules():
        if _is_fused(module):
            del module.forward


def fusion_unsupported_reason(causal_lm: Any) -> str:
    """Try the first fused layer beside transformers': return why layers must not be fused, or ""."""
    layer = next((module for module in causal_lm.modules() if _is_fused(module)), None)
    if layer is None:
        return ""
    width, device = causal_lm.config.hidden_size, layer.input_layernorm.weight.device
    x = torch.linspace(-3, 3, 8 * width, device=device).view(1, 8, -1).sin().requires_grad_()
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]], device=device)
    options: dict[str, Any] = {
        "attention_mask": None,
        "position_embeddings": causal_lm.base_model.rotary_emb(x, positions),
        "cu_seq_lens_q": torch.tensor([0, 3, 8], dtype=torch.int32, device=device),
        "max_length_q": 5,
    }
    # Gradients of vectors (norms, biases) are enough: those of matrices are torch's own.
    trained = [x, *(p for p in layer.parameters() if p.requires_grad and p.ndim == 1)]
    try:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            fused, expected = layer.forward(x, **options), type(layer).forward(layer, x, **options)
            output = _add_delta(*fused) if isinstance(fused, tuple) else fused
        for one, other in zip(_with_gradients(output, trained), _with_gradients(expected, trained), strict=True):
            off, size = float((one - other).norm()), float(other.norm())
            if not off <= TOLERANCE * size:  # not `>`: NaN must fail, and both may be 0
                return f"a fused layer is {off / size if size else 1:.0%} off"
    except Exception as error:  # a GPU, or a version of Triton or transformers, that does not support it
        return f"{type(error).__name__}: {error}"
    return ""


def _with_gradients(out: Tensor, trained: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(0.5, 1.5, out.numel(), device=out.device).view_as(out).sin()
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), trained)]


def _is_unchanged(family: str, module: Any) -> bool:
    """Return whether a module is of transformers' own class, not a subclass or patched by somebody else."""
    source = f"transformers.models.{family}.modeling_{family}"
    return unsharded_class(module).__module__ == source and ("forward" not in vars(module) or _is_fused(module))


def _is_fused(module: Any) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func in (_layer_forward, _final_norm_forward)


def _layer_forward(module: Any, kernels: Kernels, hidden_states: LayerState, **options: Any) -> LayerState:
    """Run a decoder layer fused if the call allows it, else as transformers does."""
    unfused = isinstance(hidden_states, Tensor) and not _can_fuse(hidden_states, options)
    if unfused or any(map(_has_hooks, module._modules.values())):
        whole = hidden_states if isinstance(hidden_states, Tensor) else _add_delta(*hidden_states)
        plain: Tensor = type(module).forward(module, whole, **options)
        return plain
    residual, delta = (hidden_states[0], None) if isinstance(hidden_states, Tensor) else hidden_states
    residual, normed = _add_rms_norm(kernels, residual, delta, module.input_layernorm)
    attended = _attention_forward(module.self_attn, kernels, normed, options)
    residual, normed = _add_rms_norm(kernels, residual, attended, module.post_attention_layernorm)
    mlp = module.mlp
    product = SwiGLU.apply(kernels, mlp.gate_proj(normed), mlp.up_proj(normed))  # type: ignore[no-untyped-call]
    delta = mlp.down_proj(product)
    # Hooks, and reentrant checkpoints, expect one tensor as a layer's output.
    one_tensor = _has_hooks(module) or (module.gradient_checkpointing and module.training)
    return _add_delta(residual, delta) if one_tensor else (residual, delta)


def _add_delta(residual: Tensor, delta: Tensor | None) -> Tensor:
    # Not a view of the sum: FSDP hooks on to a layer's output, and warns of views.
    return residual[None] if delta is None else residual[None] + delta


def _has_hooks(module: Any) -> bool:
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def _can_fuse(hidden: Tensor, options: dict[str, Any]) -> bool:
    """Return whether a call is of packed sequences under autocast, without mask and KV cache."""
    mixed = torch.is_autocast_enabled(hidden.device.type) and hidden.dtype == torch.float32
    plain = options.get("attention_mask") is None and options.get("past_key_values") is None
    return mixed and plain and options.get("cu_seq_lens_q") is not None


def _final_norm_forward(module: Any, kernels: Kernels, hidden_states: LayerState) -> Tensor:
    if isinstance(hidden_states, tuple):
        return _add_rms_norm(kernels, *hidden_states, module)[1][None]
    plain: Tensor = type(module).forward(module, hidden_states)
    return plain


def _add_rms_norm(kernels: Kernels, residual: Tensor, delta: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.get_autocast_dtype(residual.device.type)
    total, normed = FusedAddRMSNorm.apply(kernels, residual, delta, norm.weight, norm.variance_epsilon, dtype)  # type: ignore[no-untyped-call]
    return total, normed


def _attention_forward(module: Any, kernels: Kernels, normed: Tensor, options: dict[str, Any]) -> Tensor:
    shape = (len(normed), -1, module.head_dim)
    q, k, v = (linear(normed).view(shape) for linear in (module.q_proj, module.k_proj, module.v_proj))
    norms = (module.q_norm, module.k_norm) if hasattr(module, "q_norm") else ()
    eps = norms[0].variance_epsilon if norms else 0.0
    q, k = RoPE.apply(kernels, q, k, *options["position_embeddings"], eps, *(norm.weight for norm in norms))  # type: ignore[no-untyped-call]
    attended = kernels.attention(q, k, v, options["cu_seq_lens_q"], options["max_length_q"], module.scaling)
    out: Tensor = module.o_proj(attended.flatten(1))
    return out


def _refuse_second_derivative() -> None:
    # Autograd cannot see into kernels: it would leave them out of a second derivative without a word. In a backward
    # pass, gradients are enabled only if it is recorded itself (create_graph=True).
    if torch.is_grad_enabled():
        raise NotImplementedError("fused layers have no second derivatives: unfuse_layers(model) first")


class FusedAddRMSNorm(torch.autograd.Function):
    """Return residual + delta in fp32, and its RMSNorm times a weight in another dtype."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, kernels: Kernels, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        x, delta = x.contiguous(), None if delta is None else delta.contiguous()
        residual = x if delta is None else torch.empty_like(x)
        out = torch.empty_like(x, dtype=dtype)
        inverse_rms = x.new_empty(x.shape[:-1])
        kernels.fused_add_rms_norm(x, delta, weight, eps, residual, out, inverse_rms)
        ctx.save_for_backward(residual, weight, inverse_rms)
        ctx.kernels, ctx.delta_dtype = kernels, None if delta is None else delta.dtype
        ctx.set_materialize_grads(False)  # d_residual stays None after the last layer
        return residual, out

    @staticmethod
    def backward(ctx: Any, d_residual: Tensor | None, d_out: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        _refuse_second_derivative()
        residual, weight, inverse_rms = ctx.saved_tensors
        d_x = torch.empty_like(residual)
        d_delta = None if ctx.delta_dtype is None else torch.empty_like(residual, dtype=ctx.delta_dtype)
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[3] else None
        d_residual = None if d_residual is None else d_residual.contiguous()
        ctx.kernels.fused_add_rms_norm_backward(
            d_out.contiguous(), d_residual, residual, weight, inverse_rms, d_x=d_x, d_delta=d_delta, d_weight=d_weight
        )
        return None, d_x, d_delta, d_weight, None, None


class RoPE(torch.autograd.Function):
    """Rotate queries and keys, (tokens, heads, head_dim), after per-head RMSNorm if two norm weights are given."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, kernels: Kernels, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, eps: float, *norms: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = q.contiguous(), k.contiguous(), cos.contiguous(), sin.contiguous()
        q_out, k_out = torch.empty_like(q), torch.empty_like(k)
        kernels.rope(q, k, cos, sin, q_out, k_out, norms=norms, eps=eps)
        # A rotation's gradient does not need its input: q and k are kept for the norms alone.
        ctx.save_for_backward(cos, sin, *((q, k, *norms) if norms else ()))
        ctx.kernels, ctx.eps = kernels, eps
        return q_out, k_out

    @staticmethod
    def backward(ctx: Any, d_q_out: Tensor, d_k_out: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        _refuse_second_derivative()
        cos, sin, *saved = ctx.saved_tensors
        d_q_out, d_k_out = d_q_out.contiguous(), d_k_out.contiguous()
        q, k, *norms = saved or (d_q_out, d_k_out)
        d_q, d_k = torch.empty_like(d_q_out), torch.empty_like(d_k_out)
        d_norms = cos.new_empty(2, cos.shape[-1]) if norms and any(ctx.needs_input_grad[6:]) else None
        ctx.kernels.rope_backward(
            d_q_out, d_k_out, cos, sin, d_q, d_k, q=q, k=k, norms=norms, eps=ctx.eps, d_norms=d_norms
        )
        by_norm = [None] * len(norms) if d_norms is None else list(d_norms)
        return None, d_q, d_k, None, None, None, *by_norm


class SwiGLU(torch.autograd.Function):
    """Return silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, kernels: Kernels, gate: Tensor, up: Tensor) -> Tensor:  # noqa: D102
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(up)
        kernels.swiglu(gate, up, out)
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        _refuse_second_derivative()
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        ctx.kernels.swiglu_backward(d_out.contiguous(), gate, up, d_gate, d_up)
        return None, d_gate, d_up
