"""What lies between a layer's matrix products, forward and backward: norms with the sum before them, the gated product.

Each kernel reads every tensor once and writes every result once, into tensors it is given. Sums are fp32; a value that
transformers rounds on the way is rounded here too. The gradient of a norm's weight is summed by each program over the
rows it meets, and then over programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1024  # of a kernel that sums over rows: enough to keep a GPU busy
ELEMENTS = 2048  # that one program gates


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, total: Tensor, out: Tensor, inverse: Tensor
) -> None:
    """total = x + delta, out = RMSNorm(total) weight, and 1 / rms of every row; without a delta x is the total."""
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    _add_norm[(inverse.numel(),)](
        x,
        x if delta is None else delta,
        weight,
        total,
        out,
        inverse,
        width,
        eps,
        ADD=delta is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )


@triton.jit
def _add_norm(x, delta, weight, total, out, inverse, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + row * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * width + column, value, mask=inside)
    size = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(inverse + row, size)
    normed = value * size * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + row * width + column, normed.to(out.dtype.element_ty), mask=inside)


def add_norm_back(
    d_out: Tensor,
    d_total: Tensor | None,
    total: Tensor,
    weight: Tensor,
    inverse: Tensor,
    d_x: Tensor,
    d_delta: Tensor | None,
    d_weight: Tensor | None,
) -> None:
    """The gradients of x, delta and weight from those of `out` and, where it was used further, `total`."""
    rows, width = inverse.numel(), total.shape[-1]
    block, programs = triton.next_power_of_2(width), min(rows, PROGRAMS)
    partial = d_x if d_weight is None else torch.empty(programs, width, device=d_x.device)
    _add_norm_back[(programs,)](
        d_out,
        d_out if d_total is None else d_total,
        total,
        weight,
        inverse,
        d_x,
        d_x if d_delta is None else d_delta,
        partial,
        rows,
        width,
        PASSED=d_total is not None,
        ADDED=d_delta is not None,
        WEIGHT=d_weight is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )
    if d_weight is not None:
        torch.sum(partial, 0, out=d_weight)


@triton.jit(do_not_specialize=["rows"])
def _add_norm_back(
    d_out,
    d_total,
    total,
    weight,
    inverse,
    d_x,
    d_delta,
    partial,
    rows,
    width,
    PASSED: tl.constexpr,
    ADDED: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    scale = tl.load(weight + column, mask=inside, other=0.0)
    sums = tl.zeros([BLOCK], tl.float32)
    for row in range(first, rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * width + column
        size = tl.load(inverse + row)
        normed = tl.load(total + at, mask=inside, other=0.0) * size
        slope = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
        if WEIGHT:
            sums += slope * normed
        slope *= scale
        slope = size * (slope - normed * (tl.sum(slope * normed, 0) / width))
        if PASSED:
            slope += tl.load(d_total + at, mask=inside, other=0.0)
        tl.store(d_x + at, slope, mask=inside)
        if ADDED:
            tl.store(d_delta + at, slope.to(d_delta.dtype.element_ty), mask=inside)
    if WEIGHT:
        tl.store(partial + first.to(tl.int64) * width + column, sums, mask=inside)


def _warps(block: int) -> int:
    """Eight numbers a thread, up to sixteen warps."""
    return min(max(block // 256, 1), 16)


def gate(gates: Tensor, up: Tensor, out: Tensor) -> None:
    """silu(gates) up."""
    size = out.numel()
    _gate[(triton.cdiv(size, ELEMENTS),)](gates, up, out, size, BLOCK=ELEMENTS, num_warps=8)


@triton.jit
def _gate(gates, up, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    kind = out.dtype.element_ty
    g = tl.load(gates + at, mask=inside, other=0.0).to(tl.float32)
    silu = (g / (1.0 + tl.exp(-g))).to(kind).to(tl.float32)
    tl.store(out + at, (silu * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)).to(kind), mask=inside)


def gate_back(d_out: Tensor, gates: Tensor, up: Tensor, d_gates: Tensor, d_up: Tensor) -> None:
    """The gradients of both."""
    size = d_out.numel()
    _gate_back[(triton.cdiv(size, ELEMENTS),)](d_out, gates, up, d_gates, d_up, size, BLOCK=ELEMENTS, num_warps=8)


@triton.jit
def _gate_back(d_out, gates, up, d_gates, d_up, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    kind = d_up.dtype.element_ty
    slope = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gates + at, mask=inside, other=0.0).to(tl.float32)
    open_ = 1.0 / (1.0 + tl.exp(-g))
    tl.store(d_up + at, (slope * (g * open_).to(kind).to(tl.float32)).to(kind), mask=inside)
    slope *= tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(d_gates + at, (slope * open_ * (1.0 + g * (1.0 - open_))).to(kind), mask=inside)
