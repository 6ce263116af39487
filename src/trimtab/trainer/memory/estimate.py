"""Estimate the memory of a run from its recipe, before a weight is loaded.

What stays allocated (weights, gradients, AdamW's state, the sampler's copy of the weights and KV cache) is computed
from sizes; what a pass needs while it runs is tracked on fake tensors (`fake_model.py`). A step has four phases, and
the run needs what the largest of them does. Every prompt and response is taken to be as long as allowed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from torch import nn

from trimtab.bounded_http import HttpError, fetch
from trimtab.trainer.config import Config, base_model
from trimtab.trainer.memory.fake_model import (
    MicroBatchShape,
    fake_policy,
    fake_tensors,
    sampling_memory,
    scoring_memory,
    update_memory,
)
from trimtab.trainer.model import (
    DEMO_MODELS,
    Policy,
    check_config,
    check_counts,
    demo_model,
    is_hub_model,
    read_config,
)
from trimtab.trainer.parallel import linear_parameters
from trimtab.trainer.sampling import paged

Device = Literal["cpu", "cuda"]
Phase = Literal["sampling", "scoring", "update", "optimizer_step"]
DURING: dict[Phase, str] = {
    "sampling": "while sampling",
    "scoring": "while scoring responses",
    "update": "in an update",
    "optimizer_step": "in the optimizer step",
}

WORKSPACE = 100 << 20  # what cuBLAS and other GPU libraries allocate through torch
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


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated bytes, by what they are for; the last four are the peaks of the phases.

    `weight_copies` (in bf16), `head` and `backward` are those at the peak of an update, `activations` what its forward
    pass keeps. `sampler` is the sampler's copy of the weights and its buffers.
    """

    device: Device
    weights: int
    gradients: int
    optimizer_state: int
    reference: int
    activations: int
    weight_copies: int
    head: int
    backward: int
    sampler: int
    kv_cache: int
    sampling: int
    scoring: int
    update: int
    optimizer_step: int

    @property
    def phases(self) -> dict[Phase, int]:
        """The peak of every phase, in the order of a step."""
        return {phase: getattr(self, phase) for phase in DURING}

    @property
    def peak(self) -> int:
        """The largest peak of all phases."""
        return max(self.phases.values())

    @property
    def worst_phase(self) -> Phase:
        """The phase with the largest peak."""
        return max(self.phases, key=lambda phase: self.phases[phase])


def estimate_memory(
    config: Config,
    device: Device,
    memory: int | None = None,
    processes: int | None = None,
    frozen_in_bf16: bool | None = None,
) -> MemoryEstimate:
    """Estimate what a run needs on a device; the KV cache is limited to its share of the device's `memory`.

    Without `memory` that is the memory of the smallest device that the run fits on. With a number of `processes` it is
    what each of them needs. `frozen_in_bf16` is by default what the recipe says.
    """
    halved = config.frozen_in_bf16 if frozen_in_bf16 is None else frozen_in_bf16
    if config.model.shard and processes:
        whole = config.model_copy(update={"model": config.model.model_copy(update={"shard": False})})
        estimate = split_layers(_estimate(whole, device, memory, processes, halved), config, processes)
    else:
        estimate = _estimate(config, device, memory, processes, halved)
    return _on_smallest_device(estimate, config.rollout.kv_cache_memory) if memory is None else estimate


def _on_smallest_device(estimate: MemoryEstimate, share: float) -> MemoryEstimate:
    """Return the estimate with a KV cache of at most this share of the memory that all of it takes."""
    rest = estimate.peak - estimate.kv_cache
    less = estimate.kv_cache - min(estimate.kv_cache, int(rest * share / (1 - share)))
    sizes = {name: getattr(estimate, name) - less for name in ("kv_cache", *DURING)}
    return replace(estimate, **sizes)


def _estimate(
    config: Config, device: Device, memory: int | None, processes: int | None, halved: bool
) -> MemoryEstimate:
    config = share_of(config, processes or 1)
    model = config.model
    with fake_tensors():
        policy = _policy(config, halved)
        parameters = [p for p in policy.model.parameters() if p.requires_grad]
        weights, trained = _bytes(policy.model.parameters()), _bytes(parameters)
        micro_batch = largest_micro_batch(config, device)
        # With several micro-batches the gradients of the first are already there in the backward pass of the others.
        # Several processes allocate them all before the first.
        all_at_once = micro_batch.tokens >= max(minibatches(config)) * longest_response(config)
        update = update_memory(policy, micro_batch, first=all_at_once and processes is None)
        scoring = scoring_memory(policy, micro_batch)
        sampler = sampler_memory(config, device, policy, memory)
        widest = max((_bytes([p]) for p in parameters), default=0)
        reference = 0
        if model.reference == "start":  # a frozen copy of the policy as it was before training
            reference = weights
        elif model.reference is not None:
            reference = _bytes(
                fake_policy(model_shape(base_model(model.reference)), model.precision).model.parameters()
            )
    on_gpu = device == "cuda"
    state = 2 * trained // (processes or 1)
    slices = state if processes else 0
    base = weights + state + reference + sampler.buffers + sampler.kv_cache + (WORKSPACE if on_gpu else 0)
    return MemoryEstimate(
        device=device,
        weights=weights,
        gradients=trained,
        optimizer_state=state,
        reference=reference,
        activations=update.activations,
        weight_copies=update.categories["weight_copies"],
        head=update.categories["head"],
        backward=update.categories["backward"],
        sampler=sampler.buffers,
        kv_cache=sampler.kv_cache,
        sampling=base + sampler.temporary,
        scoring=base + scoring.peak,
        update=base + update.peak,
        # On a GPU AdamW is one fused kernel without temporaries; on a CPU it makes two the size of a weight. Each of
        # several processes updates a slice of all weights in one, and has its gradients and weights apart.
        optimizer_step=base + trained + (0 if on_gpu else 2 * (state // 2 if processes else widest)) + slices,
    )


def _policy(config: Config, frozen_in_bf16: bool = False) -> Policy:
    model = config.model
    shape = model_shape(base_model(model.path))
    return fake_policy(
        shape, model.precision, model.lora_rank, model.gradient_checkpointing, model.lora_targets, frozen_in_bf16
    )


def split_layers(estimate: MemoryEstimate, config: Config, processes: int) -> MemoryEstimate:
    """Return the estimate of a process that has a part of the layers' linear maps (`model.shard`) instead of all."""
    model = config.model
    with fake_tensors():
        policy = _policy(config)
        layers = next(child for child in policy.backbone.children() if isinstance(child, nn.ModuleList))
        sizes = [_bytes(linear_parameters(layer)) for layer in layers]
        trained = sum(sizes) if not model.lora_rank else 0
    half = 2 if model.precision == "bf16" else 1  # layers are gathered in the compute type
    split, linear = 1 - 1 / processes, sum(sizes)
    weights, gradients = int(linear * split), int(trained * split)
    # Autocast makes no copies of weights that come in its type. At most three layers are gathered at a time.
    copies = (linear // 2 if half == 2 else 0) - 3 * max(sizes) // half
    on_its_way = max(sizes) if trained else 0  # the gradients of one layer, before they are summed and split
    reference = weights if model.reference is not None else 0
    # The sampler on a CPU computes with the policy's own layers.
    gathered = linear // half if estimate.device == "cpu" else 0
    return replace(
        estimate,
        weights=estimate.weights - weights,
        gradients=estimate.gradients - gradients,
        reference=estimate.reference - reference,
        weight_copies=estimate.weight_copies - copies,
        sampling=estimate.sampling - weights - reference + gathered,
        scoring=estimate.scoring - weights - reference - copies,
        update=estimate.update - weights - reference - copies - gradients + on_its_way,
        # AdamW updates the parts of layers in place.
        optimizer_step=estimate.optimizer_step - weights - reference - gradients - 2 * trained // processes,
    )


def share_of(config: Config, processes: int) -> Config:
    """Return the recipe with what one of several processes samples, evaluates and trains on, the largest share."""
    if processes == 1:
        return config
    rollout = config.rollout.model_copy(update={"prompts": -(-config.rollout.prompts // processes)})
    run = config.run.model_copy(update={"eval_problems": -(-config.run.eval_problems // processes)})
    return config.model_copy(update={"rollout": rollout, "run": run})


@dataclass(frozen=True)
class SamplerMemory:
    """The sampler's bytes: what it keeps from step to step, and the most that it allocates beyond that."""

    buffers: int
    kv_cache: int
    temporary: int


def sampler_memory(config: Config, device: Device, policy: Policy, memory: int | None) -> SamplerMemory:
    """Estimate what sampling takes with vLLM, the paged sampler or the native one."""
    policy = replace(policy, precision=config.rollout.precision or policy.precision)
    if config.rollout.engine == "vllm":
        return SamplerMemory(0, 0, int(config.rollout.vllm_gpu_memory_utilization * memory) if memory else 0)
    if device == "cuda" and paged.unsupported_reason(policy.model) is None:
        return _paged_sampler_memory(config, policy, memory)
    rollout = config.rollout
    # The native sampler takes whole groups, at least one, even if that is more than the batch size.
    prompts = min(sequences_at_once(config), max(rollout.batch_size, rollout.samples)) // rollout.samples
    options = config.sampling_options(rollout.samples)
    # Replies are in the KV cache as prompts are.
    given = rollout.max_prompt_tokens + rollout.max_observed_tokens
    return SamplerMemory(0, 0, sampling_memory(policy, prompts, given, options).peak)


def _paged_sampler_memory(config: Config, policy: Policy, memory: int | None) -> SamplerMemory:
    rollout = config.rollout
    shape = policy.causal_lm.config
    size = 4 if policy.precision == "fp32" else 2
    heads = shape.num_attention_heads
    kv_heads = shape.num_key_value_heads
    head_dim = paged.get_head_dim(shape)
    # The sampler keeps a copy of the linear weights, the head's included, in its own precision and layout.
    layers = [m for name, m in policy.causal_lm.named_modules() if isinstance(m, nn.Linear) and "lora_" not in name]
    linear = [p for module in layers for p in module.parameters(recurse=False)]
    # CUDA graphs are captured for a few batch sizes, so buffers have the next larger one.
    rows = paged.graph_size(min(rollout.batch_size, max(sequences_at_once(config), _evaluated(config))))
    token = shape.num_hidden_layers * 2 * kv_heads * head_dim * size
    limit = None if memory is None else int(rollout.kv_cache_memory * memory)
    # A row's logits, the hidden states inside one layer, and its tokens with their log-probs.
    layer = (2 * heads + 2 * kv_heads) * head_dim + 2 * shape.hidden_size + 3 * shape.intermediate_size
    row = (shape.vocab_size + layer) * size + 4 * shape.hidden_size + 8 * rollout.max_new_tokens
    # Prefill works on many tokens at a time: one layer's values, Q and K in RoPE, and their fp32 intermediates.
    prompt = layer * size + (heads + kv_heads) * head_dim * size + 4 * shape.hidden_size + 16 * heads * head_dim
    prefill = min(paged.MAX_PREFILL_TOKENS, rollout.prompts * rollout.max_prompt_tokens) * prompt
    # LoRA weights are merged one after the other: the product in fp32 and the sum. The head has no adapter.
    adapted = [p.numel() for p in linear if p is not policy.lm_head.weight]
    merged = 8 * max(adapted) if config.model.lora_rank else 0
    kv_cache = kv_cache_bytes(token, rows, longest_response(config), limit)
    return SamplerMemory(sum(p.numel() for p in linear) * size + rows * row, kv_cache, max(prefill, merged))


def kv_cache_bytes(token_bytes: int, sequences: int, tokens: int, limit: int | None = None) -> int:
    """Return the size of a KV cache with pages for so many sequences of so many tokens, or up to a limit in bytes."""
    page, pages_each = token_bytes * paged.PAGE_SIZE, paged.pages_per_sequence(tokens)
    budget = sequences * pages_each if limit is None else limit // page
    return page * paged.num_cache_pages(sequences, pages_each, budget)


def sequences_at_once(config: Config) -> int:
    """Return how many responses are sampled at a time: a step's, or a round's if refused groups are replaced."""
    rollout = config.rollout
    prompts = int(rollout.prompts * rollout.dynamic_oversample) if config.gates else rollout.prompts
    return prompts * rollout.samples


def _evaluated(config: Config) -> int:
    """Return how many held-out problems an evaluation samples at a time; 0 without one."""
    return config.run.eval_problems if config.run.eval_every and config.task.has_held_out_problems else 0


def minibatches(config: Config) -> list[int]:
    """Return the number of responses in each mini-batch of a step: whole groups, as evenly as they divide."""
    prompts = config.rollout.prompts
    updates = config.update.per_step
    bounds = [round(prompts * k / updates) for k in range(updates + 1)]
    return [(high - low) * config.rollout.samples for low, high in pairwise(bounds) if high > low]


def longest_response(config: Config) -> int:
    """Return the tokens of the longest prompt and response that the recipe allows, replies of tools included."""
    rollout = config.rollout
    return rollout.max_prompt_tokens + rollout.max_new_tokens + rollout.max_observed_tokens


def largest_micro_batch(config: Config, device: Device) -> MicroBatchShape:
    """Return the largest forward pass: packed up to the token budget, or padded to the longest response."""
    update = config.update
    longest = longest_response(config)
    responses = max(minibatches(config))
    chunk = update.head_chunk
    fused = device == "cuda"
    # Packing needs flash attention, which is there in bf16 on a GPU only.
    if fused and config.model.precision == "bf16" and config.model.attention in {None, "sdpa"}:
        tokens = min(max(update.token_budget, longest), responses * longest)
        return MicroBatchShape(1, tokens, chunk, packed=True, fused=True)
    # Padded: a response longer than the budget still goes through, by itself.
    rows = min(responses, max(1, update.token_budget // longest))
    return MicroBatchShape(rows, longest, chunk, packed=False, fused=fused)


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


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
    # `from_pretrained` would retry for minutes without a network; a dry run should not wait for that.
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
