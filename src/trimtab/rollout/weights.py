"""A policy's weights as another engine wants them: by the names of its checkpoints, LoRA merged, nothing changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def causal_lm(model: Any) -> Any:
    """The causal LM itself, without what LoRA wraps around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def checkpoint_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its name in a checkpoint, one after the other; a tied head comes under both its names."""
    causal = causal_lm(model)
    if getattr(causal, "_weight_conversions", None):  # families that transformers keeps in another form: experts in one
        from transformers.core_model_loading import revert_weight_conversion

        return iter(revert_weight_conversion(causal, dict(_merged(causal))).items())
    return _merged(causal)


@torch.no_grad()
def _merged(causal: Any) -> Iterator[tuple[str, Tensor]]:
    """A LoRA layer's weight with the adapter added is a new tensor: the policy's own must not drift by unmerging."""
    layers = {name: layer for name, layer in causal.named_modules() if hasattr(layer, "get_delta_weight")}
    for name, weight in causal.state_dict().items():
        owner, _, rest = name.rpartition(".base_layer.")
        if not owner:
            if not any(name.startswith(f"{layer}.lora_") for layer in layers):
                yield name, weight
        elif rest == "weight":
            layer = layers[owner]
            wanted = set() if layer.disable_adapters else set(layer.active_adapters)
            held = set(layer.merged_adapters)  # those that the weight has in it already
            added = sum((layer.get_delta_weight(adapter) for adapter in sorted(wanted - held)), weight)
            yield f"{owner}.weight", added - sum(layer.get_delta_weight(adapter) for adapter in sorted(held - wanted))
        else:
            yield f"{owner}.{rest}", weight
