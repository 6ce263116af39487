"""A policy's weights as another engine wants them: by the names of its checkpoints, LoRA merged, nothing changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def causal_lm(model: Any) -> Any:
    """The causal LM itself, without what LoRA wraps around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@torch.no_grad()
def checkpoint_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its name in a checkpoint, one after the other.

    A head that is tied to the embedding comes under both names. A LoRA layer gives its weight with the adapter added, a
    new tensor, so that the policy's own does not drift by merging and unmerging.
    """
    causal = causal_lm(model)
    layers = {name: layer for name, layer in causal.named_modules() if hasattr(layer, "get_delta_weight")}
    for name, weight in causal.state_dict().items():
        owner, _, rest = name.rpartition(".base_layer.")
        if not owner:
            if not any(name.startswith(f"{layer}.lora_") for layer in layers):
                yield name, weight
        elif rest == "weight":
            layer = layers[owner]
            yield f"{owner}.weight", sum((layer.get_delta_weight(a) for a in layer.active_adapters), weight)
        else:
            yield f"{owner}.{rest}", weight
