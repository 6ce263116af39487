"""Drawing a token as one Triton kernel: bounds of top-k and top-p, inversion, log-probability, the row's next state.

A program owns a row. It reads the row once for the mass of each block of logits, and once more the block in which the
number drawn falls. Bounds are found bit by bit on the ordered bits of the logits, which needs no sorting.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimtab.rollout.paged import decode_state as at
from trimtab.rollout.paged.decode_state import State
from trimtab.splitmix64 import GOLDEN

BLOCK = 4096  # logits read at one time

_GOLDEN = tl.constexpr(GOLDEN)
_TOKEN, _POSITION, _MADE = tl.constexpr(at.TOKEN), tl.constexpr(at.POSITION), tl.constexpr(at.MADE)
_LIMIT, _KEY = tl.constexpr(at.LIMIT), tl.constexpr(at.KEY)
_HOME, _LIVE = tl.constexpr(at.HOME), tl.constexpr(at.LIVE)


def draw(logits: Tensor, state: State, greedy: bool) -> None:
    """A token for every live row: written to its home, and into its row as the next to be read."""
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    _draw[(rows,)](
        logits,
        state.numbers,
        state.tokens,
        state.logps,
        state.ends,
        state.sampling,
        vocabulary,
        logits.stride(0),
        state.rows,
        state.tokens.stride(0),
        len(state.ends),
        GREEDY=greedy,
        BITS=16 if logits.dtype == torch.bfloat16 else 32,
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(blocks),
        ENDS=triton.next_power_of_2(max(1, len(state.ends))),
        num_warps=8,
    )


@triton.jit
def _mixed(state):
    """The finaliser of splitmix64: see `trimtab.splitmix64`."""
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return state ^ ((state >> 31) & 0x1FFFFFFFF)


@triton.jit
def _ordered(x):
    """Numbers of 0 to 2^32 - 1 in the order of the floats; adding 0 makes -0 the 0 that it equals."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _mass(row, vocabulary, inverse, top, least, COUNT: tl.constexpr, also, BLOCK: tl.constexpr):
    """How many logits, or how much of exp(x - top), is at or above both bounds."""
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocabulary, BLOCK):
        inside = first + column < vocabulary
        z = tl.load(row + first + column, mask=inside, other=-float("inf")).to(tl.float32)
        order = _ordered(z)
        kept = inside & (order >= least) & (order >= also)
        if COUNT:
            total += tl.where(kept, 1.0, 0.0)
        else:
            total += tl.where(kept, tl.exp(z * inverse - top), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _bound(row, vocabulary, inverse, top, goal, COUNT: tl.constexpr, also, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The highest bound at or above which there is still `goal`, built bit by bit from the highest."""
    bound = also * 0
    bit = bound + 2147483648
    for _ in range(BITS):
        if _mass(row, vocabulary, inverse, top, bound + bit, COUNT, also, BLOCK) >= goal:
            bound += bit
        bit = bit // 2
    return bound


@triton.jit
def _draw(
    logits,
    numbers,
    tokens,
    logps,
    ends,
    sampling,
    vocabulary,
    stride,
    state_rows,
    home_stride,
    end_count,
    GREEDY: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    ENDS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    if tl.load(numbers + _LIVE * state_rows + index) == 0:
        return
    row = logits + index * stride
    made = tl.load(numbers + _MADE * state_rows + index)
    column = tl.arange(0, BLOCK)
    inverse = 1.0
    least = made * 0
    if not GREEDY:
        inverse = 1.0 / tl.load(sampling)
        top_p = tl.load(sampling + 1)
        top_k = tl.load(sampling + 2)
        if (top_p < 1) | ((top_k > 0) & (top_k < vocabulary)):
            highest = tl.full([BLOCK], -3e38, tl.float32)
            for first in range(0, vocabulary, BLOCK):
                inside = first + column < vocabulary
                z = tl.load(row + first + column, mask=inside, other=-float("inf")).to(tl.float32)
                highest = tl.maximum(highest, z * inverse)
            top = tl.max(highest, 0)
            if (top_k > 0) & (top_k < vocabulary):
                least = _bound(row, vocabulary, inverse, top, top_k, True, least, BITS, BLOCK)
            if top_p < 1:
                whole = _mass(row, vocabulary, inverse, top, least, False, least, BLOCK)
                narrower = _bound(row, vocabulary, inverse, top, top_p * whole, False, least, BITS, BLOCK)
                least = tl.maximum(least, narrower)

    block = tl.arange(0, BLOCKS)
    tops = tl.full([BLOCKS], -3e38, tl.float32)
    sums = tl.zeros([BLOCKS], tl.float32)
    for number in range(0, tl.cdiv(vocabulary, BLOCK)):
        inside = number * BLOCK + column < vocabulary
        z = tl.load(row + number * BLOCK + column, mask=inside, other=-float("inf")).to(tl.float32)
        x = tl.where(inside & (_ordered(z) >= least), z * inverse, -float("inf"))
        here = tl.maximum(tl.max(x, 0), -3e38)
        tops = tl.where(block == number, here, tops)
        sums = tl.where(block == number, tl.sum(tl.exp(x - here), 0), sums)
    top = tl.max(tops, 0)
    mass = sums * tl.exp(tops - top)
    total = tl.sum(mass, 0)
    if GREEDY:
        chosen = tl.min(tl.where(tops == top, block, BLOCKS), 0)
    else:
        hashed = _mixed(tl.load(numbers + _KEY * state_rows + index) + (made + 1) * _GOLDEN)
        u = ((hashed >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16
        goal = (u * total).to(tl.float32)
        reached = tl.cumsum(mass, 0)
        last = tl.max(tl.where(mass > 0, block, 0), 0)
        chosen = tl.minimum(tl.sum((reached <= goal).to(tl.int32), 0), last)
        goal -= tl.sum(tl.where(block < chosen, mass, 0.0), 0)
    place = chosen * BLOCK + column
    z = tl.load(row + place, mask=place < vocabulary, other=-float("inf")).to(tl.float32)
    x = tl.where((place < vocabulary) & (_ordered(z) >= least), z * inverse, -float("inf"))
    if GREEDY:
        token = tl.min(tl.where(x == top, place, vocabulary), 0)
    else:
        e = tl.exp(x - top)
        last = tl.max(tl.where(e > 0, column, 0), 0)
        token = chosen * BLOCK + tl.minimum(tl.sum((tl.cumsum(e, 0) <= goal).to(tl.int32), 0), last)
    token = tl.minimum(token, vocabulary - 1)
    logp = tl.load(row + token).to(tl.float32) * inverse - top - tl.log(total)

    home = tl.load(numbers + _HOME * state_rows + index) * home_stride + made
    tl.store(tokens + home, token.to(tl.int32))
    tl.store(logps + home, logp)
    one = tl.arange(0, ENDS)
    end = tl.load(ends + one, mask=one < end_count, other=-1)
    ended = tl.sum((end == token.to(tl.int64)).to(tl.int32), 0) > 0
    limit = tl.load(numbers + _LIMIT * state_rows + index)
    tl.store(numbers + _TOKEN * state_rows + index, token.to(tl.int64))
    tl.store(numbers + _POSITION * state_rows + index, tl.load(numbers + _POSITION * state_rows + index) + 1)
    tl.store(numbers + _MADE * state_rows + index, made + 1)
    tl.store(numbers + _LIVE * state_rows + index, tl.where(ended | (made + 1 >= limit), 0, 1).to(tl.int64))
