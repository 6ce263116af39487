"""A model's configuration without its weights, for estimates before anything is loaded."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

from trimtab.bounded_http import HttpError, fetch

# Written out, since the packaged GGUF file has no config.json and reading it takes seconds.
SMOLLM2: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


class NoEstimateError(Exception):
    """The reason why a model's memory cannot be estimated."""


def model_shape(path: str) -> Any:
    """Return the configuration of `demo`, `smollm2`, a folder, or a model of the hub that is cached or reachable."""
    from huggingface_hub import constants, hf_hub_url
    from transformers import AutoConfig, LlamaConfig

    from trimtab.policy import demo_model

    if path == "demo":
        return demo_model(0).config
    if path == "smollm2":
        return LlamaConfig(**SMOLLM2)
    folder = os.path.expanduser(path)
    # A path must not be looked up on the hub as a name.
    if path.startswith(("/", ".", "~")) and not os.path.isdir(folder):
        raise NoEstimateError(f"model.path={path!r}: there is no such folder")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        if os.path.isdir(folder):
            raise NoEstimateError(f"model.path={path!r} has no config.json that can be read: {error}") from None
    # `from_pretrained` would retry for minutes where there is no network; a dry run should not wait for that.
    if not constants.HF_HUB_OFFLINE:
        with suppress(HttpError, ValueError, TypeError, RecursionError):
            config = fetch(hf_hub_url(path, "config.json"), seconds=5.0, max_bytes=1 << 20)
            return AutoConfig.for_model(**json.loads(config))
    why = "is neither cached nor can it be fetched; memory cannot be estimated without it"
    raise NoEstimateError(f"the config of {path} {why}")
