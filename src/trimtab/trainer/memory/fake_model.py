"""Run scoring, updates and sampling on a model of fake tensors, and return the memory they would take.

Under `FakeTensorMode` tensors have shapes, dtypes and lifetimes but no data. A forward and backward pass makes and
frees the same tensors in the same order with them as with real ones, so the peak of a model of any size is found in
seconds on any machine.

The passes are those of `trainer/model`. GPU kernels are replaced by functions that allocate what the kernels do:
flash attention keeps its inputs, its output and one number per head and token; the fused head one chunk of logits.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

from trimtab.data import SamplingOptions
from trimtab.objectives import moments
from trimtab.trainer.model import (
    Kernels,
    Policy,
    Precision,
    add_lora,
    enable_gradient_checkpointing,
    freeze_in_bf16,
    fuse_layers,
    unfuse_layers,
)
from trimtab.trainer.sampling import sample_tokens

ATTENTION = "trimtab_fake"
BLOCK = 512  # torch's CUDA allocator rounds sizes up to a multiple of this


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes alive by category, the peak of their sum, and the categories at the peak.

    A new tensor belongs to the category that is set; a lower-precision copy of a weight to `weight_copies`. The
    weights themselves are not counted.
    """

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: Counter[str] = Counter()
        self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self._category = "other"
        self._weights = {id(weight.untyped_storage()) for weight in weights}
        self._tracked: dict[int, list[Any]] = {key: ["weights", 0] for key in self._weights}

    @contextmanager
    def category(self, name: str) -> Iterator[None]:
        """Count the tensors made inside the block in this category."""
        before, self._category = self._category, name
        try:
            yield
        finally:
            self._category = before

    def move(self, tensor: Tensor, category: str) -> None:
        """Count a tensor in another category from now on."""
        entry = self._tracked[id(tensor.untyped_storage())]
        self.alive[entry[0]] -= entry[1]
        self.alive[category] += entry[1]
        entry[0] = category

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        # Autocast casts weights deep inside the model's code, so its copies are known only by their source.
        copy = func is torch.ops.aten._to_copy.default and id(args[0].untyped_storage()) in self._weights
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._track(tensor, "weight_copies" if copy else self._category)
        return out

    def _track(self, tensor: Tensor, category: str) -> None:
        # By storage, not by tensor: views and in-place results share one, and it lives as long as any of them.
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._tracked:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self._tracked[key] = [category, size]
        weakref.finalize(storage, self._free, key)
        self.alive[category] += size
        total = self.alive.total()
        if total > self.peak:
            self.peak, self.at_peak = total, self.alive.copy()

    def _free(self, key: int) -> None:
        category, size = self._tracked.pop(key)
        self.alive[category] -= size


@dataclass(frozen=True)
class MicroBatchShape:
    """The size of a forward pass: `rows` responses of `longest` tokens, and `chunk` rows of logits at a time.

    `packed`: without padding, through flash attention; else padded, with a mask. `fused`: the head computes gradients
    itself instead of leaving them to autograd.
    """

    rows: int
    longest: int
    chunk: int
    packed: bool
    fused: bool

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch, padding included."""
        return self.rows * self.longest


@dataclass(frozen=True)
class PassMemory:
    """Bytes of a pass beyond the weights: the peak, its categories, and the activations kept by the forward pass."""

    peak: int
    categories: Counter[str]
    activations: int = 0


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make tensors without data inside the block; an operation that needs data raises."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    log = logging.getLogger("torch._subclasses.fake_tensor")  # it logs a traceback before it raises
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with FakeTensorMode():
            yield
    finally:
        log.setLevel(level)


def fake_policy(
    shape: Any,
    precision: Precision,
    lora_rank: int = 0,
    gradient_checkpointing: bool = False,
    lora_targets: Sequence[str] = (),
    frozen_in_bf16: bool = False,
) -> Policy:
    """Build a policy from a model's configuration; call and use it inside `fake_tensors`."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, _attention)
    with torch.device("meta"):  # not fake from the start: PEFT moves its adapters, which fake parameters do not allow
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32, trust_remote_code=False)
        if lora_rank:
            model = add_lora(model, lora_rank, alpha=1, seed=0, targets=lora_targets)
        if frozen_in_bf16:
            freeze_in_bf16(model)
    _to_fake(model)
    if gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return Policy(model, None, torch.device("cpu"), precision)


def update_memory(policy: Policy, micro_batch: MicroBatchShape, *, first: bool) -> PassMemory:
    """Track one micro-batch forward and backward; all but the `first` of an update add to existing gradients."""
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    tracker = MemoryTracker(policy.model.parameters())
    policy.model.train()
    with tracker, policy.keep_autocast_cache():
        if not first:
            with tracker.category("gradients"):
                for parameter in trained:
                    parameter.grad = torch.empty_like(parameter)
        # Autograd makes gradients inside the backward pass; from then on they are gradients, not its temporaries.
        hooks = [p.register_post_accumulate_grad_hook(lambda p: tracker.move(p.grad, "gradients")) for p in trained]
        head = policy.head_tensors(1.0) if micro_batch.fused else None
        with tracker.category("activations"):
            hidden = _hidden(policy, micro_batch)
            hidden = hidden if head is None else hidden.to(head.weight.dtype)
        activations = tracker.alive["activations"]
        with tracker.category("head"):
            if head is None:
                end, gradient = _plain_head(policy, hidden, micro_batch.chunk), None
            else:
                end, gradient = hidden, _fused_head(policy, head.weight, hidden.detach(), micro_batch.chunk, tracker)
        with tracker.category("backward"):
            end.backward(gradient)
        # The policy is used for further passes, which must start without gradients and hooks.
        for hook in hooks:
            hook.remove()
        policy.model.zero_grad(set_to_none=True)
    return PassMemory(tracker.peak, tracker.at_peak, activations)


@torch.no_grad()
def scoring_memory(policy: Policy, micro_batch: MicroBatchShape) -> PassMemory:
    """Track one micro-batch through model and head without gradients."""
    tracker = MemoryTracker(policy.model.parameters())
    policy.model.eval()
    with tracker, policy.autocast():
        head = policy.head_tensors(1.0) if micro_batch.fused else None
        with tracker.category("activations"):
            hidden = _hidden(policy, micro_batch)
        with tracker.category("head"):
            if head is None:
                tokens = torch.zeros(micro_batch.tokens, dtype=torch.int64)
                for h, t in zip(hidden.split(micro_batch.chunk), tokens.split(micro_batch.chunk), strict=True):
                    moments(policy.logits(h, 1.0), t)
            else:
                hidden = hidden.to(head.weight.dtype)
                head.buffer(min(micro_batch.chunk, micro_batch.tokens))
    return PassMemory(tracker.peak, tracker.at_peak)


@torch.no_grad()
def sampling_memory(policy: Policy, prompts: int, prompt_tokens: int, options: SamplingOptions) -> PassMemory:
    """Track the native sampler's prefill and its last decoding step, when the KV cache is full."""
    tracker = MemoryTracker(policy.model.parameters())
    policy.model.eval()
    policy.causal_lm.set_attn_implementation("sdpa")  # the native sampler pads, which flash attention does not take
    rows, seen = prompts * options.samples, prompt_tokens + options.max_new_tokens - 1
    with tracker, policy.autocast(), tracker.category("sampling"):
        cache = _step(policy, prompts, prompt_tokens, prompt_tokens, None).past_key_values
        with tracker.category("cache"):
            cache.batch_repeat_interleave(options.samples)
            # Grown to its last length at once: the steps in between need less.
            for layer in cache.layers:
                layer.keys, layer.values = (
                    torch.cat([t, t.new_empty(rows, t.shape[1], seen - prompt_tokens - 1, t.shape[3])], 2)
                    for t in (layer.keys, layer.values)
                )
            logits = _step(policy, rows, 1, seen, cache).logits[:, -1]
        sample_tokens(logits, torch.zeros(rows, dtype=torch.int64), 0, options)
    return PassMemory(tracker.peak, tracker.at_peak)


def _step(policy: Policy, rows: int, tokens: int, seen: int, cache: Any) -> Any:
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    mask = torch.ones(rows, 1, tokens, seen, dtype=torch.bool)
    return policy.model(
        input_ids=ids, attention_mask=mask, position_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
    )


def _hidden(policy: Policy, micro_batch: MicroBatchShape) -> Tensor:
    """Return the hidden states that predict a response token; taken to be all of a micro-batch's."""
    rows, longest, options = micro_batch.rows, micro_batch.longest, dict[str, Any](attention_mask=None)
    policy.causal_lm.set_attn_implementation(ATTENTION if micro_batch.packed else "sdpa")
    if micro_batch.packed:
        fuse_layers(policy.causal_lm, FAKE_KERNELS)
        ids = torch.zeros(1, micro_batch.tokens, dtype=torch.int64)
        options |= {"cu_seq_lens_q": ids[0], "max_length_q": longest}
    else:
        unfuse_layers(policy.causal_lm)
        ids = torch.zeros(rows, longest, dtype=torch.int64)
        options["attention_mask"] = torch.ones(rows, 1, longest, longest, dtype=torch.bool)
    with policy.autocast():
        out = policy.backbone(input_ids=ids, position_ids=ids, use_cache=False, **options)
        hidden: Tensor = out.last_hidden_state.flatten(0, 1)
        return hidden.index_select(0, torch.zeros(micro_batch.tokens, dtype=torch.int64))


def _fused_head(policy: Policy, compute: Tensor, hidden: Tensor, chunk: int, tracker: MemoryTracker) -> Tensor:
    """Allocate what `head_gradients` does; return the gradient of the hidden states."""
    weight: Any = policy.lm_head.weight
    if weight.requires_grad and weight.grad is None:
        weight.grad = torch.empty_like(weight)
        tracker.move(weight.grad, "gradients")
    # Chunk after chunk reuses the same buffers, so one chunk has the peak of all.
    gradient, rows = torch.empty_like(hidden), hidden[:chunk]
    logits = compute.new_empty(len(rows), len(compute))
    product = rows.float() * 1.0  # coefficients are fp32, and so is what they multiply
    del logits, product
    return gradient


def _plain_head(policy: Policy, hidden: Tensor, chunk: int) -> Tensor:
    """Return a loss of the head by autograd; checkpointing computes each chunk's logits twice."""

    def head(some: Tensor, tokens: Tensor) -> Tensor:
        logits = policy.logits(some, 1.0)
        return logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(-1)

    with policy.autocast():
        tokens = torch.zeros(len(hidden), dtype=torch.int64)
        pieces = zip(hidden.split(chunk), tokens.split(chunk), strict=True)
        return torch.cat([checkpoint(head, h, t, use_reentrant=False) for h, t in pieces]).sum()


class _Flash(torch.autograd.Function):
    """Allocates what flash attention does, forward and backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        sums = query.new_empty(query.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, sums = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value))
        # The kernel accumulates dQ in fp32; with grouped queries it has dK and dV per query head before it sums them.
        _wide = torch.empty_like(query, dtype=torch.float32), torch.empty_like(sums)
        _grouped = (torch.empty_like(query), torch.empty_like(query)) if len(key[0]) < len(query[0]) else ()
        return dq, dk, dv


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attention with transformers' interface: inputs are (1, heads, tokens, D), the output is (1, tokens, heads, D)."""
    flat = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
    if torch.is_autocast_enabled("cpu"):
        flat = [tensor.to(torch.get_autocast_dtype("cpu")) for tensor in flat]
    return _flash(*flat).unsqueeze(0), None


def _flash(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    out: Tensor = _Flash.apply(query, key, value)  # type: ignore[no-untyped-call]
    return out


def _in_place(*tensors: Any, **named: Any) -> None:
    """Stand in for a kernel that writes into its arguments and allocates nothing."""


FAKE_KERNELS = Kernels(_in_place, _in_place, _in_place, _in_place, _in_place, _in_place, _flash)


def _to_fake(model: nn.Module) -> None:
    """Replace the meta parameters and buffers of a model by fake ones on the CPU; tied weights stay tied."""
    replaced: dict[int, Any] = {}  # by the meta parameter's id, so that a tied one is replaced by one tensor
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in replaced:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                    replaced[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = replaced[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
