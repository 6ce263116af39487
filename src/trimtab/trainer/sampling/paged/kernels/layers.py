"""Triton kernels between the linear maps of a layer: residual add with RMSNorm, and SwiGLU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

NORM_WARPS = 8
SWIGLU_BLOCK = 1024


def fused_add_rms_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    """residual += delta, then out = RMSNorm(residual) weight. `residual` and `weight` are fp32."""
    rows, width = residual.shape
    tensors = (residual, residual if delta is None else delta, weight, out)
    add, block = delta is not None, triton.next_power_of_2(width)
    _fused_add_rms_norm_kernel[(rows,)](*tensors, width, eps, ADD=add, BLOCK=block, num_warps=NORM_WARPS)


@triton.jit
def _fused_add_rms_norm_kernel(residual, delta, weight, out, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row of (rows, width)."""
    row = tl.program_id(0).to(tl.int64) * width  # int64: rows x width may exceed 2^31
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + row + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + row + column, value, mask=inside)
    inverse_rms = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    normed = value * inverse_rms * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + row + column, normed.to(out.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    """out = silu(gate) x up, of the two halves of gate_up: (rows, 2 width) -> (rows, width)."""
    rows, width = out.shape
    _swiglu_kernel[(rows, triton.cdiv(width, SWIGLU_BLOCK))](gate_up, out, width, BLOCK=SWIGLU_BLOCK, num_warps=4)


@triton.jit
def _swiglu_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    """One program per row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    # Rounded once in between, as torch rounds the output of silu.
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, (silu * up).to(out.dtype.element_ty), mask=inside)
