"""Forward passes in which responses to the same prompt share the prompt's pass, by the KV cache of transformers.

Every prompt goes through the model once, and its keys and values are repeated for its responses, gradients included.
The result is that of whole rows up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trimtab.trainer.model.policy import Policy

if TYPE_CHECKING:
    from trimtab.trainer.model.score import Transcript

TOLERANCE = 1e-3  # relative distance of hidden states with and without a shared pass, in fp32


def shared_hidden_states(policy: Policy, transcripts: Sequence[Transcript]) -> tuple[Tensor, Tensor]:
    """Return the hidden states that predict each sampled token, and those tokens, both concatenated."""
    numbers: dict[tuple[int, ...], int] = {}
    owner = torch.tensor([numbers.setdefault(tuple(t.prompt), len(numbers)) for t in transcripts])
    prompts, prompt_mask = _padded([np.array(prompt) for prompt in numbers], policy.pad_token_id)
    responses, real = _padded([t.ids[len(t.prompt) :] for t in transcripts], policy.pad_token_id)
    out = policy.backbone(input_ids=prompts, use_cache=True)
    lengths = prompt_mask.sum(1)
    last = torch.arange(len(prompts)) * prompts.shape[1] + lengths - 1
    hidden = out.last_hidden_state.flatten(0, 1).index_select(0, last[owner])[:, None]
    if responses.shape[1] > 1:  # the last token of a response predicts nothing
        # As `batch_select_indices` does, but by index_select, whose gradient is a plain index_add.
        for layer in out.past_key_values.layers:
            layer.keys, layer.values = layer.keys.index_select(0, owner), layer.values.index_select(0, owner)
        inputs = responses[:, :-1]
        # Prompts are padded on the right: on the left the first queries would have no key, and NaN gradients.
        mask = torch.cat([prompt_mask[owner], torch.ones_like(inputs, dtype=torch.bool)], 1)
        positions = lengths[owner][:, None] + torch.arange(inputs.shape[1])
        cache: dict[str, Any] = {"past_key_values": out.past_key_values, "use_cache": True}
        later = policy.backbone(input_ids=inputs, attention_mask=mask.long(), position_ids=positions, **cache)
        hidden = torch.cat([hidden, later.last_hidden_state], 1)
    sampled = real.clone()
    sampled[real] = torch.from_numpy(np.concatenate([t.sampled for t in transcripts]))
    return hidden.flatten(0, 1).index_select(0, sampled.flatten().nonzero().squeeze(1)), responses[sampled]


def _padded(rows: Sequence[np.ndarray], pad: int) -> tuple[Tensor, Tensor]:
    """Return rows padded on the right, and a mask of what is not padding."""
    lengths = np.array([len(row) for row in rows])
    real = np.arange(lengths.max()) < lengths[:, None]
    table = np.full(real.shape, pad)
    table[real] = np.concatenate(rows)
    return torch.from_numpy(table), torch.from_numpy(real)


def with_shared_prompts(policy: Policy) -> Policy:
    """Return the policy with shared passes of prompts; ValueError where its model does not support them."""
    shared = replace(policy, shared_prompts=True)
    if reason := _unsupported_reason(policy, shared):
        name = type(policy.causal_lm).__name__
        raise ValueError(f"update.shared_prompts = true does not work with {name} here: {reason}; set it to false")
    return shared


@torch.no_grad()
def _unsupported_reason(policy: Policy, shared: Policy) -> str:
    """Try a shared pass beside whole rows: return why it is not supported, or ""."""
    from trimtab.trainer.model.score import Transcript, response_hidden_states

    if policy.device.type != "cpu" or policy.precision != "fp32":
        return "it is for fp32 on a CPU"
    config = policy.causal_lm.config
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "padding between prompt and response would shift its sliding window"
    some = [min(policy.eos_token_ids), policy.pad_token_id]
    transcripts = [Transcript(some * n, some[:m]) for n, m in ((1, 1), (2, 2), (2, 1), (1, 2))]
    policy.model.eval()
    try:
        whole, once = (response_hidden_states(each, transcripts)[0] for each in (policy, shared))
    except Exception as error:  # any model may do anything
        return f"{type(error).__name__}: {error}"
    off = float((whole - once).norm() / whole.norm())
    return "" if off <= TOLERANCE else f"its hidden states are {off:.0%} off"
