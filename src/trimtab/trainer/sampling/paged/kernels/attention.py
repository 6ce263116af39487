"""Triton kernels of the layers over a paged KV cache.

RoPE and KV writes of a prefill, page copies, attention of a decoding step, and between the linear maps of a layer
residual add with RMSNorm, and SwiGLU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimtab.trainer.sampling.paged.buffers import PAGE_SIZE, DecodeState, Scalar
from trimtab.trainer.sampling.paged.torch_ops import Pair

MIN_GROUP = 4  # the query heads of a kv head are padded to so many at least
TARGET_PROGRAMS = 512  # split-KV until there are so many programs, which keep a GPU busy
# From so many programs on, tiles of half a page and two warps: more of the small programs run at once.
SMALL_TILE_PROGRAMS = 512

_PAGE_SIZE = tl.constexpr(PAGE_SIZE)
_POSITION, _ACTIVE = tl.constexpr(Scalar.POSITION.value), tl.constexpr(Scalar.ACTIVE.value)
_LOWEST = tl.constexpr(-3e38)  # below all scores, but finite: -inf - -inf would be NaN


def rope_and_write_kv(
    qkv: Tensor, qk_norm: Pair | None, eps: float, cos_sin: Pair, cache: Tensor, position: Tensor, page: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `torch_ops.rope_and_write_kv` in one kernel."""
    tokens, kv_heads, head_dim = len(qkv), cache.shape[2], cache.shape[4]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q, k = qkv.new_empty(tokens, heads, head_dim), qkv.new_empty(tokens, kv_heads, head_dim)
    q_norm, k_norm = qk_norm if qk_norm is not None else (qkv, qkv)
    tensors = (qkv, q_norm, k_norm, *cos_sin, position, page, cache[0], cache[1], q, k)
    sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim}
    blocks = {f"{name}_BLOCK": triton.next_power_of_2(sizes[name]) for name in ("HEADS", "KV_HEADS")}
    _rope_and_write_kv_kernel[(tokens,)](*tensors, eps, **sizes, **blocks, QK_NORM=qk_norm is not None, num_warps=4)
    return q, k, qkv.view(tokens, -1, head_dim)[:, heads + kv_heads :]


@triton.jit
def _rope_and_write_kv_kernel(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    positions,
    pages,
    k_cache,
    v_cache,
    q_out,
    k_out,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    KV_HEADS_BLOCK: tl.constexpr,
    QK_NORM: tl.constexpr,
):
    """One program per token, for all of its heads."""
    token = tl.program_id(0).to(tl.int64)
    position, page = tl.load(positions + token), tl.load(pages + token)
    start = qkv + token * (HEADS + 2 * KV_HEADS) * HEAD_DIM
    half: tl.constexpr = HEAD_DIM // 2
    dtype = qkv.dtype.element_ty
    h = tl.arange(0, half)[None, :]
    head = tl.arange(0, HEADS_BLOCK)
    q1, q2 = _rope_halves(start, head * HEAD_DIM, q_norm, cos, sin, position, head < HEADS, HEAD_DIM, eps, QK_NORM)
    target = q_out + token * HEADS * HEAD_DIM + head[:, None] * HEAD_DIM + h
    tl.store(target, q1.to(dtype), mask=head[:, None] < HEADS)
    tl.store(target + half, q2.to(dtype), mask=head[:, None] < HEADS)
    kv_head = tl.arange(0, KV_HEADS_BLOCK)
    inside = kv_head[:, None] < KV_HEADS
    keys, offset = start + HEADS * HEAD_DIM, kv_head * HEAD_DIM
    k1, k2 = _rope_halves(keys, offset, k_norm, cos, sin, position, kv_head < KV_HEADS, HEAD_DIM, eps, QK_NORM)
    target = k_out + token * KV_HEADS * HEAD_DIM + kv_head[:, None] * HEAD_DIM + h
    tl.store(target, k1.to(dtype), mask=inside)
    tl.store(target + half, k2.to(dtype), mask=inside)
    cached = ((page * KV_HEADS + kv_head[:, None]) * _PAGE_SIZE + position % _PAGE_SIZE) * HEAD_DIM
    written = inside & (page >= 0)
    tl.store(k_cache + cached + h, k1.to(dtype), mask=written)
    tl.store(k_cache + cached + half + h, k2.to(dtype), mask=written)
    d = tl.arange(0, HEAD_DIM)[None, :]
    v = tl.load(start + (HEADS + KV_HEADS + kv_head[:, None]) * HEAD_DIM + d, mask=inside, other=0.0)
    tl.store(v_cache + cached + d, v, mask=written)


@triton.jit
def _rope_halves(start, offset, norm, cos, sin, position, inside, HEAD_DIM: tl.constexpr, eps, QK_NORM: tl.constexpr):
    """Return the two halves of a token's heads, (len(offset), HEAD_DIM / 2) fp32, after QK-norm and RoPE."""
    half: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, half)[None, :]
    raw = tl.load(start + offset[:, None] + d, mask=inside[:, None], other=0.0)
    x = raw.to(tl.float32)
    y = tl.load(start + offset[:, None] + half + d, mask=inside[:, None], other=0.0).to(tl.float32)
    if QK_NORM:
        inverse_rms = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / HEAD_DIM + eps)[:, None]
        # Rounded to the compute type before the weight, as transformers' RMSNorm does.
        x = (x * inverse_rms).to(raw.dtype).to(tl.float32) * tl.load(norm + d)
        y = (y * inverse_rms).to(raw.dtype).to(tl.float32) * tl.load(norm + half + d)
    c = tl.load(cos + position * HEAD_DIM + d)
    s = tl.load(sin + position * HEAD_DIM + d)
    return x * c - y * s, y * c + x * s


def copy_pages(kv_cache: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy whole pages in all layers. `kv_cache` is (layers, 2, pages, kv heads, PAGE_SIZE, head_dim)."""
    num_pages, page_numel = kv_cache.shape[2], kv_cache[0, 0, 0].numel()
    grid = (len(source), kv_cache.shape[0] * 2)
    _copy_pages_kernel[grid](kv_cache, source, target, num_pages, page_numel, BLOCK=2048, num_warps=4)


@triton.jit
def _copy_pages_kernel(kv_cache, source, target, num_pages, page_numel, BLOCK: tl.constexpr):
    """One program per copied page and half (keys or values) of a layer."""
    start = kv_cache + tl.program_id(1).to(tl.int64) * num_pages * page_numel
    copied_from = start + tl.load(source + tl.program_id(0)) * page_numel
    copied_to = start + tl.load(target + tl.program_id(0)) * page_numel
    for first in range(0, page_numel, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < page_numel
        tl.store(copied_to + column, tl.load(copied_from + column, mask=inside), mask=inside)


def paged_attention(
    qkv: Tensor, qk_norm: Pair | None, eps: float, cos_sin: Pair, cache: Tensor, state: DecodeState, out: Tensor
) -> None:
    """Compute `torch_ops.paged_attention` in one kernel, or two with split-KV."""
    rows, kv_heads, head_dim = len(qkv), cache.shape[2], cache.shape[4]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    splits = num_splits(rows * kv_heads, state.page_table.shape[1])
    split_acc = split_stats = out  # not used without splits
    if splits > 1:
        split_acc = torch.empty(rows, heads, splits, head_dim, device=out.device)
        split_stats = torch.empty(rows, heads, splits, 2, device=out.device)
    q_norm, k_norm = qk_norm if qk_norm is not None else (qkv, qkv)
    small_tiles = head_dim <= 64 and rows * kv_heads >= SMALL_TILE_PROGRAMS
    inputs = (qkv, q_norm, k_norm, *cos_sin, cache[0], cache[1], state.page_table, state.scalars)
    numbers = (head_dim**-0.5, eps, state.page_table.stride(0), state.rows)
    sizes = {"HEADS": heads, "HEAD_DIM": head_dim, "SPLITS": splits}
    _paged_attention_kernel[(rows, kv_heads, splits)](
        *(*inputs, out, split_acc, split_stats, *numbers),
        **sizes,
        KV_HEADS=kv_heads,
        GROUP=max(MIN_GROUP, triton.next_power_of_2(heads // kv_heads)),
        QK_NORM=qk_norm is not None,
        TILE=PAGE_SIZE // 2 if small_tiles else PAGE_SIZE,
        FP32=qkv.dtype == torch.float32,
        num_warps=2 if small_tiles else 4,
        num_stages=2,
    )
    if splits > 1:
        tensors = (split_acc, split_stats, state.scalars, out)
        _combine_splits_kernel[(rows, heads)](*tensors, state.rows, **sizes, num_warps=1)


def num_splits(programs: int, pages: int) -> int:
    """Return into how many parts each row's pages are split (split-KV), so that a few long rows still fill a GPU."""
    splits = 1
    while programs * splits < TARGET_PROGRAMS and 2 * splits <= min(pages, 32):
        splits *= 2
    return splits


@triton.jit
def _paged_attention_kernel(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    k_cache,
    v_cache,
    page_table,
    scalars,
    out,
    split_acc,
    split_stats,
    scale,
    eps,
    page_table_stride,
    state_rows,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    QK_NORM: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    FP32: tl.constexpr,
):
    """One program per row, kv head and split: flash attention of the kv head's group of query heads."""
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    active = tl.load(scalars + _ACTIVE * state_rows + row) != 0
    # Position 0 has no earlier tokens: an inactive row reads no page.
    position = tl.where(active, tl.load(scalars + _POSITION * state_rows + row), 0)
    group_size: tl.constexpr = HEADS // KV_HEADS
    half: tl.constexpr = HEAD_DIM // 2
    dtype = qkv.dtype.element_ty
    member = tl.arange(0, GROUP)
    d = tl.arange(0, HEAD_DIM)
    h = tl.arange(0, half)
    start = qkv + row * (HEADS + 2 * KV_HEADS) * HEAD_DIM
    head = kv_head * group_size + member
    in_group = member < group_size
    q1, q2 = _rope_halves(start, head * HEAD_DIM, q_norm, cos, sin, position, in_group, HEAD_DIM, eps, QK_NORM)
    q1 = q1.to(dtype)
    q2 = q2.to(dtype)
    running_max = tl.full([GROUP], _LOWEST, tl.float32)
    running_sum = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, HEAD_DIM], tl.float32)
    if split == 0:  # the row's own token, written to the cache but taken from registers
        one = tl.arange(0, 1)
        own_key = (HEADS + kv_head) * HEAD_DIM + one
        k1, k2 = _rope_halves(start, own_key, k_norm, cos, sin, position, one == 0, HEAD_DIM, eps, QK_NORM)
        k1 = k1.to(dtype)
        k2 = k2.to(dtype)
        v = tl.load(start + (HEADS + KV_HEADS + kv_head) * HEAD_DIM + d)
        page = tl.load(page_table + row * page_table_stride + position // _PAGE_SIZE).to(tl.int64)
        cached = ((page * KV_HEADS + kv_head) * _PAGE_SIZE + position % _PAGE_SIZE) * HEAD_DIM
        tl.store(k_cache + cached + h[None, :], k1, mask=active)
        tl.store(k_cache + cached + half + h[None, :], k2, mask=active)
        tl.store(v_cache + cached + d, v, mask=active)
        product = q1.to(tl.float32) * k1.to(tl.float32) + q2.to(tl.float32) * k2.to(tl.float32)
        running_max = tl.sum(product, 1) * scale
        running_sum += 1.0
        acc += v.to(tl.float32)[None, :]
    tiles = (position + TILE - 1) // TILE
    tiles_per_split = (tiles + SPLITS - 1) // SPLITS
    key = tl.arange(0, TILE)
    for tile in tl.range(split * tiles_per_split, tl.minimum(tiles, (split + 1) * tiles_per_split)):
        index = tile * TILE // _PAGE_SIZE
        page = tl.load(page_table + row * page_table_stride + index).to(tl.int64)
        offset = ((page * KV_HEADS + kv_head) * _PAGE_SIZE + tile * TILE - index * _PAGE_SIZE + key)[:, None] * HEAD_DIM
        # Masked loads, not masked scores alone: the rest of a page is uninitialised and may hold NaN.
        visible = tile * TILE + key < position
        k1 = tl.load(k_cache + offset + h[None, :], mask=visible[:, None], other=0.0)
        k2 = tl.load(k_cache + offset + half + h[None, :], mask=visible[:, None], other=0.0)
        v = tl.load(v_cache + offset + d[None, :], mask=visible[:, None], other=0.0)
        scores = _scores(q1, q2, k1, k2, FP32) * scale
        running_max, running_sum, acc = _online_softmax(scores, visible, v, running_max, running_sum, acc, FP32)
    stored = active & in_group
    if SPLITS == 1:
        target = out + row * HEADS * HEAD_DIM + head[:, None] * HEAD_DIM + d[None, :]
        tl.store(target, (acc / running_sum[:, None]).to(out.dtype.element_ty), mask=stored[:, None])
    else:
        part = (row * HEADS + head) * SPLITS + split
        tl.store(split_acc + part[:, None] * HEAD_DIM + d[None, :], acc, mask=stored[:, None])
        tl.store(split_stats + part * 2, running_max, mask=stored)
        tl.store(split_stats + part * 2 + 1, running_sum, mask=stored)


@triton.jit
def _scores(q1, q2, k1, k2, FP32: tl.constexpr):
    """Return q k^T, (GROUP, TILE), from the halves of queries and keys."""
    if FP32:  # the default for fp32 inputs is TF32
        scores = tl.dot(q1, tl.trans(k1), input_precision="ieee")
        scores = tl.dot(q2, tl.trans(k2), scores, input_precision="ieee")
    else:
        scores = tl.dot(q2, tl.trans(k2), tl.dot(q1, tl.trans(k1)))
    return scores


@triton.jit
def _online_softmax(scores, visible, v, running_max, running_sum, acc, FP32: tl.constexpr):
    """Fold a tile of scores (GROUP, TILE) and values (TILE, HEAD_DIM) into the running softmax of flash attention."""
    scores = tl.where(visible[None, :], scores, _LOWEST)
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    rescale = tl.exp(running_max - new_max)
    p = tl.where(visible[None, :], tl.exp(scores - new_max[:, None]), 0.0)
    running_sum = running_sum * rescale + tl.sum(p, 1)
    if FP32:
        acc = acc * rescale[:, None] + tl.dot(p, v, input_precision="ieee")
    else:
        acc = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v)
    return new_max, running_sum, acc


@triton.jit
def _combine_splits_kernel(
    split_acc, split_stats, scalars, out, state_rows, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr
):
    """One program per row and head: merge its splits, weighted by their softmax maxima and sums."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(scalars + _ACTIVE * state_rows + row) == 0:
        return
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, HEAD_DIM)
    part = (row * HEADS + head) * SPLITS + split
    split_max = tl.load(split_stats + part * 2)
    rescale = tl.exp(split_max - tl.max(split_max, 0))
    total = tl.sum(tl.load(split_stats + part * 2 + 1) * rescale, 0)
    acc = tl.sum(tl.load(split_acc + part[:, None] * HEAD_DIM + d[None, :]) * rescale[:, None], 0)
    tl.store(out + (row * HEADS + head) * HEAD_DIM + d, (acc / total).to(out.dtype.element_ty))


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
