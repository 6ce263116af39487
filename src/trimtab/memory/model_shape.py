"""A model's shape: its configuration without its weights, for what is said about a run before anything is loaded."""

from __future__ import annotations

import os
from typing import Any

SMOLLM2: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


class NoForecastError(Exception):
    """Why there is no forecast, in words."""


def model_shape(path: str) -> Any:
    """A model's configuration: `demo`, `smollm2`, a folder, or a name on the hub that is cached or can be reached."""
    from transformers import AutoConfig, LlamaConfig

    from trimtab.policy import demo_model

    if path == "demo":
        return demo_model(0).config
    if path == "smollm2":
        return LlamaConfig(**SMOLLM2)
    folder = os.path.expanduser(path)
    if path.startswith(("/", ".", "~")) and not os.path.isdir(folder):
        raise NoForecastError(f"model.path={path!r}: there is no such folder")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        if os.path.isdir(folder):
            raise NoForecastError(f"model.path={path!r} has no config.json that can be read: {error}") from None
    found = _from_hub(path)
    if found is None:
        raise NoForecastError(
            f"the config of {path} is neither cached nor can it be fetched; without it memory cannot be foretold"
        )
    return found


def _from_hub(name: str) -> Any:
    """A model's config.json by one short request, where there is a hub; `from_pretrained` would try for a long time."""
    import httpx
    from huggingface_hub import constants, hf_hub_url
    from transformers import AutoConfig

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        answer = httpx.get(hf_hub_url(name, "config.json"), timeout=5, follow_redirects=True)
        return AutoConfig.for_model(**answer.raise_for_status().json())
    except (httpx.HTTPError, ValueError, TypeError):
        return None
