"""Forward passes over packed sequences, without padding, for causal LMs of transformers.

An attention function is registered with transformers. Calls that pass `cu_seq_lens_q` go through `causal_attention`
without a mask; all others are sdpa's, as before. What a model does beyond plain causal attention (sliding windows,
chunks, biases, dropout) raises, so that `packing_unsupported_reason` finds such a model by trying it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from trimtab.trainer.attention import causal_attention

NAME = "trimtab"
TOLERANCE = 0.1  # relative distance of packed and unpacked hidden states: bf16 rounding is well below
TRIAL_LENGTHS = (3, 1, 7, 2)  # of the sequences that a model is tried with

_without_mask: ContextVar[bool] = ContextVar("without_mask", default=False)


@dataclass(frozen=True)
class PackedBatch:
    """Sequences concatenated: `ids` and `positions` (tokens), `cu_seqlens` (sequences + 1, int32), `max_seqlen`."""

    ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: int


def packed_hidden_states(backbone: Any, batch: PackedBatch) -> Tensor:
    """Return the last hidden states, (tokens, width)."""
    # A mask of ones: without any, transformers looks for sequence borders in the positions, which waits for the GPU.
    # One element, expanded, takes no memory.
    ones = batch.ids.new_ones((1, 1), dtype=torch.bool).expand(1, len(batch.ids))
    token = _without_mask.set(True)
    try:
        out = backbone(
            input_ids=batch.ids[None],
            position_ids=batch.positions[None],
            attention_mask=ones,
            use_cache=False,
            cu_seq_lens_q=batch.cu_seqlens,
            max_length_q=batch.max_seqlen,
        )
    finally:
        _without_mask.reset(token)
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


def use_packed_attention(causal_lm: Any) -> None:
    """Make a model's attention accept packed sequences; all other calls stay sdpa's."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    causal_lm.set_attn_implementation(NAME)


def packing_unsupported_reason(
    backbone: Any, device: torch.device, autocast: Callable[[], AbstractContextManager[Any]]
) -> str:
    """Try packed sequences on a model with packed attention: return why it does not support them, or ""."""
    try:
        with autocast():
            reason = _forward_problem(backbone, device)
        # A fresh context, so that autocast drops the weights it cached without gradient.
        with autocast():
            return reason or _backward_problem(backbone, device)
    except Exception as error:  # any model may do anything
        return f"{type(error).__name__}: {error}"


@torch.no_grad()
def _forward_problem(backbone: Any, device: torch.device) -> str:
    """Compare packed hidden states with those of one sequence at a time."""
    backbone.eval()
    batch = _trial_batch(backbone, device)
    alone = [
        backbone(input_ids=ids[None], attention_mask=torch.ones_like(ids[None]), use_cache=False).last_hidden_state[0]
        for ids in batch.ids.split(TRIAL_LENGTHS)
    ]
    expected = torch.cat(alone).float()
    off = float((packed_hidden_states(backbone, batch).float() - expected).norm() / expected.norm())
    return "" if off <= TOLERANCE else f"its hidden states are {off:.0%} off"


def _backward_problem(backbone: Any, device: torch.device) -> str:
    """Check that gradients are finite in training mode, where dropout is on."""
    trained = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
    backbone.train()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            hidden = packed_hidden_states(backbone, _trial_batch(backbone, device)).float()
            # One parameter is enough, and the smallest is the cheapest.
            gradients = torch.autograd.grad(hidden.sum(), min(trained, key=Tensor.numel)) if trained else (hidden,)
    finally:
        backbone.eval()
    return "" if bool(gradients[0].isfinite().all()) else "its gradients are not finite"


def _trial_batch(backbone: Any, device: torch.device) -> PackedBatch:
    positions = torch.cat([torch.arange(length, device=device) for length in TRIAL_LENGTHS])
    cu_seqlens = torch.tensor([0, *accumulate(TRIAL_LENGTHS)], dtype=torch.int32, device=device)
    ids = torch.arange(1, len(positions) + 1, device=device) % backbone.get_input_embeddings().num_embeddings
    return PackedBatch(ids, positions, cu_seqlens, max(TRIAL_LENGTHS))


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: from (rows, heads, tokens, head_dim) to (rows, tokens, heads, head_dim)."""
    cu_seqlens = options.get("cu_seq_lens_q")
    if cu_seqlens is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if options.get("dropout") or attention_mask is not None or options.get("position_bias") is not None:
        raise NotImplementedError("packed attention has no dropout, mask or bias")
    if options.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise NotImplementedError("packed attention is causal")
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    return causal_attention(q, k, v, cu_seqlens, options["max_length_q"], options.get("scaling")).unsqueeze(0), None


def _mask(*args: Any, **options: Any) -> Tensor | None:
    """Return no mask for packed sequences if attention is plainly causal; else sdpa's mask."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if not _without_mask.get():
        return sdpa_mask(*args, **options)
    if options["mask_function"] is not causal_mask_function or options.get("local_size") is not None:
        raise NotImplementedError("packed attention has no sliding window, chunks or other mask")
    return None
