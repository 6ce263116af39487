"""RMSNorm in one kernel, giving out what the linear maps behind it take.

transformers' norm is half a dozen operations in fp32, and autocast then casts its output anew for every linear map that
reads it. Here the fp32 stream goes in and autocast's type comes out: the same numbers, once. Of the backward pass only
the stream and one number per token are kept.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

FAMILIES = ("llama", "qwen2", "qwen3")  # norms are read by linear maps alone
CLOSE = 0.02  # how far outputs and gradients may be apart, of their norm: bf16 rounding is below
PLACES = ("input_layernorm", "post_attention_layernorm", "norm")


def fuse_norms(causal: Any) -> None:
    """Let the norms of a model's layers, and its last, run fused; families that use them otherwise stay as they are."""
    if causal.config.model_type not in FAMILIES:
        return
    for name, module in causal.named_modules():
        if name.rpartition(".")[2] in PLACES and "forward" not in vars(module):
            module.forward = partial(_forward, module)


def why_not_fused(causal: Any) -> str:
    """Try a model whose norms were fused: why they must not be; nothing where they do what transformers' do."""
    fused = [module for module in causal.modules() if _is_fused(module)]
    if not fused:
        return ""
    module, device = fused[0], fused[0].weight.device
    x = torch.linspace(-3, 3, 4 * len(module.weight), device=device).view(4, -1).sin().requires_grad_()
    try:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            mine, theirs = module(x).float(), type(module).forward(module, x).float()
        for one, other in zip(_with_gradients(mine, x, module), _with_gradients(theirs, x, module), strict=True):
            off = float((one - other).norm() / other.norm())
            if not off <= CLOSE:
                return f"fused norms are {off:.0%} off"
    except Exception as error:  # a torch without these kernels
        return f"{type(error).__name__}: {error}"
    return ""


def _with_gradients(out: Tensor, x: Tensor, module: Any) -> list[Tensor]:
    trained = [tensor for tensor in (x, module.weight) if tensor.requires_grad]
    weights = torch.linspace(0.5, 1.5, out.numel(), device=out.device).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), trained)]


def unfuse_norms(causal: Any) -> None:
    """Undo that."""
    for module in causal.modules():
        if _is_fused(module):
            del module.forward


def _is_fused(module: Any) -> bool:
    made = vars(module).get("forward")
    return isinstance(made, partial) and made.func is _forward


def _forward(module: Any, hidden: Tensor) -> Tensor:
    kind = hidden.device.type
    if hidden.dtype != torch.float32 or not torch.is_autocast_enabled(kind):
        out: Tensor = type(module).forward(module, hidden)
        return out
    dtype = torch.get_autocast_dtype(kind)
    narrow: Tensor = RmsNorm.apply(hidden, module.weight, module.variance_epsilon, dtype)  # type: ignore[no-untyped-call]
    return narrow


class RmsNorm(torch.autograd.Function):
    """weight x / rms(x), in another type than x's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:  # noqa: D102
        out, inverse = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        narrow: Tensor = out.to(dtype)
        return narrow

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        x, weight, inverse = ctx.saved_tensors
        if x.is_cuda:
            wanted = list(ctx.needs_input_grad[:2])
            shape = [x.shape[-1]]
            made = torch.ops.aten._fused_rms_norm_backward(grad.float(), x, shape, inverse, weight, wanted)
            return *made, None, None
        wide, normed = grad.float(), x * inverse
        by_weight = (wide * normed).flatten(0, -2).sum(0)
        wide = wide * weight
        return inverse * (wide - normed * (wide * normed).mean(-1, keepdim=True)), by_weight, None, None
