"""Causal attention over packed (variable-length) sequences, without padding and without a mask.

On a GPU in half precision this is torch's variable-length flash attention; elsewhere, and for head sizes that kernel
does not support, each sequence goes through `scaled_dot_product_attention` by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

MAX_HEAD_DIM = 256  # of the flash kernel, which also needs a multiple of 8


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float | None = None,
    keys: tuple[Tensor, int] | None = None,
) -> Tensor:
    """Return causal attention within each packed sequence, (tokens, heads, head_dim); differentiable.

    `query` is (tokens, heads, head_dim); `key` and `value` are (tokens, kv_heads, head_dim), and `kv_heads` divides
    `heads`. `cu_seqlens`, (sequences + 1) int32 on the same device, holds the cumulative sequence lengths from 0 on;
    its last entry may be less than `tokens`, and the output of the tokens after it is then undefined. `max_seqlen` is
    the length of the longest sequence. Under autocast it runs in autocast's dtype.

    If a sequence has more keys than queries, `keys` are the keys' own cu_seqlens and max_seqlen. The queries are
    then the last tokens of their sequence.
    """
    if torch.is_autocast_enabled(query.device.type):
        # Autocast casts the arguments of scaled_dot_product_attention, but not those of the variable-length kernel.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if not len(query):
        return torch.zeros_like(query)
    attend = _flash_attention if _flash_supports(query, key, value) else _sdpa_per_sequence
    return attend(query, key, value, (cu_seqlens, max_seqlen), keys or (cu_seqlens, max_seqlen), scale)


Lengths = tuple[Tensor, int]  # cu_seqlens and max_seqlen


def _flash_supports(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the flash kernel supports the device, dtypes and head sizes."""
    width = query.shape[-1]
    half = query.dtype in {torch.bfloat16, torch.float16} and query.dtype == key.dtype == value.dtype
    return query.is_cuda and half and width % 8 == 0 and width <= MAX_HEAD_DIM and value.shape[-1] == width


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, queries: Lengths, keys: Lengths, scale: float | None
) -> Tensor:
    # The operation that torch.nn.attention.varlen wraps: called directly, because the wrapper's host time counts for
    # small models. Its causal mask is aligned to the last key, so fewer queries than keys are the last tokens.
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, queries[0], keys[0], queries[1], keys[1], 0.0, True, False, scale=scale
    )[0]
    return out


def _sdpa_per_sequence(
    query: Tensor, key: Tensor, value: Tensor, queries: Lengths, keys: Lengths, scale: float | None
) -> Tensor:
    lengths, key_lengths = queries[0].diff().tolist(), keys[0].diff().tolist()
    covered, grouped = sum(lengths), query.shape[1] != key.shape[1]
    pairs = ((query, lengths), (key, key_lengths), (value, key_lengths))
    split = (tensor[: sum(counts)].transpose(0, 1).split(counts, 1) for tensor, counts in pairs)
    outputs = []
    for q, k, v in zip(*split, strict=True):
        if q.shape[1]:
            # torch's own causal mask is aligned to the first key.
            later = k.shape[1] - q.shape[1]
            mask = q.new_ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(later) if later else None
            attended = scaled_dot_product_attention(q, k, v, mask, 0.0, mask is None, scale=scale, enable_gqa=grouped)
            outputs.append(attended.transpose(0, 1))
    return torch.cat([*outputs, query.new_zeros(len(query) - covered, query.shape[1], value.shape[2])])
