"""TRL that samples with vLLM in its own process: the settings, and the model's folder that vLLM reads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from trimtab.trainer.config import RolloutConfig

VLLM_PEERS = {"trl-vllm": False, "trl-vllm-sleep": True}  # whether vLLM sleeps between rollouts


def vllm_options(rollout: RolloutConfig, fixed: bool, memory: float, sleep: bool) -> dict[str, Any]:
    """Return what makes TRL sample with vLLM in its own process, as fast as it can."""
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": memory,
        "vllm_enable_sleep_mode": sleep,
        "vllm_max_model_length": rollout.max_prompt_tokens + rollout.max_new_tokens,
        "vllm_importance_sampling_correction": False,  # it would cost a forward pass
        # TRL decodes by itself.
        "generation_kwargs": {"detokenize": False, **({"ignore_eos": True} if fixed else {})},
    }


def set_kv_cache(size: int) -> None:
    """Give the engines that TRL starts a KV cache of so many bytes.

    TRL has no option for it. Without it vLLM profiles the GPU's memory, and fails if another process frees some.
    """
    from trl.generation import vllm_generation

    vllm_generation.LLM = partial(vllm_generation.LLM, kv_cache_memory_bytes=size)


def bf16_copy(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save a model for vLLM, which reads its folder and its dtype."""
    weights = {name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items()}
    config, model.config.dtype = model.config.dtype, torch.bfloat16
    model.save_pretrained(folder, state_dict=weights)
    model.config.dtype = config
    tokenizer.save_pretrained(folder)
    model.name_or_path = str(folder)
