"""Causal attention over sequences that lie end to end, without padding and without a mask.

On a GPU in half precision this is torch's variable-length flash attention; elsewhere, and for shapes that kernel does
not take, each sequence goes through `scaled_dot_product_attention` by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

WIDEST = 256  # the widest head the flash kernel takes; it must be a multiple of 8 too


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float | None = None
) -> Tensor:
    """What every token sees of its own sequence up to itself, (tokens, heads, D); differentiable.

    `query` is (tokens, heads, D); `key` and `value` are (tokens, kv_heads, D), where `kv_heads` divides `heads`.
    `starts` (sequences + 1, int32, on the tokens' device) says where each sequence starts, and ends with the number of
    tokens, or with fewer: what is given for those after the last sequence may be anything. `longest` is the length of
    the longest sequence. Under autocast it runs in autocast's precision.
    """
    query, key, value = _in_autocast(query, key, value)
    if not len(query):
        return torch.zeros_like(query)
    attend = _flash if _takes(query, key, value) else _one_by_one
    return attend(query, key, value, starts, longest, scale)


def _in_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In autocast's precision: it knows `scaled_dot_product_attention`, but not the variable-length kind."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor.to(dtype) for tensor in tensors)


def _takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the flash kernel takes these."""
    width = query.shape[-1]
    half = query.dtype in {torch.bfloat16, torch.float16} and query.dtype == key.dtype == value.dtype
    return query.is_cuda and half and width % 8 == 0 and width <= WIDEST and value.shape[-1] == width


def _flash(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float | None) -> Tensor:
    """The kernel as `torch.nn.attention.varlen` calls it; what is wrapped around it there costs the host too much."""
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, starts, starts, longest, longest, 0.0, True, False, scale=scale
    )[0]
    return out


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float | None) -> Tensor:
    lengths = starts.diff().tolist()
    covered, grouped = sum(lengths), query.shape[1] != key.shape[1]
    split = (tensor[:covered].transpose(0, 1).split(lengths, 1) for tensor in (query, key, value))
    seen = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped).transpose(0, 1)
        for q, k, v in zip(*split, strict=True)
        if q.shape[1]
    ]
    return torch.cat([*seen, query.new_zeros(len(query) - covered, query.shape[1], value.shape[2])])
