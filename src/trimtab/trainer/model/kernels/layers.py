"""Residual add fused with the RMSNorm that follows it, and the SwiGLU product silu(gate) * up; forward and backward.

Every kernel reads each input once and writes each output once, into tensors the caller allocates. Arithmetic is fp32;
silu(gate) is rounded to the tensors' dtype before the product, as in transformers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1024  # of the backward kernel, each of which sums d_weight over its rows: enough to keep a GPU busy


def fused_add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, residual: Tensor, out: Tensor, inverse_rms: Tensor
) -> None:
    """Write residual = x + delta, out = RMSNorm(residual) * weight, and 1 / rms of every row.

    `x` and `residual` are (..., width) fp32, `delta` and `out` (..., width) in any float dtype, `weight` (width) fp32,
    `inverse_rms` (...) fp32; all contiguous. Without a delta `residual` is `x` and is not written.
    """
    width, added = x.shape[-1], x if delta is None else delta
    options = _row_options(width) | {"ADD": delta is not None}
    _fused_add_rms_norm[(inverse_rms.numel(),)](x, added, weight, residual, out, inverse_rms, width, eps, **options)


@triton.jit
def _fused_add_rms_norm(
    x, delta, weight, residual, out, inverse_rms, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + row * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + row * width + column, value, mask=inside)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(inverse_rms + row, inverse)
    normed = value * inverse * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + row * width + column, normed.to(out.dtype.element_ty), mask=inside)


def fused_add_rms_norm_backward(
    d_out: Tensor,
    d_residual: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    inverse_rms: Tensor,
    *,
    d_x: Tensor,
    d_delta: Tensor | None,
    d_weight: Tensor | None,
) -> None:
    """Write the gradients by x, delta and weight from those by `out` and, unless None, `residual`.

    Shapes and dtypes are those of the forward pass; `d_delta` or `d_weight` None means not needed.
    """
    rows, width = inverse_rms.numel(), residual.shape[-1]
    programs = min(rows, PROGRAMS)
    # One row of sums per program, added up afterwards: atomic adds would make the result depend on their order.
    partial = d_x if d_weight is None else torch.empty(programs, width, device=d_x.device)
    given = {"HAS_D_RESIDUAL": d_residual, "HAS_D_DELTA": d_delta, "HAS_D_WEIGHT": d_weight}
    options = _row_options(width) | {flag: tensor is not None for flag, tensor in given.items()}
    # Triton needs a pointer even for what is not read or written.
    d_residual, d_delta = d_out if d_residual is None else d_residual, d_x if d_delta is None else d_delta
    _fused_add_rms_norm_backward[(programs,)](
        d_out, d_residual, residual, weight, inverse_rms, d_x, d_delta, partial, rows, width, **options
    )
    if d_weight is not None:
        torch.sum(partial, 0, out=d_weight)


# `rows` changes with every batch: specialised on its divisibility the kernel would be compiled several times.
@triton.jit(do_not_specialize=["rows"])
def _fused_add_rms_norm_backward(
    d_out,
    d_residual,
    residual,
    weight,
    inverse_rms,
    d_x,
    d_delta,
    partial,
    rows,
    width,
    HAS_D_RESIDUAL: tl.constexpr,
    HAS_D_DELTA: tl.constexpr,
    HAS_D_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    scale = tl.load(weight + column, mask=inside, other=0.0)
    sums = tl.zeros([BLOCK], tl.float32)
    for row in range(first, rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * width + column
        inverse = tl.load(inverse_rms + row)
        normed = tl.load(residual + at, mask=inside, other=0.0) * inverse
        grad = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_D_WEIGHT:
            sums += grad * normed
        grad *= scale
        grad = inverse * (grad - normed * (tl.sum(grad * normed, 0) / width))
        if HAS_D_RESIDUAL:
            grad += tl.load(d_residual + at, mask=inside, other=0.0)
        tl.store(d_x + at, grad, mask=inside)
        if HAS_D_DELTA:
            tl.store(d_delta + at, grad.to(d_delta.dtype.element_ty), mask=inside)
    if HAS_D_WEIGHT:
        tl.store(partial + first.to(tl.int64) * width + column, sums, mask=inside)


def _row_options(width: int) -> dict[str, int]:
    """Return block and warps for a row: eight elements per thread (16 bytes of bf16), at most sixteen warps."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}


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
