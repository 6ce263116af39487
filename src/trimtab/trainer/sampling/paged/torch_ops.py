"""The operations of prefill and decoding in plain torch: run on a CPU, and the reference for the Triton kernels.

The arithmetic is that of the training forward under autocast: linear maps in the compute type, everything between them
and the residual stream in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from trimtab.data import SamplingOptions
from trimtab.trainer.sampling import sampling
from trimtab.trainer.sampling.paged.buffers import PAGE_SIZE, DecodeState, Scalar

Pair = tuple[Tensor, Tensor]


def fused_add_rms_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    """residual += delta, then out = RMSNorm(residual) weight."""
    if delta is not None:
        residual += delta
    out.copy_(rms_norm(residual, weight, eps))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, rounded to x's type before the weight as transformers does."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    """out = silu(gate) x up, of the two halves of gate_up."""
    gate, up = gate_up.chunk(2, -1)
    torch.mul(silu(gate), up, out=out)


def apply_rope(x: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply QK-norm, where the model has it, and RoPE to queries or keys (tokens, heads, head_dim); in fp32."""
    if norm is not None:
        x = rms_norm(x, norm, eps)
    first, second = x.float().chunk(2, -1)
    rotated = torch.cat([-second, first], -1)
    return x.float() * cos[:, None] + rotated * sin[:, None]


def rope_and_write_kv(
    qkv: Tensor, qk_norm: Pair | None, eps: float, cos_sin: Pair, cache: Tensor, position: Tensor, page: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv, apply RoPE, write keys and values into their pages, and return (tokens, heads, head_dim) each.

    `cache` is one layer's (2, pages, kv heads, PAGE_SIZE, head_dim). A token whose page is -1 is not written.
    """
    q, k, v = _split_and_rope(qkv, qk_norm, eps, (cos_sin[0][position], cos_sin[1][position]), cache)
    written = page >= 0
    where = page[written], slice(None), position[written] % PAGE_SIZE
    cache[0][where], cache[1][where] = k[written], v[written]
    return q, k, v


def _split_and_rope(
    qkv: Tensor, qk_norm: Pair | None, eps: float, cos_sin: Pair, cache: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads, head_dim = cache.shape[2], cache.shape[4]
    q, k, v = qkv.view(len(qkv), -1, head_dim).tensor_split([-2 * kv_heads, -kv_heads], 1)
    q_norm, k_norm = qk_norm if qk_norm is not None else (None, None)
    return apply_rope(q, q_norm, eps, *cos_sin).to(qkv.dtype), apply_rope(k, k_norm, eps, *cos_sin).to(qkv.dtype), v


def copy_pages(kv_cache: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy whole pages in all layers."""
    for layer in kv_cache:
        layer[:, target] = layer[:, source]


def paged_attention(
    qkv: Tensor, qk_norm: Pair | None, eps: float, cos_sin: Pair, cache: Tensor, state: DecodeState, out: Tensor
) -> None:
    """Write each active row's key and value into its page, and attend from its token to all of its pages.

    `qkv` is (rows, (heads + 2 kv heads) head_dim), `cache` one layer's (2, pages, kv heads, PAGE_SIZE, head_dim),
    `cos_sin` the RoPE table of all positions, and `out` (rows, heads head_dim).
    """
    rows, kv_heads, head_dim = len(qkv), cache.shape[2], cache.shape[4]
    position, active = state.scalars[Scalar.POSITION, :rows], state.scalars[Scalar.ACTIVE, :rows].bool()
    q, k, v = _split_and_rope(qkv, qk_norm, eps, (cos_sin[0][position], cos_sin[1][position]), cache)
    table = state.page_table[:rows].long()
    page = table.gather(1, (position // PAGE_SIZE)[:, None]).squeeze(1)
    cache[0][page[active], :, (position % PAGE_SIZE)[active]] = k[active]
    cache[1][page[active], :, (position % PAGE_SIZE)[active]] = v[active]
    visible = torch.arange(table.shape[1] * PAGE_SIZE, device=qkv.device) <= position[:, None]
    keys, values = (half[table].transpose(1, 2).reshape(rows, kv_heads, -1, head_dim) for half in cache)
    # Masked scores are not enough: the rest of a page is uninitialised, and 0 x NaN is NaN.
    keys, values = (half.masked_fill(~visible[:, None, :, None], 0) for half in (keys, values))
    attention = scaled_dot_product_attention(q[:, :, None], keys, values, visible[:, None, None], enable_gqa=True)
    out.copy_(attention.reshape(rows, -1))


def sample_tokens(logits: Tensor, state: DecodeState, greedy: bool) -> None:
    """Sample a token for every active row, store it in the row's slot, and advance the row."""
    scalars = state.scalars[:, : len(logits)]
    active = scalars[Scalar.ACTIVE].bool()
    temperature, top_p, top_k = state.sampling_params.tolist()
    options = SamplingOptions(1, 1, 0.0 if greedy else temperature, top_p, int(top_k))
    token, logp = sampling.sample_tokens(logits, scalars[Scalar.RNG_KEY], scalars[Scalar.NUM_GENERATED], options)
    slot, generated = scalars[Scalar.SLOT][active], scalars[Scalar.NUM_GENERATED][active]
    state.tokens[slot, generated] = token[active].int()
    state.logps[slot, generated] = logp[active]
    scalars[Scalar.LAST_TOKEN] = torch.where(active, token, scalars[Scalar.LAST_TOKEN])
    scalars[Scalar.POSITION] += active
    scalars[Scalar.NUM_GENERATED] += active
    scalars[Scalar.ACTIVE] *= ~torch.isin(token, state.eos_token_ids) & (
        scalars[Scalar.NUM_GENERATED] < scalars[Scalar.MAX_NEW_TOKENS]
    )
