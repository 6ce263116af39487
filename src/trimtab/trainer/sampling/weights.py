"""A policy's weights by their checkpoint names, with LoRA merged, for an engine with a model of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trimtab.trainer.parallel import whole_tensor


def causal_lm(model: Any) -> Any:
    """Return the causal LM inside of a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def checkpoint_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight with its checkpoint name, adapters merged; a tied head comes under both of its names.

    Weights of sharded layers are gathered one at a time: all processes must go through them together.
    """
    causal = causal_lm(model)
    # Some families differ in memory from their checkpoint: transformers fuses a layer's experts into one tensor.
    if getattr(causal, "_weight_conversions", None):
        from transformers.core_model_loading import revert_weight_conversion

        return iter(revert_weight_conversion(causal, dict(_merged(causal))).items())
    return _merged(causal)


@torch.no_grad()
def _merged(causal: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield weights with adapters merged, one layer at a time."""
    layers = {name: layer for name, layer in causal.named_modules() if hasattr(layer, "get_delta_weight")}
    for name, weight in causal.state_dict().items():
        owner, _, rest = name.rpartition(".base_layer.")
        if not owner:
            if not any(name.startswith(f"{layer}.lora_") for layer in layers):
                yield name, whole_tensor(weight)
        elif rest == "weight":
            layer = layers[owner]
            active = set() if layer.disable_adapters else set(layer.active_adapters)
            merged = set(layer.merged_adapters)  # already part of the weight
            # A new tensor, not PEFT's merge and unmerge in place: rounding would make the policy's weights drift.
            added = sum((layer.get_delta_weight(adapter) for adapter in sorted(active - merged)), whole_tensor(weight))
            yield f"{owner}.weight", added - sum(layer.get_delta_weight(adapter) for adapter in sorted(merged - active))
        else:
            yield f"{owner}.{rest}", whole_tensor(weight)
