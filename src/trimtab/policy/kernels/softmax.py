"""The softmax part of the head as kernels: four numbers per row, or in place the gradient of the log-probability.

A program owns a row. It subtracts not the row's maximum, which would have to be known first, but a number near it: the
larger of the drawn token's logit and of the first block's. For scores it reads the row once, with four sums; where a
logit turns out to lie far above that number, which is rare, it reads the row again. For gradients it reads the row once
and writes it once: what is written is not yet divided by the row's sum, for that factor can multiply the narrow side of
the GEMMs that follow. A token whose probability is below e^-80 may overflow there, and is then found as not finite; in
fp16, where that would happen at e^-11, the row is read a second time instead. Blocks are then taken from the last to
the first: the GEMM before has just written the last, the GEMM after begins with the first, and what was touched a
moment ago is found in the cache.

The drawn token's own logit comes apart, in fp32: its rounding would be the log-probability's error.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # a thread reads 16 bytes at a time, and a GPU holds all rows of a chunk at once
WARPS = 4

_VECTOR = tl.constexpr(8)  # neighbours that one thread reads, and adds up by itself
_FAR = tl.constexpr(10.0)  # above the number subtracted: further away, sums would lose digits to it


@triton.jit
def _capped(z, cap, HAS_CAP: tl.constexpr):
    """cap tanh(z / cap), by an exponential that cannot overflow."""
    if HAS_CAP:
        e = tl.exp(-2.0 * tl.abs(z) / cap)
        bounded = cap * (1.0 - e) / (1.0 + e)
        z = tl.where(z < 0, -bounded, bounded)
    return z


def target_logits(hidden: Tensor, weight: Tensor, token: Tensor) -> Tensor:
    """The logit of each row's token, without bias, in fp32."""
    rows, width = hidden.shape
    out = torch.empty(rows, device=hidden.device)
    if rows:
        with torch.cuda.device_of(hidden):  # Triton takes the current GPU, wherever its tensors are
            _own_logits[(rows,)](hidden, weight, token, out, hidden.stride(0), weight.stride(0), width, BLOCK=1024)
    return out


@triton.jit
def _own_logits(hidden, weight, token, out, hidden_stride, weight_stride, width, BLOCK: tl.constexpr):
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
    """out = x times a factor for each row, rounded once."""
    rows, width = x.shape
    if rows:
        with torch.cuda.device_of(x):
            _scale_rows[(rows,)](x, factor, out, x.stride(0), out.stride(0), width, BLOCK=1024)
    return out


@triton.jit
def _scale_rows(x, factor, out, x_stride, out_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    by = tl.load(factor + row)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_stride + column, mask=column < width, other=0.0).to(tl.float32)
        tl.store(out + row * out_stride + column, (value * by).to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _base(start, vocabulary, mine, inverse_temperature, cap, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr):
    """A number that is not far below the row's maximum: the larger of the drawn token's and of the first block's."""
    column = tl.arange(0, BLOCK)
    z = tl.load(start + column, mask=column < vocabulary, other=-float("inf")).to(tl.float32)
    nearby = tl.where(column < vocabulary, _capped(z, cap, HAS_CAP), -float("inf"))
    return tl.maximum(mine, tl.max(nearby, 0) * inverse_temperature)


@triton.jit
def _sums(
    start,
    vocabulary,
    drawn,
    chosen,
    base,
    inverse_temperature,
    cap,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Over a row, with d = x - base and e = exp(d): the sums of e, e d, e^2 and e^2 d, and the largest d."""
    column = tl.arange(0, BLOCK)
    e1 = tl.zeros([BLOCK // _VECTOR], tl.float32)
    d1 = tl.zeros([BLOCK // _VECTOR], tl.float32)
    e2 = tl.zeros([BLOCK // _VECTOR], tl.float32)
    d2 = tl.zeros([BLOCK // _VECTOR], tl.float32)
    top = tl.full([BLOCK // _VECTOR], -float("inf"), tl.float32)
    for first in range(0, vocabulary, BLOCK):
        inside = first + column < vocabulary
        z = tl.load(start + first + column, mask=inside, other=-float("inf")).to(tl.float32)
        z = tl.where(first + column == drawn, chosen, z)
        d = tl.where(inside, _capped(z, cap, HAS_CAP) * inverse_temperature - base, -float("inf"))
        d = tl.reshape(d, [BLOCK // _VECTOR, _VECTOR])
        e = tl.exp(d)
        weighted = tl.where(e > 0, e * d, 0.0)
        e1 += tl.sum(e, 1)
        d1 += tl.sum(weighted, 1)
        e2 += tl.sum(e * e, 1)
        d2 += tl.sum(e * weighted, 1)
        top = tl.maximum(top, tl.max(d, 1))
    return tl.sum(e1, 0), tl.sum(d1, 0), tl.sum(e2, 0), tl.sum(d2, 0), tl.max(top, 0)


@triton.jit
def _softmax_part(
    logits,
    token,
    own,
    out,  # (4, rows): ln p, entropy, sum p^2, sum p^2 ln p
    stride,
    rows,
    vocabulary,
    inverse_temperature,
    cap,
    HAS_CAP: tl.constexpr,
    WRITE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    column = tl.arange(0, BLOCK)
    drawn = tl.load(token + row)
    chosen = tl.load(own + row)
    mine = _capped(chosen, cap, HAS_CAP) * inverse_temperature
    base = _base(start, vocabulary, mine, inverse_temperature, cap, HAS_CAP, BLOCK)
    s1, t1, s2, t2, top = _sums(start, vocabulary, drawn, chosen, base, inverse_temperature, cap, HAS_CAP, BLOCK)
    if top > _FAR:
        base += top
        s1, t1, s2, t2, top = _sums(start, vocabulary, drawn, chosen, base, inverse_temperature, cap, HAS_CAP, BLOCK)
    log_sum = tl.log(s1)
    logp = mine - base - log_sum
    tl.store(out + row, logp)
    tl.store(out + rows + row, log_sum - t1 / s1)
    tl.store(out + 2 * rows + row, s2 / (s1 * s1))
    tl.store(out + 3 * rows + row, (t2 - log_sum * s2) / (s1 * s1))
    if WRITE:
        whole = base + log_sum
        for first in range(0, vocabulary, BLOCK):
            inside = first + column < vocabulary
            z = tl.load(start + first + column, mask=inside, other=0.0).to(tl.float32)
            z = tl.where(first + column == drawn, chosen, z)
            y = _capped(z, cap, HAS_CAP)
            g = tl.where(first + column == drawn, 1.0, 0.0) - tl.exp(y * inverse_temperature - whole)
            if HAS_CAP:
                g *= 1.0 - (y / cap) * (y / cap)
            tl.store(start + first + column, g.to(logits.dtype.element_ty), mask=inside)


def softmax_part(
    logits: Tensor, token: Tensor, own: Tensor, temperature: float, soft_cap: float | None, write: bool
) -> Tensor:
    """The four numbers of every row, (4, rows) in fp32; with `write` the logits become d ln p / d (x T)."""
    return _launched(_softmax_part, 4, logits, token, own, temperature, soft_cap, WRITE=write)


@triton.jit
def _slope_part(
    logits,
    token,
    own,
    out,  # (2, rows): ln p, and the factor that makes what is written d ln p / d (x T)
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
    drawn = tl.load(token + row)
    chosen = _capped(tl.load(own + row), cap, HAS_CAP)
    base = _base(start, vocabulary, chosen * inverse_temperature, inverse_temperature, cap, HAS_CAP, BLOCK)
    last = (vocabulary - 1) // BLOCK * BLOCK
    sums = tl.zeros([BLOCK], tl.float32)
    for back in range(0, vocabulary, BLOCK):
        first = last - back
        inside = first + column < vocabulary
        z = tl.load(start + first + column, mask=inside, other=0.0).to(tl.float32)
        y = _capped(z, cap, HAS_CAP)
        e = tl.where(inside & (first + column != drawn), tl.exp(y * inverse_temperature - base), 0.0)
        sums += e
        if HAS_CAP:
            e *= 1.0 - (y / cap) * (y / cap)
        tl.store(start + first + column, e.to(logits.dtype.element_ty), mask=inside)
    rest = tl.sum(sums, 0)
    tl.debug_barrier()  # the drawn token's place has been written as 0, and is written again below
    away = chosen * inverse_temperature - base
    total = rest + tl.exp(away)
    drawn_slope = rest
    if HAS_CAP:
        drawn_slope *= 1.0 - (chosen / cap) * (chosen / cap)
    rounded = (-drawn_slope).to(logits.dtype.element_ty)
    tl.store(start + drawn, rounded)
    tl.store(out + row, away - tl.log(total))
    # The drawn token's slope is the largest: the factor makes it exact again, and shares its rounding with the others.
    held = rounded.to(tl.float32)
    tl.store(out + rows + row, tl.where(held == 0.0, -1.0, drawn_slope / held) / total)


def slope_part(logits: Tensor, token: Tensor, own: Tensor, temperature: float, soft_cap: float | None) -> Tensor:
    """ln p of each row's token and a factor, (2, rows); the logits become what times it is d ln p / d (x T)."""
    if logits.dtype == torch.float16:
        logp = softmax_part(logits, token, own, temperature, soft_cap, write=True)[0]
        return torch.stack([logp, torch.ones_like(logp)])
    return _launched(_slope_part, 2, logits, token, own, temperature, soft_cap)


def _launched(
    kernel: Any,
    numbers: int,
    logits: Tensor,
    token: Tensor,
    own: Tensor,
    temperature: float,
    soft_cap: float | None,
    **how: bool,
) -> Tensor:
    """A program for every row; what they give out, (numbers, rows) in fp32."""
    rows, vocabulary = logits.shape
    out = torch.empty(numbers, rows, device=logits.device, dtype=torch.float32)
    if rows:
        with torch.cuda.device_of(logits):
            kernel[(rows,)](
                logits,
                token,
                own,
                out,
                logits.stride(0),
                rows,
                vocabulary,
                1.0 / temperature,
                soft_cap or 1.0,
                HAS_CAP=bool(soft_cap),
                BLOCK=BLOCK,
                num_warps=WARPS,
                **how,
            )
    return out
