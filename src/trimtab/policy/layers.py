"""A model's layers with all that lies between their matrix products fused.

transformers' layer is some forty operations, and most of them read and write whole activations: norms of half a dozen
steps, heads turned by copies of their halves, a cast before every linear map. Here they are four kernels: the sum of
the residual stream with the norm behind it (twice), the turning of queries and keys, the gated product. The stream is
fp32, what linear maps read is of autocast's type, and values are rounded where they were.

Between layers go two tensors, (tokens, width): the stream, and what is yet to be added to it, which the next norm does.
Where a model is small the host's time for a layer counts as much as the GPU's, and fewer operations serve both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trimtab.attention import causal_attention

FAMILIES = ("llama", "qwen2", "qwen3")  # whose layers are those written here
CLOSE = 0.05  # how far a layer's output and gradients may be apart, of their norm: bf16 rounding is well below

Stream = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Kernels:
    """What the fused parts are done by; each writes into tensors that it is given."""

    add_norm: Callable[..., None]
    add_norm_back: Callable[..., None]
    turn: Callable[..., None]
    turn_back: Callable[..., None]
    gate: Callable[..., None]
    gate_back: Callable[..., None]
    attend: Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor] = causal_attention


def gpu_kernels() -> Kernels:
    """The GPU's, which need Triton."""
    from trimtab.policy.kernels.layers import add_norm, add_norm_back, gate, gate_back
    from trimtab.policy.kernels.rope import turn, turn_back

    return Kernels(add_norm, add_norm_back, turn, turn_back, gate, gate_back)


def fuse_layers(causal: Any, kernels: Kernels) -> None:
    """Let a model's layers run fused; other families, and layers with parts of somebody's own, stay as they are.

    Calls that are not of packed sequences under autocast go through transformers' layers as before, and so do layers
    with hooks inside.
    """
    family, backbone = causal.config.model_type, causal.base_model
    if family not in FAMILIES or causal.config.hidden_act != "silu":
        return
    inner = [part for layer in backbone.layers for part in layer.children()]
    if not all(_is_from(family, part) for part in (*backbone.layers, *inner, backbone.norm)):
        return
    for layer in backbone.layers:
        layer.forward = partial(_layer, layer, kernels)
    backbone.norm.forward = partial(_last_norm, backbone.norm, kernels)


def unfuse_layers(causal: Any) -> None:
    """Undo that."""
    for module in causal.modules():
        if _is_fused(module):
            del module.forward


def fusion_unsupported_reason(causal: Any) -> str:
    """Try a model whose layers were fused: why they must not be; nothing where they do what transformers' do."""
    layer = next((module for module in causal.modules() if _is_fused(module)), None)
    if layer is None:
        return ""
    width, device = causal.config.hidden_size, layer.input_layernorm.weight.device
    x = torch.linspace(-3, 3, 8 * width, device=device).view(1, 8, -1).sin().requires_grad_()
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]], device=device)
    options: dict[str, Any] = {
        "attention_mask": None,
        "position_embeddings": causal.base_model.rotary_emb(x, positions),
        "cu_seq_lens_q": torch.tensor([0, 3, 8], dtype=torch.int32, device=device),
        "max_length_q": 5,
    }
    trained = [x, *(p for p in layer.parameters() if p.requires_grad and p.ndim == 1)]
    try:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            made, theirs = layer.forward(x, **options), type(layer).forward(layer, x, **options)
            mine = _joined(*made) if isinstance(made, tuple) else made
        for one, other in zip(_with_gradients(mine, trained), _with_gradients(theirs, trained), strict=True):
            off, size = float((one - other).norm()), float(other.norm())
            if not off <= CLOSE * size:  # both may be 0
                return f"a fused layer is {off / size if size else 1:.0%} off"
    except Exception as error:  # whatever a GPU, or a version of Triton or transformers, does not know
        return f"{type(error).__name__}: {error}"
    return ""


def _with_gradients(out: Tensor, trained: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(0.5, 1.5, out.numel(), device=out.device).view_as(out).sin()
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), trained)]


def _is_from(family: str, module: Any) -> bool:
    """Whether a module does what transformers' file of this family says, rather than a subclass or a patch of it."""
    home = f"transformers.models.{family}.modeling_{family}"
    return type(module).__module__ == home and ("forward" not in vars(module) or _is_fused(module))


def _is_fused(module: Any) -> bool:
    made = vars(module).get("forward")
    return isinstance(made, partial) and made.func in (_layer, _last_norm)


def _layer(module: Any, kernels: Kernels, hidden_states: Stream, **options: Any) -> Stream:
    """A layer: what came in, with the last layer's part added, and this layer's own."""
    if isinstance(hidden_states, tuple):
        stream, delta = hidden_states
    elif _fits(hidden_states, options):
        stream, delta = hidden_states[0], None
    else:
        plain: Tensor = type(module).forward(module, hidden_states, **options)
        return plain
    if any(map(_has_hooks, module._modules.values())):
        inside: Tensor = type(module).forward(module, _joined(stream, delta), **options)
        return inside
    stream, normed = _add_norm(kernels, stream, delta, module.input_layernorm)
    seen = _attention(module.self_attn, kernels, normed, options)
    stream, normed = _add_norm(kernels, stream, seen, module.post_attention_layernorm)
    mlp = module.mlp
    gated = Gate.apply(kernels, mlp.gate_proj(normed), mlp.up_proj(normed))  # type: ignore[no-untyped-call]
    delta = mlp.down_proj(gated)
    # Hooks, and checkpoints of the older kind, know a layer's output as one tensor alone.
    alone = _has_hooks(module) or (module.gradient_checkpointing and module.training)
    return _joined(stream, delta) if alone else (stream, delta)


def _joined(stream: Tensor, delta: Tensor | None) -> Tensor:
    return (stream if delta is None else stream + delta)[None]


def _has_hooks(module: Any) -> bool:
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def _fits(hidden: Tensor, options: dict[str, Any]) -> bool:
    narrow = torch.is_autocast_enabled(hidden.device.type) and hidden.dtype == torch.float32
    bare = options.get("attention_mask") is None and options.get("past_key_values") is None
    return narrow and bare and options.get("cu_seq_lens_q") is not None


def _last_norm(module: Any, kernels: Kernels, hidden_states: Stream) -> Tensor:
    if isinstance(hidden_states, tuple):
        return _add_norm(kernels, *hidden_states, module)[1][None]
    plain: Tensor = type(module).forward(module, hidden_states)
    return plain


def _add_norm(kernels: Kernels, stream: Tensor, delta: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.get_autocast_dtype(stream.device.type)
    total, normed = AddNorm.apply(kernels, stream, delta, norm.weight, norm.variance_epsilon, dtype)  # type: ignore[no-untyped-call]
    return total, normed


def _attention(module: Any, kernels: Kernels, normed: Tensor, options: dict[str, Any]) -> Tensor:
    shape = (len(normed), -1, module.head_dim)
    q, k, v = (linear(normed).view(shape) for linear in (module.q_proj, module.k_proj, module.v_proj))
    norms = (module.q_norm, module.k_norm) if hasattr(module, "q_norm") else ()
    eps = norms[0].variance_epsilon if norms else 0.0
    q, k = Turn.apply(kernels, q, k, *options["position_embeddings"], eps, *(norm.weight for norm in norms))  # type: ignore[no-untyped-call]
    seen = kernels.attend(q, k, v, options["cu_seq_lens_q"], options["max_length_q"], module.scaling)
    out: Tensor = module.o_proj(seen.flatten(1))
    return out


def _check_once() -> None:
    """Autograd cannot see into kernels: a second derivative would be wrong."""
    if torch.is_grad_enabled():  # in a backward pass: whether it is recorded itself
        raise NotImplementedError("fused layers have no second derivatives: unfuse_layers(model) first")


class AddNorm(torch.autograd.Function):
    """The stream with what is added to it, and its norm times a weight, in another type."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, kernels: Kernels, stream: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        stream, delta = stream.contiguous(), None if delta is None else delta.contiguous()
        total = stream if delta is None else torch.empty_like(stream)
        out = torch.empty_like(stream, dtype=dtype)
        inverse = stream.new_empty(stream.shape[:-1])
        kernels.add_norm(stream, delta, weight, eps, total, out, inverse)
        ctx.save_for_backward(total, weight, inverse)
        ctx.kernels, ctx.added = kernels, None if delta is None else delta.dtype
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    def backward(ctx: Any, d_total: Tensor | None, d_out: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        _check_once()
        total, weight, inverse = ctx.saved_tensors
        d_stream = torch.empty_like(total)
        d_delta = None if ctx.added is None else torch.empty_like(total, dtype=ctx.added)
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[3] else None
        d_total = None if d_total is None else d_total.contiguous()
        ctx.kernels.add_norm_back(d_out.contiguous(), d_total, total, weight, inverse, d_stream, d_delta, d_weight)
        return None, d_stream, d_delta, d_weight, None, None


class Turn(torch.autograd.Function):
    """Queries and keys, (tokens, heads, D), normed by head where two weights are given, and turned to their places."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, kernels: Kernels, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, eps: float, *norms: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = q.contiguous(), k.contiguous(), cos.contiguous(), sin.contiguous()
        q_out, k_out = torch.empty_like(q), torch.empty_like(k)
        kernels.turn(q, k, norms, eps, cos, sin, q_out, k_out)
        ctx.save_for_backward(cos, sin, *((q, k, *norms) if norms else ()))
        ctx.kernels, ctx.eps = kernels, eps
        return q_out, k_out

    @staticmethod
    def backward(ctx: Any, d_q_out: Tensor, d_k_out: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        _check_once()
        cos, sin, *before = ctx.saved_tensors
        d_q_out, d_k_out = d_q_out.contiguous(), d_k_out.contiguous()
        q, k, *norms = before or (d_q_out, d_k_out)
        d_q, d_k = torch.empty_like(d_q_out), torch.empty_like(d_k_out)
        d_norms = cos.new_empty(2, cos.shape[-1]) if norms and any(ctx.needs_input_grad[6:]) else None
        ctx.kernels.turn_back(d_q_out, d_k_out, q, k, norms, ctx.eps, cos, sin, d_q, d_k, d_norms)
        by_norm = [None] * len(norms) if d_norms is None else list(d_norms)
        return None, d_q, d_k, None, None, None, *by_norm


class Gate(torch.autograd.Function):
    """silu(gates) up."""

    @staticmethod
    def forward(ctx: Any, kernels: Kernels, gates: Tensor, up: Tensor) -> Tensor:  # noqa: D102
        gates, up = gates.contiguous(), up.contiguous()
        out = torch.empty_like(up)
        kernels.gate(gates, up, out)
        ctx.save_for_backward(gates, up)
        ctx.kernels = kernels
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        _check_once()
        gates, up = ctx.saved_tensors
        d_gates, d_up = torch.empty_like(gates), torch.empty_like(up)
        ctx.kernels.gate_back(d_out.contiguous(), gates, up, d_gates, d_up)
        return None, d_gates, d_up
