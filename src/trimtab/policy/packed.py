"""The forward pass without padding: sequences end to end, through any causal LM of transformers that can.

An attention function of our own is registered with transformers. A call that carries where sequences start goes through
`causal_attention`, and no mask is made for it; any other call is sdpa's, as before. What a model does beyond plain
causal attention (sliding windows, chunks, biases, dropout) raises, so that such a model is found when it is probed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from trimtab.attention import causal_attention

NAME = "trimtab"
CLOSE = 0.1  # how far packed and padded hidden states may be apart, of their norm: bf16 rounding is well below
LENGTHS = (3, 1, 7, 2)  # of the probe's sequences

_without_mask: ContextVar[bool] = ContextVar("without_mask", default=False)


@dataclass(frozen=True)
class Packed:
    """Sequences end to end: `ids` and `positions` (tokens), `starts` (sequences + 1, int32), the longest's length."""

    ids: Tensor
    positions: Tensor
    starts: Tensor
    longest: int


def packed_hidden(backbone: Any, packed: Packed) -> Tensor:
    """The last hidden states, (tokens, width)."""
    # The mask says that no token is padding. Without one, transformers would look for sequences in the positions,
    # which waits for the GPU. One number, expanded, takes no memory.
    everything = packed.ids.new_ones((1, 1), dtype=torch.bool).expand(1, len(packed.ids))
    with _no_mask():
        out = backbone(
            input_ids=packed.ids[None],
            position_ids=packed.positions[None],
            attention_mask=everything,
            use_cache=False,
            cu_seq_lens_q=packed.starts,
            max_length_q=packed.longest,
        )
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


def use_packed_attention(causal: Any) -> None:
    """Let a model's attention take packed sequences; every other call of it stays what sdpa makes of it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    causal.set_attn_implementation(NAME)


def why_not_packed(backbone: Any, device: torch.device, autocast: Callable[[], AbstractContextManager[Any]]) -> str:
    """Try a model whose attention was told to: why it cannot take packed sequences; nothing where it can."""
    try:
        with autocast():
            reason = _disagreement(backbone, device)
        with autocast():  # another: copies of weights made without gradients are not to be met again
            return reason or _fault_in_training(backbone, device)
    except Exception as error:  # whatever a model does that nobody has foreseen
        return f"{type(error).__name__}: {error}"


@torch.no_grad()
def _disagreement(backbone: Any, device: torch.device) -> str:
    """Packed against one sequence at a time."""
    backbone.eval()
    packed = _small(backbone, device)
    alone = [
        backbone(input_ids=ids[None], attention_mask=torch.ones_like(ids[None]), use_cache=False).last_hidden_state[0]
        for ids in packed.ids.split(LENGTHS)
    ]
    right = torch.cat(alone).float()
    off = float((packed_hidden(backbone, packed).float() - right).norm() / right.norm())
    return "" if off <= CLOSE else f"its hidden states are {off:.0%} off"


def _fault_in_training(backbone: Any, device: torch.device) -> str:
    """Whether gradients come back in training mode, where dropout is on; the smallest parameter will do."""
    trained = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
    backbone.train()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            hidden = packed_hidden(backbone, _small(backbone, device)).float()
            gradients = torch.autograd.grad(hidden.sum(), min(trained, key=Tensor.numel)) if trained else (hidden,)
    finally:
        backbone.eval()
    return "" if bool(gradients[0].isfinite().all()) else "its gradients are not finite"


def _small(backbone: Any, device: torch.device) -> Packed:
    """Sequences of the first tokens of the vocabulary."""
    positions = torch.cat([torch.arange(length, device=device) for length in LENGTHS])
    starts = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32, device=device)
    ids = torch.arange(1, len(positions) + 1, device=device) % backbone.get_input_embeddings().num_embeddings
    return Packed(ids, positions, starts, max(LENGTHS))


@contextmanager
def _no_mask() -> Iterator[None]:
    token = _without_mask.set(True)
    try:
        yield
    finally:
        _without_mask.reset(token)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers asks for it: of (rows, heads, tokens, D), giving (rows, tokens, heads, D)."""
    starts = options.get("cu_seq_lens_q")
    if starts is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    if dropout or attention_mask is not None or options.get("position_bias") is not None:
        raise NotImplementedError("packed attention knows no dropout, mask or bias")
    if options.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise NotImplementedError("packed attention is causal")
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    return causal_attention(q, k, v, starts, options["max_length_q"], scaling).unsqueeze(0), None


def _mask(*args: Any, **options: Any) -> Tensor | None:
    """No mask for packed sequences, which is right for plain causal attention alone; else sdpa's."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if not _without_mask.get():
        return sdpa_mask(*args, **options)
    if options["mask_function"] is not causal_mask_function or options.get("local_size") is not None:
        raise NotImplementedError("packed attention sees everything before a token")
    return None
