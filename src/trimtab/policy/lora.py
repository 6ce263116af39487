"""LoRA adapters, by peft."""

from __future__ import annotations

from typing import Any

import torch


def add_lora(model: Any, rank: int, alpha: int, seed: int) -> Any:
    """Return the model with freshly initialised adapters on all linear layers but the head; the rest is frozen."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError("model.lora_rank needs peft: pip install 'trimtab[lora]'") from None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear"))


def enable_gradient_checkpointing(model: Any) -> None:
    """Recompute each layer's activations in the backward pass instead of keeping them."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if hasattr(model, "peft_config"):
        # The embedding is frozen: without this no input of a checkpointed layer would require a gradient.
        model.enable_input_require_grads()
