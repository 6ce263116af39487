"""Triton kernels that sample tokens and advance the decode state: top-k, top-p, inversion, log-probability.

The first kernel reads the logits once for the mass of each block: one program per block, so that a few rows fill a GPU
too. The second has one program per row and reads only the block in which the sampled token lies. With top-k or top-p it
does all by itself: their thresholds are found by bisection over the bits of the logits, without sorting.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimtab.objectives import splitmix64
from trimtab.trainer.sampling.paged.buffers import DecodeState, Scalar

BLOCK = 4096  # logits per block

_GOLDEN = tl.constexpr(splitmix64.GOLDEN)
_LOWEST = tl.constexpr(-3e38)  # below all logits, but finite: -inf - -inf would be NaN
_LAST_TOKEN, _POSITION = tl.constexpr(Scalar.LAST_TOKEN.value), tl.constexpr(Scalar.POSITION.value)
_NUM_GENERATED, _MAX_NEW_TOKENS = tl.constexpr(Scalar.NUM_GENERATED.value), tl.constexpr(Scalar.MAX_NEW_TOKENS.value)
_RNG_KEY, _SLOT = tl.constexpr(Scalar.RNG_KEY.value), tl.constexpr(Scalar.SLOT.value)
_ACTIVE = tl.constexpr(Scalar.ACTIVE.value)


def sample_tokens(logits: Tensor, state: DecodeState, greedy: bool) -> None:
    """Compute `torch_ops.sample_tokens` in two kernels."""
    rows, vocab_size = logits.shape
    blocks = triton.cdiv(vocab_size, BLOCK)
    block_stats = torch.empty(rows, 2, blocks, device=logits.device)
    sizes = (vocab_size, logits.stride(0), state.rows)
    inputs = (logits, state.scalars, state.sampling_params, block_stats)
    _block_softmax_kernel[(rows, blocks)](*inputs, *sizes, blocks, BLOCK=BLOCK, num_warps=8)
    outputs = (state.tokens, state.logps, state.eos_token_ids)
    _sample_tokens_kernel[(rows,)](
        *(*inputs, *outputs, *sizes, state.tokens.stride(0), len(state.eos_token_ids)),
        GREEDY=greedy,
        BLOCK=BLOCK,
        # As fp32, a bf16 logit has zeros in its lower 16 bits: no threshold needs them.
        BITS=16 if logits.dtype == torch.bfloat16 else 32,
        NUM_BLOCKS=triton.next_power_of_2(blocks),
        EOS_BLOCK=triton.next_power_of_2(max(1, len(state.eos_token_ids))),
        num_warps=8,
    )


@triton.jit
def _splitmix64(state):
    """The finaliser of splitmix64, as `objectives.splitmix64.mix`; masks make its arithmetic shifts logical."""
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return state ^ ((state >> 31) & 0x1FFFFFFFF)


@triton.jit
def _sortable_bits(x):
    """Map fp32 to integers from 0 to 2^32 - 1 of the same order."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # adding 0 turns -0 into 0, which is equal to it
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _mass_above(logits, vocab_size, inv_temp, row_max, threshold, COUNT: tl.constexpr, floor, BLOCK: tl.constexpr):
    """Return how many logits are at or above both thresholds, or with COUNT off the sum of their exp(x - row_max)."""
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab_size, BLOCK):
        inside = first + column < vocab_size
        z = tl.load(logits + first + column, mask=inside, other=-float("inf")).to(tl.float32)
        bits = _sortable_bits(z)
        kept = inside & (bits >= threshold) & (bits >= floor)
        if COUNT:
            total += tl.where(kept, 1.0, 0.0)
        else:
            total += tl.where(kept, tl.exp(z * inv_temp - row_max), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _find_threshold(
    logits, vocab_size, inv_temp, row_max, target, COUNT: tl.constexpr, floor, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the highest threshold with at least `target` at or above it, set bit by bit from the highest."""
    threshold = floor * 0
    bit = threshold + 2147483648
    for _ in range(BITS):
        higher = threshold + bit
        if _mass_above(logits, vocab_size, inv_temp, row_max, higher, COUNT, floor, BLOCK) >= target:
            threshold = higher
        bit = bit // 2
    return threshold


@triton.jit
def _top_k_top_p_threshold(
    logits, vocab_size, inv_temp, top_p, top_k, threshold, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the sortable bits of the smallest logit that top-k and then top-p keep."""
    column = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], _LOWEST, tl.float32)
    for first in range(0, vocab_size, BLOCK):
        inside = first + column < vocab_size
        z = tl.load(logits + first + column, mask=inside, other=-float("inf")).to(tl.float32)
        highest = tl.maximum(highest, z * inv_temp)
    row_max = tl.max(highest, 0)
    if (top_k > 0) & (top_k < vocab_size):
        threshold = _find_threshold(logits, vocab_size, inv_temp, row_max, top_k, True, threshold, BITS, BLOCK)
    if top_p < 1:
        mass = _mass_above(logits, vocab_size, inv_temp, row_max, threshold, False, threshold, BLOCK)
        narrower = _find_threshold(logits, vocab_size, inv_temp, row_max, top_p * mass, False, threshold, BITS, BLOCK)
        threshold = tl.maximum(threshold, narrower)
    return threshold


@triton.jit
def _filters(sampling_params, vocab_size):
    """Return whether top-k or top-p leave out tokens, 1 / temperature, top-p and top-k."""
    inv_temp = 1.0 / tl.load(sampling_params)
    top_p, top_k = tl.load(sampling_params + 1), tl.load(sampling_params + 2)
    return (top_p < 1) | ((top_k > 0) & (top_k < vocab_size)), inv_temp, top_p, top_k


@triton.jit
def _softmax_of_block(logits, number, vocab_size, inv_temp, threshold, BLOCK: tl.constexpr):
    """Return the maximum of a block's kept logits and the sum of exp(x - maximum)."""
    column = number * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab_size
    z = tl.load(logits + column, mask=inside, other=-float("inf")).to(tl.float32)
    x = tl.where(inside & (_sortable_bits(z) >= threshold), z * inv_temp, -float("inf"))
    highest = tl.maximum(tl.max(x, 0), _LOWEST)
    return highest, tl.sum(tl.exp(x - highest), 0)


@triton.jit
def _block_softmax_kernel(
    logits,
    scalars,
    sampling_params,
    block_stats,
    vocab_size,
    logits_stride,
    state_rows,
    num_blocks,
    BLOCK: tl.constexpr,
):
    """One program per row and block, where no tokens are left out."""
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    filtered, inv_temp, _, _ = _filters(sampling_params, vocab_size)
    if filtered | (tl.load(scalars + _ACTIVE * state_rows + row) == 0):
        return
    lowest = row * 0  # an int64 zero, below all sortable bits
    highest, total = _softmax_of_block(logits + row * logits_stride, number, vocab_size, inv_temp, lowest, BLOCK)
    tl.store(block_stats + row * 2 * num_blocks + number, highest)
    tl.store(block_stats + (row * 2 + 1) * num_blocks + number, total)


@triton.jit
def _sample_tokens_kernel(
    logits,
    scalars,
    sampling_params,
    block_stats,
    tokens,
    logps,
    eos_token_ids,
    vocab_size,
    logits_stride,
    state_rows,
    tokens_stride,
    num_eos_tokens,
    GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    EOS_BLOCK: tl.constexpr,
):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(scalars + _ACTIVE * state_rows + row) == 0:
        return
    row_logits = logits + row * logits_stride
    generated = tl.load(scalars + _NUM_GENERATED * state_rows + row)
    num_blocks = tl.cdiv(vocab_size, BLOCK)
    block = tl.arange(0, NUM_BLOCKS)
    threshold = generated * 0  # an int64 zero, below all sortable bits
    filtered, inv_temp, top_p, top_k = _filters(sampling_params, vocab_size)
    if filtered:
        threshold = _top_k_top_p_threshold(row_logits, vocab_size, inv_temp, top_p, top_k, threshold, BITS, BLOCK)
        block_max = tl.full([NUM_BLOCKS], _LOWEST, tl.float32)
        block_sum = tl.zeros([NUM_BLOCKS], tl.float32)
        for number in range(0, num_blocks):
            highest, total = _softmax_of_block(row_logits, number, vocab_size, inv_temp, threshold, BLOCK)
            block_max = tl.where(block == number, highest, block_max)
            block_sum = tl.where(block == number, total, block_sum)
    else:
        row_stats = block_stats + row * 2 * num_blocks
        block_max = tl.load(row_stats + block, mask=block < num_blocks, other=_LOWEST)
        block_sum = tl.load(row_stats + num_blocks + block, mask=block < num_blocks, other=0.0)
    row_max = tl.max(block_max, 0)
    mass = block_sum * tl.exp(block_max - row_max)
    total = tl.sum(mass, 0)
    if GREEDY:
        chosen = tl.min(tl.where(block_max == row_max, block, NUM_BLOCKS), 0)
    else:
        random = _splitmix64(tl.load(scalars + _RNG_KEY * state_rows + row) + (generated + 1) * _GOLDEN)
        u = ((random >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16  # 2^-53
        target = (u * total).to(tl.float32)
        # The last block with mass, where rounding leaves the cumulative sum below the target.
        last = tl.max(tl.where(mass > 0, block, 0), 0)
        chosen = tl.minimum(tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32), 0), last)
        target -= tl.sum(tl.where(block < chosen, mass, 0.0), 0)
    column = tl.arange(0, BLOCK)
    candidate = chosen * BLOCK + column
    z = tl.load(row_logits + candidate, mask=candidate < vocab_size, other=-float("inf")).to(tl.float32)
    kept = (candidate < vocab_size) & (_sortable_bits(z) >= threshold)
    x = tl.where(kept, z * inv_temp, -float("inf"))
    if GREEDY:
        token = tl.min(tl.where(x == row_max, candidate, vocab_size), 0)
    else:
        p = tl.exp(x - row_max)
        last = tl.max(tl.where(p > 0, column, 0), 0)
        token = chosen * BLOCK + tl.minimum(tl.sum((tl.cumsum(p, 0) <= target).to(tl.int32), 0), last)
    token = tl.minimum(token, vocab_size - 1)  # NaN logits match nothing, and would give a token out of range
    logp = tl.load(row_logits + token).to(tl.float32) * inv_temp - row_max - tl.log(total)

    written = tl.load(scalars + _SLOT * state_rows + row) * tokens_stride + generated
    tl.store(tokens + written, token.to(tl.int32))
    tl.store(logps + written, logp)
    index = tl.arange(0, EOS_BLOCK)
    eos_token_id = tl.load(eos_token_ids + index, mask=index < num_eos_tokens, other=-1)
    ended = tl.sum((eos_token_id == token.to(tl.int64)).to(tl.int32), 0) > 0
    max_new_tokens = tl.load(scalars + _MAX_NEW_TOKENS * state_rows + row)
    tl.store(scalars + _LAST_TOKEN * state_rows + row, token.to(tl.int64))
    tl.store(scalars + _POSITION * state_rows + row, tl.load(scalars + _POSITION * state_rows + row) + 1)
    tl.store(scalars + _NUM_GENERATED * state_rows + row, generated + 1)
    active = tl.where(ended | (generated + 1 >= max_new_tokens), 0, 1).to(tl.int64)
    tl.store(scalars + _ACTIVE * state_rows + row, active)
