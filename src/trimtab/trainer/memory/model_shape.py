"""A model's configuration without its weights, for estimates before anything is loaded."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

from trimtab.bounded_http import HttpError, fetch
from trimtab.trainer.model import DEMO_MODELS, check_config, check_counts, demo_model, is_hub_model, read_config

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
    """Return the configuration of a demo model, `smollm2`, a folder, or a hub model that is cached or reachable."""
    from huggingface_hub import constants, hf_hub_url
    from transformers import AutoConfig, LlamaConfig

    if path in DEMO_MODELS:
        return demo_model(0, path).config
    if path == "smollm2":
        return LlamaConfig(**SMOLLM2)
    try:
        return read_config(path, local_files_only=True)
    except ValueError as error:
        if not is_hub_model(path) or os.path.isdir(path):
            raise NoEstimateError(str(error)) from None
    # `from_pretrained` would retry for minutes where there is no network; a dry run should not wait for that.
    if not constants.HF_HUB_OFFLINE:
        with suppress(HttpError, ValueError, TypeError, RecursionError):
            content = json.loads(fetch(hf_hub_url(path, "config.json"), seconds=5.0, max_bytes=1 << 20))
            check_counts(content)
            shape = AutoConfig.for_model(**content)
            check_config(shape)
            return shape
    why = "is neither cached nor can it be fetched; memory cannot be estimated without it"
    raise NoEstimateError(f"the config of {path} {why}")


def known_positions(path: str) -> int | None:
    """Return the most tokens that a model takes by its configuration; None if that is not known."""
    with suppress(NoEstimateError):
        positions = getattr(model_shape(path), "max_position_embeddings", None)
        return positions if isinstance(positions, int) else None
    return None
