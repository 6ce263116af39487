"""Folders with models of known shapes and random weights, as every trainer can load them, and a tokenizer to match."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sampler import llama_135m, qwen3, random_model

SPECIAL = ("<pad>", "<eos>", "<unk>", "<start>")
TEMPLATE = (
    "{% for m in messages %}<start> {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}<start>{% endif %}"
)


def made_tokenizer(vocab_size: int) -> Any:
    """Return a tokenizer of whole words that has every id of a vocabulary: random weights sample all of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(f"w{number}" for number in range(vocab_size - len(SPECIAL)))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    fast.chat_template = TEMPLATE
    return fast


def save_made_model(shape: str, folder: Path, device: torch.device, small: bool = False) -> Path:
    """Save a model with random bf16 weights and its tokenizer; return the folder."""
    config = llama_135m(small) if shape == "135M" else qwen3(shape, small)
    config.pad_token_id, config.eos_token_id, config.bos_token_id = 0, 1, None
    model = random_model(config, device)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    made_tokenizer(config.vocab_size).save_pretrained(folder)
    return folder
