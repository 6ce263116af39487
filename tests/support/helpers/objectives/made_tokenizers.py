"""A tokenizer made from texts, for tests that need real ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def byte_level_bpe(texts: Iterable[str], size: int, special: Sequence[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer, the kind of GPT-2, Qwen and Llama 3: characters beyond ASCII may be cut."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=letters, special_tokens=list(special))
    )
    return made
