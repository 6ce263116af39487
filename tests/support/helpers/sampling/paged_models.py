"""Tiny models of the families that the paged sampler supports, with weights large enough for varied responses."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from trimtab.data import PromptTokens, Response
from trimtab.trainer.sampling.paged.scheduler import Scheduler

VOCABULARY = 211
EOS = frozenset({2, 3})
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS = {
    "llama tied": LlamaConfig(**COMMON, tie_word_embeddings=True),
    "llama biased": LlamaConfig(
        **COMMON,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    ),
    "llama 3": LlamaConfig(
        **COMMON | {"num_key_value_heads": 2},
        rope_parameters=LLAMA3 | {"rope_theta": 10000.0, "original_max_position_embeddings": 64},
    ),
    "qwen2": Qwen2Config(**COMMON),
    "qwen2 yarn": Qwen2Config(
        **COMMON,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 128,
        },
    ),
    "qwen3": Qwen3Config(**COMMON | {"num_attention_heads": 3}, head_dim=64),
}


def tiny(family: str, device: str = "cpu") -> Any:
    """Build a model of a family, or `lora`: Qwen2 with a random adapter."""
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS["qwen2" if family == "lora" else family])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    if family == "lora":
        from peft import LoraConfig, get_peft_model

        options = LoraConfig(r=3, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, options)
    return model.to(device).eval()


def prompts(*lengths: int) -> list[PromptTokens]:
    """Return random prompts of these lengths; the same number and length give the same prompt."""
    return [
        PromptTokens(
            torch.randint(5, VOCABULARY, (length,), generator=torch.Generator().manual_seed(number)).tolist(), number
        )
        for number, length in enumerate(lengths)
    ]


def tokens(groups: list[list[Response]]) -> list[list[list[int]]]:
    """Return the tokens of all responses."""
    return [[response.tokens.tolist() for response in group] for group in groups]


def assert_same(actual: list[list[Response]], reference: list[list[Response]], tolerance: float = 2e-5) -> None:
    """Check for equal tokens, `finished` and order, and for log-probabilities that are equal up to rounding."""
    # fp32 products are added in an order that depends on the CPU, and merged adapters are rounded differently:
    # up to 6e-6 apart. A wrong weight or a product in bf16 shows by more than 1e-3.
    assert tokens(actual) == tokens(reference)
    for ours, others in zip(actual, reference, strict=True):
        for a, b in zip(ours, others, strict=True):
            assert (a.finished, a.sample) == (b.finished, b.sample)
            torch.testing.assert_close(torch.tensor(a.logp), torch.tensor(b.logp), rtol=0, atol=tolerance)


def count_preemptions(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count from now on how often each sequence, by its random key, is preempted."""
    counted: Counter[int] = Counter()
    preempt = Scheduler.preempt

    def counting(self: Scheduler, slot: int) -> None:
        counted[self.running[slot].key] += 1
        preempt(self, slot)

    monkeypatch.setattr(Scheduler, "preempt", counting)
    return counted
