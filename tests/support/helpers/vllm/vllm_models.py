"""Tiny policies on disk, and settings of vLLM that fit into little memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trimtab.data import PromptTokens, Response, SamplingOptions
from trimtab.trainer.config import RolloutConfig
from trimtab.trainer.model import Policy, Transcript, load_policy, score
from trimtab.trainer.model.loading import demo_model, demo_tokenizer

LITTLE_MEMORY = {"kv_cache_memory_bytes": 64 << 20}
PROMPTS = ["1+1=", "12+34=", "7-3=", "99*9=", "0+0="]
LONG = "1+2+3+4+5+6+7+8+9+" * 9  # 162 tokens, more than a block of vLLM's prefix cache on a CPU
OPTIONS = SamplingOptions(samples=6, max_new_tokens=9, seed=4)


def save_model(folder: Path, kind: str = "qwen3", **changes: Any) -> Path:
    """Save the demo's tokenizer and a model of its shape with larger random weights and a longer context."""
    from transformers import AutoConfig, AutoModelForCausalLM

    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    same += ("num_key_value_heads", "head_dim", "pad_token_id", "eos_token_id", "bos_token_id", "tie_word_embeddings")
    demo = {name: getattr(demo_model(0).config, name) for name in same}
    config = AutoConfig.for_model(kind, **{**demo, "max_position_embeddings": 512, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shift(model, 0.15)
    model.save_pretrained(folder)
    demo_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def shift(model: Any, much: float, seed: int = 0) -> None:
    """Add noise to every weight."""
    noise = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=noise) * much)


def load(folder: Path, **options: Any) -> Policy:
    """Load a policy on the CPU."""
    return load_policy(str(folder), device="cpu", **options)


def rollout(**changes: Any) -> RolloutConfig:
    """Return the rollout config of a small sampler."""
    small = {"engine": "vllm", "batch_size": 64, "max_prompt_tokens": 200, "max_new_tokens": 16}
    return RolloutConfig(**{**small, "vllm_options": LITTLE_MEMORY, **changes})


def prompts(policy: Policy, texts: list[str] = PROMPTS) -> list[PromptTokens]:
    """Encode texts as prompts, each with its number."""
    known = [*PROMPTS, LONG]
    return [PromptTokens(policy.tokenizer.encode(text), known.index(text)) for text in texts]


def tokens(groups: list[list[Response]]) -> list[list[list[int]]]:
    """Return the tokens of all responses."""
    return [[response.tokens.tolist() for response in group] for group in groups]


def logp_of(groups: list[list[Response]]) -> torch.Tensor:
    """Return the sampler's log-probabilities, end to end."""
    return torch.tensor([lp for group in groups for response in group for lp in response.logp])


def mismatch(
    policy: Policy, prompts: list[PromptTokens], groups: list[list[Response]], temperature: float = 1.0
) -> float:
    """Return the largest difference between the sampler's log-probabilities and the trainer's."""
    transcripts = [Transcript(p.ids, r.tokens) for p, group in zip(prompts, groups, strict=True) for r in group]
    measured = score(policy, transcripts, temperature, token_budget=4096, head_chunk=256)
    return float((measured.logp.cpu() - logp_of(groups)).abs().max())
