"""Softmax kernels of the LM head: per-row moments, or log-probabilities with their gradient in place of the logits.

A program works on one row of logits. It subtracts not the row's maximum, which would take a pass of its own, but a
number near it: the larger of the target token's logit and of the first block's maximum. Moments take one read of the
row, and a second one in the rare case that a logit lies far above that number. Gradients take one read and one write of
the row; they are not yet divided by the row's sum, since that factor can multiply the narrow side of the GEMMs that
follow.

The target token's logit is passed apart, in fp32: its rounding would be the log-probability's error.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # with 4 warps a thread reads 16 bytes at a time, and all rows of a chunk are resident on a GPU at once
WARPS = 4

_VECTOR = tl.constexpr(8)  # neighbours that one thread loads (16 bytes of bf16) and reduces in its registers
_FAR = tl.constexpr(10.0)  # a logit this far above the subtracted number would make the sums lose digits


@triton.jit
def _soft_capped(z, cap, HAS_CAP: tl.constexpr):
    """Return cap * tanh(z / cap), by an exponential that cannot overflow."""
    if HAS_CAP:
        e = tl.exp(-2.0 * tl.abs(z) / cap)
        bounded = cap * (1.0 - e) / (1.0 + e)
        z = tl.where(z < 0, -bounded, bounded)
    return z


def target_logits(hidden: Tensor, weight: Tensor, token: Tensor) -> Tensor:
    """Return the logit of each row's token without bias, (rows) fp32.

    `hidden` is (rows, width) and `weight` (vocabulary, width), both with contiguous rows; `token` (rows) int64.
    """
    rows, width = hidden.shape
    out = torch.empty(rows, device=hidden.device)
    if rows:
        with torch.cuda.device_of(hidden):  # Triton launches on the current device, whatever its arguments' device
            _target_logits[(rows,)](hidden, weight, token, out, hidden.stride(0), weight.stride(0), width, BLOCK=1024)
    return out


@triton.jit
def _target_logits(hidden, weight, token, out, hidden_stride, weight_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    left = hidden + row * hidden_stride
    right = weight + tl.load(token + row) * weight_stride
    column = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        inside = first + column < width
        x = tl.load(left + first + column, mask=inside, other=0.0).to(tl.float32)
        sums += x * tl.load(right + first + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(sums, 0))


def scale_rows(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """Write out = x * factor[:, None], rounded once; `x` and `out` are (rows, width), `factor` (rows) fp32."""
    rows, width = x.shape
    if rows:
        with torch.cuda.device_of(x):
            _scale_rows[(rows,)](x, factor, out, x.stride(0), out.stride(0), width, BLOCK=1024)
    return out


@triton.jit
def _scale_rows(x, factor, out, x_stride, out_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(factor + row)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_stride + column, mask=column < width, other=0.0).to(tl.float32)
        tl.store(out + row * out_stride + column, (value * scale).to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _base(start, vocabulary, target, inverse_temperature, cap, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number that is subtracted: the larger of the target token's logit and the first block's maximum."""
    column = tl.arange(0, BLOCK)
    z = tl.load(start + column, mask=column < vocabulary, other=-float("inf")).to(tl.float32)
    first_block = tl.where(column < vocabulary, _soft_capped(z, cap, HAS_CAP), -float("inf"))
    return tl.maximum(target, tl.max(first_block, 0) * inverse_temperature)


@triton.jit
def _row_sums(
    start, vocabulary, token, target_logit, base, inverse_temperature, cap, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr
):
    """Return, with d = logit - base and e = exp(d), a row's sums of e, e d, e^2 and e^2 d, and its largest d."""
    column = tl.arange(0, BLOCK)
    e1 = tl.zeros([BLOCK // _VECTOR], tl.float32)
    d1 = tl.zeros([BLOCK // _VECTOR], tl.float32)
    e2 = tl.zeros([BLOCK // _VECTOR], tl.float32)
    d2 = tl.zeros([BLOCK // _VECTOR], tl.float32)
    top = tl.full([BLOCK // _VECTOR], -float("inf"), tl.float32)
    for first in range(0, vocabulary, BLOCK):
        inside = first + column < vocabulary
        z = tl.load(start + first + column, mask=inside, other=-float("inf")).to(tl.float32)
        z = tl.where(first + column == token, target_logit, z)
        d = tl.where(inside, _soft_capped(z, cap, HAS_CAP) * inverse_temperature - base, -float("inf"))
        d = tl.reshape(d, [BLOCK // _VECTOR, _VECTOR])
        e = tl.exp(d)
        weighted = tl.where(e > 0, e * d, 0.0)  # 0 * -inf would be NaN
        e1 += tl.sum(e, 1)
        d1 += tl.sum(weighted, 1)
        e2 += tl.sum(e * e, 1)
        d2 += tl.sum(e * weighted, 1)
        top = tl.maximum(top, tl.max(d, 1))
    return tl.sum(e1, 0), tl.sum(d1, 0), tl.sum(e2, 0), tl.sum(d2, 0), tl.max(top, 0)


@triton.jit
def _softmax_moments(
    logits,
    tokens,
    target_logits,
    out,  # (4, rows): ln p, entropy, sum p^2, sum p^2 ln p
    stride,
    rows,
    vocabulary,
    inverse_temperature,
    cap,
    HAS_CAP: tl.constexpr,
    WRITE_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    column = tl.arange(0, BLOCK)
    token = tl.load(tokens + row)
    raw = tl.load(target_logits + row)
    target = _soft_capped(raw, cap, HAS_CAP) * inverse_temperature
    base = _base(start, vocabulary, target, inverse_temperature, cap, HAS_CAP, BLOCK)
    s1, t1, s2, t2, top = _row_sums(start, vocabulary, token, raw, base, inverse_temperature, cap, HAS_CAP, BLOCK)
    if top > _FAR:
        base += top
        s1, t1, s2, t2, top = _row_sums(start, vocabulary, token, raw, base, inverse_temperature, cap, HAS_CAP, BLOCK)
    log_sum = tl.log(s1)
    logp = target - base - log_sum
    tl.store(out + row, logp)
    tl.store(out + rows + row, log_sum - t1 / s1)
    tl.store(out + 2 * rows + row, s2 / (s1 * s1))
    tl.store(out + 3 * rows + row, (t2 - log_sum * s2) / (s1 * s1))
    if WRITE_GRAD:
        logsumexp = base + log_sum
        for first in range(0, vocabulary, BLOCK):
            inside = first + column < vocabulary
            z = tl.load(start + first + column, mask=inside, other=0.0).to(tl.float32)
            z = tl.where(first + column == token, raw, z)
            y = _soft_capped(z, cap, HAS_CAP)
            g = tl.where(first + column == token, 1.0, 0.0) - tl.exp(y * inverse_temperature - logsumexp)
            if HAS_CAP:
                g *= 1.0 - (y / cap) * (y / cap)
            tl.store(start + first + column, g.to(logits.dtype.element_ty), mask=inside)


def softmax_moments(
    logits: Tensor, tokens: Tensor, target: Tensor, temperature: float, soft_cap: float | None, *, write_grad: bool
) -> Tensor:
    """Return ln p of each row's token, entropy, sum p^2 and sum p^2 ln p, (4, rows) fp32.

    `logits` are (rows, vocabulary), before soft cap and temperature; `tokens` (rows) int64; `target`, their logits,
    (rows) fp32. With `write_grad` the logits become d ln p / d logit * temperature.
    """
    return _launch(_softmax_moments, 4, (logits, tokens, target), temperature, soft_cap, WRITE_GRAD=write_grad)


@triton.jit
def _logp_and_grad(
    logits,
    tokens,
    target_logits,
    out,  # (2, rows): ln p, and the factor that makes the gradient of what is written
    stride,
    rows,
    vocabulary,
    inverse_temperature,
    cap,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    column = tl.arange(0, BLOCK)
    token = tl.load(tokens + row)
    target = _soft_capped(tl.load(target_logits + row), cap, HAS_CAP)
    base = _base(start, vocabulary, target * inverse_temperature, inverse_temperature, cap, HAS_CAP, BLOCK)
    last = (vocabulary - 1) // BLOCK * BLOCK
    sums = tl.zeros([BLOCK], tl.float32)
    # From the last block to the first: the GEMM before has just written the last, the GEMM after starts with the first,
    # and both are then still in the cache.
    for back in range(0, vocabulary, BLOCK):
        first = last - back
        inside = first + column < vocabulary
        z = tl.load(start + first + column, mask=inside, other=0.0).to(tl.float32)
        y = _soft_capped(z, cap, HAS_CAP)
        e = tl.where(inside & (first + column != token), tl.exp(y * inverse_temperature - base), 0.0)
        sums += e
        if HAS_CAP:
            e *= 1.0 - (y / cap) * (y / cap)
        tl.store(start + first + column, e.to(logits.dtype.element_ty), mask=inside)
    others = tl.sum(sums, 0)
    tl.debug_barrier()  # the target's position has been written as 0 by another thread, and is written again below
    away = target * inverse_temperature - base
    total = others + tl.exp(away)
    target_grad = others
    if HAS_CAP:
        target_grad *= 1.0 - (target / cap) * (target / cap)
    rounded = (-target_grad).to(logits.dtype.element_ty)
    tl.store(start + token, rounded)
    tl.store(out + row, away - tl.log(total))
    # The target's gradient is the row's largest: the factor undoes its rounding, and moves that to the small others.
    held = rounded.to(tl.float32)
    tl.store(out + rows + row, tl.where(held == 0.0, -1.0, target_grad / held) / total)


def logp_and_grad(logits: Tensor, tokens: Tensor, target: Tensor, temperature: float, soft_cap: float | None) -> Tensor:
    """Return ln p of each row's token and a factor, (2, rows) fp32; logits times it become d ln p / d logit * T.

    Shapes and dtypes are those of `softmax_moments`. A target below probability e^-80 may overflow to a non-finite
    gradient, which the update then reports.
    """
    if logits.dtype == torch.float16:  # what is not yet normalised would overflow at e^-11: read the row twice instead
        logp = softmax_moments(logits, tokens, target, temperature, soft_cap, write_grad=True)[0]
        return torch.stack([logp, torch.ones_like(logp)])
    return _launch(_logp_and_grad, 2, (logits, tokens, target), temperature, soft_cap)


def _launch(
    kernel: Any, numbers: int, inputs: tuple[Tensor, ...], temperature: float, soft_cap: float | None, **flags: bool
) -> Tensor:
    """Run one program for every row of logits, the first input; return their results, (numbers, rows) fp32."""
    rows, vocabulary = inputs[0].shape
    out = torch.empty(numbers, rows, device=inputs[0].device, dtype=torch.float32)
    sizes, scales = (inputs[0].stride(0), rows, vocabulary), (1.0 / temperature, soft_cap or 1.0)
    if rows:
        with torch.cuda.device_of(inputs[0]):
            options = {"HAS_CAP": bool(soft_cap), "BLOCK": BLOCK, "num_warps": WARPS, **flags}
            kernel[(rows,)](*inputs, out, *sizes, *scales, **options)
    return out
