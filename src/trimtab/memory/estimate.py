"""The forecast: how much memory a run will take, from its recipe alone, before a weight is loaded.

What lasts (weights, gradients, AdamW's state, the sampler's copy and cache) is multiplied out; what a pass needs while
it runs is counted by running it on tensors without data (`trimtab.memory.fake_model`). Four phases follow one another
in every step, and the run needs what the largest of them needs. Lengths are taken to be the longest that are allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Any, Literal

from torch import nn

from trimtab.config import Config
from trimtab.memory.fake_model import (
    Part,
    count_sampling,
    count_scoring,
    count_update,
    fake_policy,
    fake_tensors,
)
from trimtab.memory.model_shape import model_shape
from trimtab.memory.oom_advice import Phase
from trimtab.policy import Policy
from trimtab.rollout.paged import GRAIN, PAGE, PREFILL, bucket, head_size, unsupported_reason

Device = Literal["cpu", "cuda"]

WORKSPACE = 100 << 20  # what the GPU's libraries take for themselves through torch


@dataclass(frozen=True)
class Forecast:
    """Bytes, by what they are for.

    `copies` (of weights, in bf16), `head` and `backward` are those at the worst moment of an update; `activations` what
    its forward pass keeps. `sampler` is its copy of the weights and its buffers. The last four are the peaks of phases.
    """

    device: Device
    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    copies: int
    head: int
    backward: int
    sampler: int
    cache: int
    sampling: int
    scoring: int
    update: int
    step: int

    @property
    def phases(self) -> dict[Phase, int]:
        """The peak of every phase, in the order of a step."""
        return {"sampling": self.sampling, "scoring": self.scoring, "update": self.update, "step": self.step}

    @property
    def peak(self) -> int:
        """The most that is taken at one time."""
        return max(self.phases.values())

    @property
    def worst(self) -> Phase:
        """The phase that takes it."""
        return max(self.phases, key=lambda phase: self.phases[phase])

    @property
    def lasting(self) -> int:
        """What is there all the time."""
        return self.weights + self.optimizer + self.reference + self.sampler + self.cache


def forecast(config: Config, device: Device, memory: int | None = None) -> Forecast:
    """What a run will take on a device; with its `memory` the sampler's cache is held to its share of that."""
    model, shape = config.model, model_shape(config.model.path)
    with fake_tensors():
        policy = fake_policy(shape, model.precision, model.lora_rank, model.gradient_checkpointing)
        weights, trained = _bytes(policy.model.parameters()), _bytes(_trained(policy))
        part = largest_part(config, device)
        alone = part.tokens >= max(minibatches(config)) * longest_response(config)
        update = count_update(policy, part, first=alone)
        scoring = count_scoring(policy, part)
        sampling = count_rollout(config, device, policy, memory)
        widest = max((_bytes([p]) for p in _trained(policy)), default=0)
        reference = _reference(config, policy)
    on_gpu = device == "cuda"
    base = weights + 2 * trained + reference + sampling.sampler + sampling.cache + (WORKSPACE if on_gpu else 0)
    return Forecast(
        device=device,
        weights=weights,
        gradients=trained,
        optimizer=2 * trained,
        reference=reference,
        activations=update.kept,
        copies=update.accounts.get("copies", 0),
        head=update.accounts.get("head", 0),
        backward=update.accounts.get("backward", 0),
        sampler=sampling.sampler,
        cache=sampling.cache,
        sampling=base + sampling.passing,
        scoring=base + scoring.peak,
        update=base + update.peak,
        step=base + trained + (0 if on_gpu else 2 * widest),  # the GPU's AdamW is one kernel and needs no room
    )


@dataclass(frozen=True)
class Rollout:
    """The sampler's bytes: what it keeps from step to step, and the most that it takes beyond that in one."""

    sampler: int
    cache: int
    passing: int


def count_rollout(config: Config, device: Device, policy: Policy, memory: int | None) -> Rollout:
    """What sampling takes: vLLM its share, the paged sampler its cache, the plain one what it makes anew every time."""
    if config.rollout.engine == "vllm":
        return Rollout(0, 0, int(config.rollout.vllm_gpu_memory_utilization * memory) if memory else 0)
    if device == "cuda" and unsupported_reason(policy.model) is None:
        return _paged(config, policy, memory)
    rollout = config.rollout
    prompts = min(sequences_at_once(config), max(rollout.batch_size, rollout.samples)) // rollout.samples
    options = config.sampling_options(rollout.samples)
    counted = count_sampling(policy, prompts, rollout.max_prompt_tokens, options)
    return Rollout(0, 0, counted.peak)


def _paged(config: Config, policy: Policy, memory: int | None) -> Rollout:
    rollout, shape = config.rollout, policy.causal.config
    size = 2 if config.model.precision == "bf16" else 4
    heads, kv, d = shape.num_attention_heads, shape.num_key_value_heads, head_size(shape)
    linear = sum(p.numel() for p in _linear_weights(policy.causal))
    rows = bucket(min(rollout.batch_size, max(sequences_at_once(config), _evaluated(config))))
    cache = pool_bytes(
        layers=shape.num_hidden_layers,
        kv_heads=kv,
        head_dim=d,
        bytes_per_value=size,
        sequences=rows,
        tokens=longest_response(config),
        share=rollout.kv_cache_memory,
        memory=memory,
    )
    # A row's logits, hidden states on their way through a layer, and its tokens with their log-probabilities.
    layer = (2 * heads + 2 * kv) * d + 2 * shape.hidden_size + 3 * shape.intermediate_size
    row = (shape.vocab_size + layer) * size + 4 * shape.hidden_size + 8 * rollout.max_new_tokens
    # Prompts are read many tokens at a time: a layer's values, those of the last one's MLP, and queries being turned.
    prompt = layer * size + (heads + kv) * d * size + 4 * shape.hidden_size + 16 * heads * d
    reading = min(PREFILL, rollout.prompts * rollout.max_prompt_tokens) * prompt
    # Weights with an adapter are made and copied one after the other: what is added, and the sum. The head has none.
    adapted = [p.numel() for p in _linear_weights(policy.causal) if p is not policy.head.weight]
    merged = 8 * max(adapted) if config.model.lora_rank else 0
    return Rollout(linear * size + rows * row, cache, max(reading, merged))


def pool_bytes(
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    bytes_per_value: int,
    sequences: int,
    tokens: int,
    share: float,
    memory: int | None = None,
) -> int:
    """The sampler's cache: pages for so many sequences of so many tokens, or its share of the device's memory."""
    page = layers * 2 * kv_heads * head_dim * bytes_per_value * PAGE
    each = ceil(tokens / (PAGE * GRAIN)) * GRAIN
    pages = sequences * each if memory is None else min(sequences * each, int(share * memory) // page)
    return page * max(pages, 2 * each + 2)


def sequences_at_once(config: Config) -> int:
    """Responses that are wanted at one time: those of a step, or of a round of dynamic sampling."""
    rollout = config.rollout
    prompts = int(rollout.prompts * rollout.dynamic_oversample) if rollout.dynamic_sampling else rollout.prompts
    return prompts * rollout.samples


def _evaluated(config: Config) -> int:
    """Held-out problems that are answered at one time; none where there is no evaluation."""
    generated = config.task.name not in {"file", "gsm8k"}
    return config.run.eval_problems if config.run.eval_every and (generated or config.task.eval_path) else 0


def minibatches(config: Config) -> list[int]:
    """Responses in each mini-batch of a step: whole groups, as evenly as they divide."""
    prompts, updates = config.rollout.prompts, config.update.per_step
    bounds = [round(prompts * k / updates) for k in range(updates + 1)]
    return [(high - low) * config.rollout.samples for low, high in pairwise(bounds) if high > low]


def longest_response(config: Config) -> int:
    """Tokens of a prompt and a response that are both as long as they may be."""
    return config.rollout.max_prompt_tokens + config.rollout.max_new_tokens


def largest_part(config: Config, device: Device) -> Part:
    """The most that one forward pass holds: packed, the token budget; padded, as many of the longest as go in."""
    update, longest, responses = config.update, longest_response(config), max(minibatches(config))
    chunk, fused = update.head_chunk, device == "cuda"
    if fused and config.model.precision == "bf16" and config.model.attention in {None, "sdpa"}:
        return Part(1, min(max(update.token_budget, longest), responses * longest), chunk, packed=True, fused=True)
    return Part(min(responses, max(1, update.token_budget // longest)), longest, chunk, packed=False, fused=fused)


def _trained(policy: Policy) -> list[nn.Parameter]:
    return [p for p in policy.model.parameters() if p.requires_grad]


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _linear_weights(causal: Any) -> Iterator[nn.Parameter]:
    """The weights of linear maps, the head's among them."""
    for name, module in causal.named_modules():
        if isinstance(module, nn.Linear) and "lora_" not in name:
            yield from (p for p in module.parameters(recurse=False))


def _reference(config: Config, policy: Policy) -> int:
    path = config.model.reference
    if path is None:
        return 0
    if path == "start":
        return _bytes(policy.model.parameters())
    return _bytes(fake_policy(model_shape(path), config.model.precision).model.parameters())
