"""Build task, policy, reference model and sampler from a recipe."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from trimtab.config import Config, RolloutConfig
from trimtab.policy import Policy, load_policy
from trimtab.rollout import NativeSampler, PagedSampler, Sampler, VllmSampler, VllmSettings
from trimtab.rollout.paged import unsupported_reason
from trimtab.tasks import Arithmetic, GymTask, Task, gsm8k, verl_file


def build_task(config: Config, split: Literal["train", "test"]) -> Task | None:
    """Build the task with the training or the held-out problems; None if a file task has no held-out ones."""
    task = config.task
    size = task.size if split == "train" else config.run.eval_problems
    if task.name == "arithmetic":
        return Arithmetic(task.family, task.digits, task.terms, task.form, size, split=split, min_terms=task.min_terms)
    if task.name.startswith("gym:"):
        return GymTask(task.name.removeprefix("gym:"), size, options=task.options, split=split)
    path = task.path if split == "train" else task.eval_path
    if path is None and split == "test":
        return None
    if task.name == "gsm8k":
        return gsm8k(path or "openai/gsm8k")
    if path is None:
        raise ValueError("task.name='file' needs task.path: a jsonl or parquet file in verl's schema")
    return verl_file(path, rule=task.rule, suffix=task.suffix)


def build_policy(config: Config, path: str | None = None) -> Policy:
    """Load the policy or, given a path, a reference model in the same precision."""
    model = config.model
    trained = path is None
    return load_policy(
        model.path if path is None else path,
        device=config.run.device,
        precision=model.precision,
        attention=model.attention,
        # A reference model is only evaluated: it needs neither checkpointed activations nor adapters.
        gradient_checkpointing=model.gradient_checkpointing and trained,
        lora_rank=model.lora_rank if trained else 0,
        lora_alpha=model.lora_alpha,
        chat=model.chat,
        seed=config.run.seed,
    )


def build_reference(config: Config) -> Policy | None:
    """Load the reference model of a KL penalty; that of `start` gets its weights after the warm start."""
    reference = config.model.reference
    # `start` loads the policy's own model again: its weights are overwritten after the warm start or on resume.
    return None if reference is None else build_policy(config, None if reference == "start" else reference)


def build_sampler(policy: Policy, rollout: RolloutConfig | None = None) -> Sampler:
    """Build the sampler of a policy; without a configuration the native one."""
    rollout = rollout or RolloutConfig()
    if rollout.precision is not None:
        policy = replace(policy, precision=rollout.precision)
    dtype = torch.bfloat16 if policy.precision == "bf16" else torch.float32
    if rollout.engine == "vllm":
        # vLLM reserves memory for this context, and refuses one longer than the model's position embeddings.
        wanted = rollout.max_prompt_tokens + rollout.max_new_tokens
        settings = VllmSettings(
            dtype=dtype,
            max_model_len=min(wanted, getattr(policy.causal_lm.config, "max_position_embeddings", None) or wanted),
            max_num_seqs=rollout.batch_size,
            gpu_memory_utilization=rollout.vllm_gpu_memory_utilization,
            options=rollout.vllm_options,
        )
        return VllmSampler(policy.model, policy.eos_token_ids, policy.autocast, settings)
    if policy.device.type == "cuda" and unsupported_reason(policy.model) is None:
        return PagedSampler(policy.model, policy.eos_token_ids, dtype, rollout.kv_cache_memory)
    return NativeSampler(policy.model, policy.eos_token_ids, policy.pad_token_id, policy.autocast)
