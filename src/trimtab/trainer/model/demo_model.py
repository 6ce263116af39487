"""The demo models: tiny Qwen3s over characters, initialised from a seed."""

from __future__ import annotations

from typing import Any

import torch

from trimtab.trainer.config import DEMO_MODELS

PAD, END = "<pad>", "<end>"
# The tokens of prompt and response together; conversations are longer.
POSITIONS = {"demo": 64, "demo-tools": 128, "demo-countdown": 128}


def demo_tokenizer(name: str = "demo") -> Any:
    """Return the tokenizer of a demo model, with one token per character; others become padding."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([PAD, END, *DEMO_MODELS[name]])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)


def demo_model(seed: int, name: str = "demo") -> Any:
    """Return a model of 0.13 million parameters with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(DEMO_MODELS[name]) + 2,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=POSITIONS[name],
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
