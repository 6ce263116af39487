"""RoPE forward and backward, with optional per-head RMSNorm before it (Qwen3's QK-norm).

A program rotates a block of heads of queries or keys, whichever tokens they belong to. Arithmetic is fp32; values are
rounded where transformers rounds them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1024  # of the backward kernel with norms, each of which sums d_norms over its blocks
PAIRS = 1024  # rotated by one program at a time


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor, *, norms: Sequence[Tensor], eps: float
) -> None:
    """Write rotated queries and keys.

    `q` and `q_out` are (tokens, heads, head_dim), `k` and `k_out` (tokens, kv_heads, head_dim) in one float dtype;
    `cos` and `sin` (tokens, head_dim) or (1, tokens, head_dim) in fp32; all contiguous. `norms` is empty, or the
    weights of the queries' and the keys' RMSNorm, (head_dim) fp32 each.
    """
    tokens, constants = len(q), _constants(q, k, norms)
    programs = sum(triton.cdiv(tokens * constants[heads], constants["ROWS"]) for heads in ("HEADS", "KV_HEADS"))
    q_norm, k_norm = norms or (cos, cos)  # not read without norms, but Triton needs a pointer
    _rope[(programs,)](q, k, q_norm, k_norm, cos, sin, q_out, k_out, tokens, eps, **constants)


def _constants(q: Tensor, k: Tensor, norms: Sequence[Tensor]) -> dict[str, int]:
    """Return the compile-time constants that both directions share."""
    (_, heads, d), kv_heads = q.shape, k.shape[1]
    half = triton.next_power_of_2(d // 2)
    rows = max(PAIRS // half, 1)
    return {"HEADS": heads, "KV_HEADS": kv_heads, "D": d, "HALF": half, "ROWS": rows, "NORM": bool(norms)}


# `tokens` changes with every batch: specialised on its divisibility the kernels would be compiled several times.
@triton.jit(do_not_specialize=["tokens"])
def _rope(
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
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
):
    """Rotate the blocks of queries with the first programs, those of keys with the rest."""
    block, q_blocks = tl.program_id(0), tl.cdiv(tokens * HEADS, ROWS)
    if block < q_blocks:
        _rotate_block(q, q_norm, cos, sin, q_out, tokens, block, eps, HEADS, D, HALF, ROWS, NORM)
    else:
        _rotate_block(k, k_norm, cos, sin, k_out, tokens, block - q_blocks, eps, KV_HEADS, D, HALF, ROWS, NORM)


@triton.jit
def _rotate_block(
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
    at, angle_at, d, inside = _block_offsets(tokens, block, HEADS, D, HALF, ROWS)
    a, b, _, _, _ = _load_halves(x, norm, at, d, inside, eps, D, NORM)
    c, s = _load_angles(cos, sin, angle_at, inside)
    dtype = out.dtype.element_ty
    tl.store(out + at, (a * c - b * s).to(dtype), mask=inside)
    tl.store(out + at + D // 2, (b * c + a * s).to(dtype), mask=inside)


@triton.jit
def _block_offsets(tokens, block, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr):
    """Return, all (ROWS, HALF), offsets of the heads' first halves and of their tokens' angles; column; mask."""
    row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, HALF)[None, :]
    inside = (row < tokens * HEADS) & (d < D // 2)
    return row * D + d, (row // HEADS) * D + d, d, inside


@triton.jit
def _load_angles(cos, sin, angle_at, inside):
    return tl.load(cos + angle_at, mask=inside, other=0.0), tl.load(sin + angle_at, mask=inside, other=0.0)


@triton.jit
def _load_halves(x, norm, at, d, inside, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Return both halves of heads after norm and weight (a, b), after norm without weight (p, q), and 1 / rms."""
    raw = tl.load(x + at, mask=inside, other=0.0)
    a, b = raw.to(tl.float32), tl.load(x + at + D // 2, mask=inside, other=0.0).to(tl.float32)
    p, q = a, b
    inverse_rms = a  # any tensor: a variable that is returned must exist in both branches of a constexpr `if`
    if NORM:
        inverse_rms = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        # transformers rounds here, before it multiplies by the weight.
        p, q = (a * inverse_rms).to(raw.dtype).to(tl.float32), (b * inverse_rms).to(raw.dtype).to(tl.float32)
        a = p * tl.load(norm + d, mask=d < D // 2, other=0.0)
        b = q * tl.load(norm + D // 2 + d, mask=d < D // 2, other=0.0)
    return a, b, p, q, inverse_rms


def rope_backward(
    d_q_out: Tensor,
    d_k_out: Tensor,
    cos: Tensor,
    sin: Tensor,
    d_q: Tensor,
    d_k: Tensor,
    *,
    q: Tensor,
    k: Tensor,
    norms: Sequence[Tensor],
    eps: float,
    d_norms: Tensor | None,
) -> None:
    """Write the gradients by queries, keys and, unless None, the norms' weights, (2, head_dim) fp32.

    Shapes and dtypes are those of the forward pass. Without norms `q` and `k` are not read.
    """
    tokens, constants = len(d_q), _constants(d_q, d_k, norms) | {"HAS_D_NORMS": d_norms is not None}
    programs = triton.cdiv(tokens * constants["HEADS"], constants["ROWS"])
    programs = programs if d_norms is None else min(programs, PROGRAMS)
    # One row of sums per program, added up afterwards: atomic adds would make the result depend on their order.
    partial = cos if d_norms is None else torch.empty(programs, 2, constants["D"], device=d_q.device)
    q_norm, k_norm = norms or (cos, cos)
    _rope_backward[(programs,)](
        d_q_out, d_k_out, q, k, q_norm, k_norm, cos, sin, d_q, d_k, partial, tokens, eps, **constants
    )
    if d_norms is not None:
        torch.sum(partial, 0, out=d_norms)


@triton.jit(do_not_specialize=["tokens"])
def _rope_backward(
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
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    HAS_D_NORMS: tl.constexpr,
):
    _rotate_back(d_q_out, q, q_norm, cos, sin, d_q, partial, 0, tokens, eps, HEADS, D, HALF, ROWS, NORM, HAS_D_NORMS)
    _rotate_back(d_k_out, k, k_norm, cos, sin, d_k, partial, D, tokens, eps, KV_HEADS, D, HALF, ROWS, NORM, HAS_D_NORMS)


@triton.jit
def _rotate_back(
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
    HAS_D_NORMS: tl.constexpr,
):
    """Rotate back and go through the norm, block by block; store this program's sums for d_norms in its row."""
    program = tl.program_id(0)
    low, high = tl.zeros([ROWS, HALF], tl.float32), tl.zeros([ROWS, HALF], tl.float32)
    dtype = d_x.dtype.element_ty
    for block in range(program, tl.cdiv(tokens * HEADS, ROWS), tl.num_programs(0)):
        at, angle_at, d, inside = _block_offsets(tokens, block, HEADS, D, HALF, ROWS)
        u = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(d_out + at + D // 2, mask=inside, other=0.0).to(tl.float32)
        c, s = _load_angles(cos, sin, angle_at, inside)
        a, b = u * c + v * s, v * c - u * s
        if NORM:
            _, _, p, q, inverse_rms = _load_halves(x, norm, at, d, inside, eps, D, NORM)
            if HAS_D_NORMS:
                low += a * p
                high += b * q
            a *= tl.load(norm + d, mask=d < D // 2, other=0.0)
            b *= tl.load(norm + D // 2 + d, mask=d < D // 2, other=0.0)
            along = ((tl.sum(a * p, 1) + tl.sum(b * q, 1)) / D)[:, None]
            a, b = inverse_rms * (a - p * along), inverse_rms * (b - q * along)
        tl.store(d_x + at, a.to(dtype), mask=inside)
        tl.store(d_x + at + D // 2, b.to(dtype), mask=inside)
    if HAS_D_NORMS:
        column = tl.arange(0, HALF)
        sums = partial + program.to(tl.int64) * 2 * D + offset + column
        tl.store(sums, tl.sum(low, 0), mask=column < D // 2)
        tl.store(sums + D // 2, tl.sum(high, 0), mask=column < D // 2)
