"""LoRA adapters, by peft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trimtab.text import install_command


def add_lora(
    model: Any, rank: int, alpha: int, seed: int, targets: Sequence[str] = (), dropout: float = 0.0, base: str = ""
) -> Any:
    """Return the model with freshly initialised adapters; the rest is frozen.

    They are on the linear layers whose names end in one of `targets`, without any on all but the head. `base` is the
    model's path, for those who load the adapters with peft.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError(f"model.lora_rank needs peft: {install_command(extra='lora')}") from None
    _check_targets(model, targets)
    layers = list(targets) or "all-linear"
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, config)
    # peft takes it from the model's own config, which knows nothing of weights that were loaded afterwards.
    adapted.peft_config["default"].base_model_name_or_path = base or None
    return adapted


def _check_targets(model: Any, targets: Sequence[str]) -> None:
    """Raise ValueError for a name that is no linear layer's: peft ignores it where another one matches."""
    linear = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    known = sorted({name.rpartition(".")[2] for name in linear})
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            raise ValueError(f"model.lora_targets: {target!r:.100} is no linear layer of the model: {', '.join(known)}")


def freeze_in_bf16(model: Any) -> None:
    """Keep the frozen weights of linear layers in bf16, in place.

    Only for a model that computes under autocast, which casts these weights to bf16 at every use: results are equal to
    the bit. It does not cast norms and embeddings, so those stay as they are, and with them a head that is tied.
    """
    embedding = model.get_input_embeddings().weight
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and layer.weight is not embedding:
            for weight in layer.parameters(recurse=False):
                if not weight.requires_grad:
                    weight.data = weight.data.to(torch.bfloat16)


def enable_gradient_checkpointing(model: Any) -> None:
    """Recompute each layer's activations in the backward pass instead of keeping them."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if hasattr(model, "peft_config"):
        # The embedding is frozen: without this no input of a checkpointed layer would require a gradient.
        model.enable_input_require_grads()
