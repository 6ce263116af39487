"""Queries and keys turned to their places, and back: rotary positions, after the norm of heads where a model has one.

A program turns a block of heads, whatever tokens they belong to. Values are rounded where transformers rounds them;
the gradient of a norm's weight is summed by each program over the blocks it meets, and then over programs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1024  # of a kernel that sums over blocks: enough to keep a GPU busy
PAIRS = 1024  # of numbers that one program turns at a time


def turn(
    q: Tensor,
    k: Tensor,
    norms: Sequence[Tensor],
    eps: float,
    cos: Tensor,
    sin: Tensor,
    q_out: Tensor,
    k_out: Tensor,
) -> None:
    """Queries and keys, (tokens, heads, D), normed by head where two weights are given, and turned to their places."""
    (tokens, heads, d), kv = q.shape, k.shape[1]
    half = triton.next_power_of_2(d // 2)
    rows = max(PAIRS // half, 1)
    q_norm, k_norm = norms if norms else (cos, cos)
    _turn[(triton.cdiv(tokens * heads, rows) + triton.cdiv(tokens * kv, rows),)](
        q,
        k,
        q_norm,
        k_norm,
        cos,
        sin,
        q_out,
        k_out,
        tokens,
        eps,
        HEADS=heads,
        KV=kv,
        D=d,
        HALF=half,
        ROWS=rows,
        NORM=bool(norms),
    )


@triton.jit(do_not_specialize=["tokens"])
def _turn(
    q,
    k,
    q_norm,
    k_norm,
    cos,
    sin,
    q_out,
    k_out,
    tokens,
    eps,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
):
    block, blocks = tl.program_id(0), tl.cdiv(tokens * HEADS, ROWS)
    if block < blocks:
        _turn_block(q, q_norm, cos, sin, q_out, tokens, block, eps, HEADS, D, HALF, ROWS, NORM)
    else:
        _turn_block(k, k_norm, cos, sin, k_out, tokens, block - blocks, eps, KV, D, HALF, ROWS, NORM)


@triton.jit
def _turn_block(
    x,
    norm,
    cos,
    sin,
    out,
    tokens,
    block,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
):
    at, place, d, inside = _places(tokens, block, HEADS, D, HALF, ROWS)
    a, b, _, _, _ = _halves(x, norm, at, d, inside, eps, D, NORM)
    c, s = _angles(cos, sin, place, inside)
    kind = out.dtype.element_ty
    tl.store(out + at, (a * c - b * s).to(kind), mask=inside)
    tl.store(out + at + D // 2, (b * c + a * s).to(kind), mask=inside)


@triton.jit
def _places(tokens, block, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr):
    """Where a block's first halves of heads are, where their tokens' angles are, and which there are."""
    row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, HALF)[None, :]
    inside = (row < tokens * HEADS) & (d < D // 2)
    return row * D + d, (row // HEADS) * D + d, d, inside


@triton.jit
def _angles(cos, sin, place, inside):
    return tl.load(cos + place, mask=inside, other=0.0), tl.load(sin + place, mask=inside, other=0.0)


@triton.jit
def _halves(x, norm, at, d, inside, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Both halves of heads, weighted after their norm; without the weight; and 1 / rms."""
    raw = tl.load(x + at, mask=inside, other=0.0)
    a, b = raw.to(tl.float32), tl.load(x + at + D // 2, mask=inside, other=0.0).to(tl.float32)
    p, q = a, b
    size = a
    if NORM:
        size = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        p, q = (a * size).to(raw.dtype).to(tl.float32), (b * size).to(raw.dtype).to(tl.float32)
        a = p * tl.load(norm + d, mask=d < D // 2, other=0.0)
        b = q * tl.load(norm + D // 2 + d, mask=d < D // 2, other=0.0)
    return a, b, p, q, size


def turn_back(
    d_q_out: Tensor,
    d_k_out: Tensor,
    q: Tensor,
    k: Tensor,
    norms: Sequence[Tensor],
    eps: float,
    cos: Tensor,
    sin: Tensor,
    d_q: Tensor,
    d_k: Tensor,
    d_norms: Tensor | None,
) -> None:
    """The gradients of queries, keys and, (2, D), the norms' weights; without norms `q` and `k` are not read."""
    (tokens, heads, d), kv = d_q.shape, d_k.shape[1]
    half = triton.next_power_of_2(d // 2)
    rows = max(PAIRS // half, 1)
    programs = triton.cdiv(tokens * heads, rows)
    programs = programs if d_norms is None else min(programs, PROGRAMS)
    partial = cos if d_norms is None else torch.empty(programs, 2, d, device=d_q.device)
    q_norm, k_norm = norms if norms else (cos, cos)
    _turn_back[(programs,)](
        d_q_out,
        d_k_out,
        q,
        k,
        q_norm,
        k_norm,
        cos,
        sin,
        d_q,
        d_k,
        partial,
        tokens,
        eps,
        HEADS=heads,
        KV=kv,
        D=d,
        HALF=half,
        ROWS=rows,
        NORM=bool(norms),
        WEIGHT=d_norms is not None,
    )
    if d_norms is not None:
        torch.sum(partial, 0, out=d_norms)


@triton.jit(do_not_specialize=["tokens"])
def _turn_back(
    d_q_out,
    d_k_out,
    q,
    k,
    q_norm,
    k_norm,
    cos,
    sin,
    d_q,
    d_k,
    partial,
    tokens,
    eps,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    _turn_blocks_back(d_q_out, q, q_norm, cos, sin, d_q, partial, 0, tokens, eps, HEADS, D, HALF, ROWS, NORM, WEIGHT)
    _turn_blocks_back(d_k_out, k, k_norm, cos, sin, d_k, partial, D, tokens, eps, KV, D, HALF, ROWS, NORM, WEIGHT)


@triton.jit
def _turn_blocks_back(
    d_out,
    x,
    norm,
    cos,
    sin,
    d_x,
    partial,
    offset,
    tokens,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    """Turned back, and through the norm, block by block; the sums for its weight go to the program's own place."""
    first = tl.program_id(0)
    low, high = tl.zeros([ROWS, HALF], tl.float32), tl.zeros([ROWS, HALF], tl.float32)
    kind = d_x.dtype.element_ty
    for block in range(first, tl.cdiv(tokens * HEADS, ROWS), tl.num_programs(0)):
        at, place, d, inside = _places(tokens, block, HEADS, D, HALF, ROWS)
        u = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(d_out + at + D // 2, mask=inside, other=0.0).to(tl.float32)
        c, s = _angles(cos, sin, place, inside)
        a, b = u * c + v * s, v * c - u * s
        if NORM:
            _, _, p, q, size = _halves(x, norm, at, d, inside, eps, D, NORM)
            if WEIGHT:
                low += a * p
                high += b * q
            a *= tl.load(norm + d, mask=d < D // 2, other=0.0)
            b *= tl.load(norm + D // 2 + d, mask=d < D // 2, other=0.0)
            along = ((tl.sum(a * p, 1) + tl.sum(b * q, 1)) / D)[:, None]
            a, b = size * (a - p * along), size * (b - q * along)
        tl.store(d_x + at, a.to(kind), mask=inside)
        tl.store(d_x + at + D // 2, b.to(kind), mask=inside)
    if WEIGHT:
        column = tl.arange(0, HALF)
        mine = partial + first.to(tl.int64) * 2 * D + offset + column
        tl.store(mine, tl.sum(low, 0), mask=column < D // 2)
        tl.store(mine + D // 2, tl.sum(high, 0), mask=column < D // 2)
