"""From a recipe to the parts of a run: task, policy, sampler."""

from __future__ import annotations

from typing import Literal

import torch

from trimtab.config import Config, RolloutConfig
from trimtab.policy import Policy, load_policy, pick_device
from trimtab.rollout import NativeSampler, PagedSampler, Sampler, VllmSampler, VllmSettings
from trimtab.rollout.paged import unsupported_reason
from trimtab.tasks import Arithmetic, GymTask, Task, gsm8k, verl_file


def set_threads(config: Config) -> None:
    """CPU threads as the recipe says; where it leaves that open and a GPU does the work, one: more would only spin."""
    threads = config.run.threads or (1 if pick_device(config.run.device).type == "cuda" else 0)
    if threads:
        torch.set_num_threads(threads)


def build_task(config: Config, split: Literal["train", "test"]) -> Task | None:
    """The training or held-out problems; None where a file task has no held-out ones."""
    task = config.task
    if task.name == "arithmetic":
        size = task.size if split == "train" else config.run.eval_problems
        return Arithmetic(task.family, task.digits, task.terms, task.form, size, split=split)
    if task.name.startswith("gym:"):
        size = task.size if split == "train" else config.run.eval_problems
        return GymTask(task.name.removeprefix("gym:"), size, options=task.options, split=split)
    path = task.path if split == "train" else task.eval_path
    if task.name == "gsm8k":
        return None if path is None and split == "test" else gsm8k(path or "openai/gsm8k")
    if task.name == "file":
        if path is None:
            if split == "test":
                return None
            raise ValueError("task.name='file' needs task.path: a jsonl or parquet file in verl's schema")
        return verl_file(path, rule=task.rule, suffix=task.suffix)
    raise ValueError(f"task.name={task.name!r}: there are arithmetic, gsm8k, file and gym:KIND")


def build_policy(config: Config, path: str | None = None) -> Policy:
    """The policy, or with a path the reference model in the same precision."""
    model = config.model
    own = path is None
    return load_policy(
        model.path if path is None else path,
        device=config.run.device,
        precision=model.precision,
        attention=model.attention,
        gradient_checkpointing=model.gradient_checkpointing and own,
        lora_rank=model.lora_rank if own else 0,
        lora_alpha=model.lora_alpha,
        chat=model.chat,
        seed=config.run.seed,
    )


def build_reference(config: Config) -> Policy | None:
    """The model that a KL penalty compares with; that of `start` gets its weights when the warm start is over."""
    reference = config.model.reference
    return None if reference is None else build_policy(config, None if reference == "start" else reference)


def build_sampler(policy: Policy, rollout: RolloutConfig | None = None) -> Sampler:
    """The sampler of the policy's own weights; the native one where nothing else is asked for."""
    if rollout is None or rollout.engine == "native":
        return _native(policy, rollout)
    wanted = rollout.max_prompt_tokens + rollout.max_new_tokens
    settings = VllmSettings(
        dtype=torch.bfloat16 if policy.precision == "bf16" else torch.float32,
        context=min(wanted, getattr(policy.causal_lm.config, "max_position_embeddings", None) or wanted),
        batch=rollout.batch_size,
        memory=rollout.vllm_gpu_memory_utilization,
        options=rollout.vllm_options,
    )
    return VllmSampler(policy.model, policy.eos_token_ids, policy.autocast, settings)


def _native(policy: Policy, rollout: RolloutConfig | None) -> Sampler:
    """The fast sampler on a GPU where it knows the model's family, else the general one."""
    if policy.device.type == "cuda" and unsupported_reason(policy.model) is None:
        dtype = torch.bfloat16 if policy.precision == "bf16" else torch.float32
        memory = RolloutConfig().kv_cache_memory if rollout is None else rollout.kv_cache_memory
        return PagedSampler(policy.model, policy.eos_token_ids, dtype, memory)
    return NativeSampler(policy.model, policy.eos_token_ids, policy.pad_token_id, policy.autocast)
