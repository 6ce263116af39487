"""The layers of a decoding step as Triton kernels: norms, the gated product, attention over pages.

Attention reads no page for a row that does not live.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimtab.rollout.paged import decode_state as at
from trimtab.rollout.paged.decode_state import State

GROUP = 4  # query heads of one kv head are padded to so many at least
NORM_WARPS = 8
CROWD = 512  # programs that a GPU has room for at once only where each is small
BUSY = 512  # programs that keep a GPU busy

_PAGE = tl.constexpr(at.PAGE)
_POSITION, _LIVE = tl.constexpr(at.POSITION), tl.constexpr(at.LIVE)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    """x += delta, and out = RMSNorm(x) weight."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        x,
        x if delta is None else delta,
        weight,
        out,
        width,
        eps,
        ADD=delta is not None,
        BLOCK=block,
        num_warps=NORM_WARPS,
    )


@triton.jit
def _add_norm(x, delta, weight, out, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + row + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + row + column, value, mask=inside)
    size = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    normed = value * size * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + row + column, normed.to(out.dtype.element_ty), mask=inside)


def gated(gate_up: Tensor, out: Tensor) -> None:
    """silu(gate) x up."""
    rows, width = out.shape
    _gated[(rows, triton.cdiv(width, 1024))](gate_up, out, width, BLOCK=1024, num_warps=4)


@triton.jit
def _gated(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, (silu * up).to(out.dtype.element_ty), mask=inside)


def place(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    turns: tuple[Tensor, Tensor],
    cache: Tensor,
    position: Tensor,
    page: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a prefix, turned to their positions; keys and values go into their pages too.

    A token whose page is -1 goes nowhere.
    """
    rows, kv, d = len(qkv), cache.shape[2], cache.shape[4]
    heads = qkv.shape[1] // d - 2 * kv
    q, k = qkv.new_empty(rows, heads, d), qkv.new_empty(rows, kv, d)
    q_norm, k_norm = norms if norms is not None else (qkv, qkv)
    _place[(rows,)](
        qkv,
        q_norm,
        k_norm,
        turns[0],
        turns[1],
        position,
        page,
        cache[0],
        cache[1],
        q,
        k,
        eps,
        KV=kv,
        HEADS=heads,
        D=d,
        MOST=triton.next_power_of_2(heads),
        FEW=triton.next_power_of_2(kv),
        NORM=norms is not None,
        num_warps=4,
    )
    return q, k, qkv.view(rows, -1, d)[:, heads + kv :]


@triton.jit
def _place(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    positions,
    pages,
    keys,
    values,
    q_out,
    k_out,
    eps,
    KV: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    MOST: tl.constexpr,
    FEW: tl.constexpr,
    NORM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position, page = tl.load(positions + row), tl.load(pages + row)
    start = qkv + row * (HEADS + 2 * KV) * D
    half: tl.constexpr = D // 2
    kind = qkv.dtype.element_ty
    h = tl.arange(0, half)[None, :]
    head = tl.arange(0, MOST)
    q1, q2 = _halves(start, head * D, q_norm, cos, sin, position, head < HEADS, D, eps, NORM)
    at = q_out + row * HEADS * D + head[:, None] * D + h
    tl.store(at, q1.to(kind), mask=head[:, None] < HEADS)
    tl.store(at + half, q2.to(kind), mask=head[:, None] < HEADS)
    few = tl.arange(0, FEW)
    real = few[:, None] < KV
    k1, k2 = _halves(start + HEADS * D, few * D, k_norm, cos, sin, position, few < KV, D, eps, NORM)
    at = k_out + row * KV * D + few[:, None] * D + h
    tl.store(at, k1.to(kind), mask=real)
    tl.store(at + half, k2.to(kind), mask=real)
    slot = ((page * KV + few[:, None]) * _PAGE + position % _PAGE) * D
    placed = real & (page >= 0)
    tl.store(keys + slot + h, k1.to(kind), mask=placed)
    tl.store(keys + slot + half + h, k2.to(kind), mask=placed)
    d = tl.arange(0, D)[None, :]
    v = tl.load(start + (HEADS + KV + few[:, None]) * D + d, mask=real, other=0.0)
    tl.store(values + slot + d, v, mask=placed)


def copy_pages(cache: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy whole pages in all layers."""
    pages, size = cache.shape[2], cache[0, 0, 0].numel()
    _copy_pages[(len(source), cache.shape[0] * 2)](cache, source, target, pages, size, BLOCK=2048, num_warps=4)


@triton.jit
def _copy_pages(cache, source, target, pages, size, BLOCK: tl.constexpr):
    start = cache + tl.program_id(1).to(tl.int64) * pages * size
    before = start + tl.load(source + tl.program_id(0)) * size
    after = start + tl.load(target + tl.program_id(0)) * size
    for first in range(0, size, BLOCK):
        column = first + tl.arange(0, BLOCK)
        tl.store(after + column, tl.load(before + column, mask=column < size), mask=column < size)


def attend(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    turns: tuple[Tensor, Tensor],
    cache: Tensor,
    state: State,
    out: Tensor,
) -> None:
    """Attention of every live row's token over its pages; its own key and value are written there first."""
    rows, kv, d = len(qkv), cache.shape[2], cache.shape[4]
    heads = qkv.shape[1] // d - 2 * kv
    splits = _splits(rows * kv, state.pages.shape[1])
    partial = out if splits == 1 else torch.empty(rows, heads, splits, d, device=out.device)
    weight = out if splits == 1 else torch.empty(rows, heads, splits, 2, device=out.device)
    q_norm, k_norm = norms if norms is not None else (qkv, qkv)
    crowded = d <= 64 and rows * kv >= CROWD
    _attend[(rows, kv, splits)](
        qkv,
        q_norm,
        k_norm,
        turns[0],
        turns[1],
        cache[0],
        cache[1],
        state.pages,
        state.numbers,
        out,
        partial,
        weight,
        d**-0.5,
        eps,
        state.pages.stride(0),
        state.rows,
        KV=kv,
        HEADS=heads,
        D=d,
        GROUP=max(GROUP, triton.next_power_of_2(heads // kv)),
        NORM=norms is not None,
        SPLITS=splits,
        TILE=at.PAGE // 2 if crowded else at.PAGE,
        EXACT=qkv.dtype == torch.float32,
        num_warps=2 if crowded else 4,
        num_stages=2,
    )
    if splits > 1:
        _combine[(rows, heads)](
            partial, weight, state.numbers, out, state.rows, HEADS=heads, D=d, SPLITS=splits, num_warps=1
        )


def _splits(programs: int, pages: int) -> int:
    """Into how many pieces a row's pages are cut, so that a few long rows still fill a GPU."""
    splits = 1
    while programs * splits < BUSY and 2 * splits <= min(pages, 32):
        splits *= 2
    return splits


@triton.jit
def _halves(start, offset, norm, cos, sin, position, inside, D: tl.constexpr, eps, NORM: tl.constexpr):
    """The two halves of heads (rows of `offset`) of one token, normed and turned to its position, in fp32."""
    half: tl.constexpr = D // 2
    d = tl.arange(0, half)[None, :]
    raw = tl.load(start + offset[:, None] + d, mask=inside[:, None], other=0.0)
    x = raw.to(tl.float32)
    y = tl.load(start + offset[:, None] + half + d, mask=inside[:, None], other=0.0).to(tl.float32)
    if NORM:
        size = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + eps)[:, None]
        x = (x * size).to(raw.dtype).to(tl.float32) * tl.load(norm + d)
        y = (y * size).to(raw.dtype).to(tl.float32) * tl.load(norm + half + d)
    c = tl.load(cos + position * D + d)
    s = tl.load(sin + position * D + d)
    return x * c - y * s, y * c + x * s


@triton.jit
def _attend(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    keys,
    values,
    pages,
    numbers,
    out,
    partial,
    weight,
    scale,
    eps,
    page_stride,
    state_rows,
    KV: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    EXACT: tl.constexpr,
):
    row, kv, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    live = tl.load(numbers + _LIVE * state_rows + row) != 0
    position = tl.where(live, tl.load(numbers + _POSITION * state_rows + row), 0)
    per: tl.constexpr = HEADS // KV
    half: tl.constexpr = D // 2
    kind = qkv.dtype.element_ty
    member = tl.arange(0, GROUP)
    d = tl.arange(0, D)
    h = tl.arange(0, half)
    start = qkv + row * (HEADS + 2 * KV) * D
    head = kv * per + member
    q1, q2 = _halves(start, head * D, q_norm, cos, sin, position, member < per, D, eps, NORM)
    q1 = q1.to(kind)
    q2 = q2.to(kind)
    lowest = -3e38
    top = tl.full([GROUP], lowest, tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    answer = tl.zeros([GROUP, D], tl.float32)
    if split == 0:  # the token itself: its key and value never have to be read back
        one = tl.arange(0, 1)
        k1, k2 = _halves(start, (HEADS + kv) * D + one, k_norm, cos, sin, position, one == 0, D, eps, NORM)
        k1 = k1.to(kind)
        k2 = k2.to(kind)
        v = tl.load(start + (HEADS + KV + kv) * D + d)
        page = tl.load(pages + row * page_stride + position // _PAGE).to(tl.int64)
        place = ((page * KV + kv) * _PAGE + position % _PAGE) * D
        tl.store(keys + place + h[None, :], k1, mask=live)
        tl.store(keys + place + half + h[None, :], k2, mask=live)
        tl.store(values + place + d, v, mask=live)
        near = q1.to(tl.float32) * k1.to(tl.float32) + q2.to(tl.float32) * k2.to(tl.float32)
        top = tl.sum(near, 1) * scale
        total += 1.0
        answer += v.to(tl.float32)[None, :]
    tiles = (position + TILE - 1) // TILE
    each = (tiles + SPLITS - 1) // SPLITS
    inner = tl.arange(0, TILE)
    for tile in tl.range(split * each, tl.minimum(tiles, (split + 1) * each)):
        number = tile * TILE // _PAGE
        page = tl.load(pages + row * page_stride + number).to(tl.int64)
        place = ((page * KV + kv) * _PAGE + tile * TILE - number * _PAGE + inner)[:, None] * D
        before = tile * TILE + inner < position
        k1 = tl.load(keys + place + h[None, :], mask=before[:, None], other=0.0)  # a page's rest may hold anything
        k2 = tl.load(keys + place + half + h[None, :], mask=before[:, None], other=0.0)
        v = tl.load(values + place + d[None, :], mask=before[:, None], other=0.0)
        if EXACT:
            scores = tl.dot(q1, tl.trans(k1), input_precision="ieee")
            scores = tl.dot(q2, tl.trans(k2), scores, input_precision="ieee") * scale
        else:
            scores = tl.dot(q2, tl.trans(k2), tl.dot(q1, tl.trans(k1))) * scale
        scores = tl.where(before[None, :], scores, lowest)
        higher = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp(top - higher)
        p = tl.where(before[None, :], tl.exp(scores - higher[:, None]), 0.0)
        total = total * shrink + tl.sum(p, 1)
        if EXACT:
            answer = answer * shrink[:, None] + tl.dot(p, v, input_precision="ieee")
        else:
            answer = answer * shrink[:, None] + tl.dot(p.to(v.dtype), v)
        top = higher
    real = live & (member < per)
    if SPLITS == 1:
        place = out + row * HEADS * D + head[:, None] * D + d[None, :]
        tl.store(place, (answer / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])
    else:
        place = (row * HEADS + head) * SPLITS + split
        tl.store(partial + place[:, None] * D + d[None, :], answer, mask=real[:, None])
        tl.store(weight + place * 2, top, mask=real)
        tl.store(weight + place * 2 + 1, total, mask=real)


@triton.jit
def _combine(partial, weight, numbers, out, state_rows, HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(numbers + _LIVE * state_rows + row) == 0:
        return
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, D)
    place = (row * HEADS + head) * SPLITS + split
    top = tl.load(weight + place * 2)
    share = tl.exp(top - tl.max(top, 0))
    total = tl.sum(tl.load(weight + place * 2 + 1) * share, 0)
    answer = tl.sum(tl.load(partial + place[:, None] * D + d[None, :]) * share[:, None], 0)
    tl.store(out + (row * HEADS + head) * D + d, (answer / total).to(out.dtype.element_ty))
