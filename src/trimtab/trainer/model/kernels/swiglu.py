"""The SwiGLU product silu(gate) * up, forward and backward.

Arithmetic is fp32; silu(gate) is rounded to the tensors' dtype before the product, as in transformers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048  # per program


def swiglu(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """Write out = silu(gate) * up; all contiguous, of one shape and float dtype."""
    size = out.numel()
    _swiglu[(triton.cdiv(size, ELEMENTS),)](gate, up, out, size, BLOCK=ELEMENTS, num_warps=8)


@triton.jit
def _swiglu(gate, up, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    dtype = out.dtype.element_ty
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    silu = (g / (1.0 + tl.exp(-g))).to(dtype).to(tl.float32)
    tl.store(out + at, (silu * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)).to(dtype), mask=inside)


def swiglu_backward(d_out: Tensor, gate: Tensor, up: Tensor, d_gate: Tensor, d_up: Tensor) -> None:
    """Write the gradients by `gate` and `up`; all contiguous, of one shape and float dtype."""
    size = d_out.numel()
    _swiglu_backward[(triton.cdiv(size, ELEMENTS),)](d_out, gate, up, d_gate, d_up, size, BLOCK=ELEMENTS, num_warps=8)


@triton.jit
def _swiglu_backward(d_out, gate, up, d_gate, d_up, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    dtype = d_up.dtype.element_ty
    grad = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    tl.store(d_up + at, (grad * (g * sigmoid).to(dtype).to(tl.float32)).to(dtype), mask=inside)
    grad *= tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(d_gate + at, (grad * sigmoid * (1.0 + g * (1.0 - sigmoid))).to(dtype), mask=inside)
