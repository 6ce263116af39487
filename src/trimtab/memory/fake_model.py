"""Models without weights, and their passes: what scoring, an update and sampling would keep in memory.

The passes are those of `trimtab.policy`, with what a GPU's kernels do replaced by tensors of the sizes they work with:
attention keeps its inputs, its output and one number per head and token, never a matrix of tokens by tokens; the head
works on one chunk of logits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trimtab.memory.tracker import Ledger
from trimtab.objectives import moments
from trimtab.policy import Kernels, Policy, Precision, fuse_layers, unfuse_layers
from trimtab.rollout import SamplingOptions, sample_tokens

ATTENTION = "trimtab_weightless"


@dataclass(frozen=True)
class Part:
    """What one forward pass holds: responses of a length, and the rows of logits made at one time.

    `packed`: end to end, through flash attention; else padded, with a mask. `fused`: the head forms its own gradients.
    """

    rows: int
    longest: int
    chunk: int
    packed: bool
    fused: bool

    @property
    def tokens(self) -> int:
        """Tokens of the part."""
        return self.rows * self.longest


@dataclass(frozen=True)
class Counted:
    """A pass: the most bytes alive beyond the weights, by account at that moment, and what the forward pass kept."""

    peak: int
    accounts: dict[str, int]
    kept: int = 0


@contextmanager
def fake_tensors() -> Iterator[None]:
    """In here tensors have no data. What cannot be done without raises; torch's log of it is for its developers."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with FakeTensorMode():
            yield
    finally:
        log.setLevel(level)


def fake_policy(shape: Any, precision: Precision, lora_rank: int = 0, gradient_checkpointing: bool = False) -> Policy:
    """A policy from a model's configuration alone: call it, and everything done with it, under `fake_tensors`."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, _attention)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
        if lora_rank:
            model = _with_lora(model, lora_rank)
    _to_fake(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if lora_rank:
            model.enable_input_require_grads()
    return Policy(model, None, torch.device("cpu"), precision)


def count_update(policy: Policy, part: Part, *, first: bool) -> Counted:
    """One part forward and backward. The `first` of an update finds no gradients; the others add to them."""
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    ledger = Ledger(policy.model.parameters())
    policy.model.train()
    with ledger, policy.unchanging():
        if not first:
            with ledger.booking("gradients"):
                for parameter in trained:
                    parameter.grad = torch.empty_like(parameter)
        hooks = [p.register_post_accumulate_grad_hook(lambda p: ledger.move(p.grad, "gradients")) for p in trained]
        head = policy.head_parts(1.0) if part.fused else None
        with ledger.booking("activations"):
            hidden = _hidden(policy, part)
            hidden = hidden if head is None else hidden.to(head.weight.dtype)
        kept = ledger.alive["activations"]
        with ledger.booking("head"):
            if head is None:
                end, gradient = _plain_head(policy, hidden, part.chunk), None
            else:
                end, gradient = hidden, _fused_head(policy, head.weight, hidden.detach(), part.chunk, ledger)
        with ledger.booking("backward"):
            end.backward(gradient)
        for hook in hooks:
            hook.remove()
        policy.model.zero_grad(set_to_none=True)
    return Counted(ledger.peak, dict(ledger.at_peak), kept)


@torch.no_grad()
def count_scoring(policy: Policy, part: Part) -> Counted:
    """One part through the model without gradients, and its rows through the head."""
    ledger = Ledger(policy.model.parameters())
    policy.model.eval()
    with ledger, policy.autocast():
        head = policy.head_parts(1.0) if part.fused else None
        with ledger.booking("activations"):
            hidden = _hidden(policy, part)
        with ledger.booking("head"):
            if head is None:
                tokens = torch.zeros(part.tokens, dtype=torch.int64)
                for h, t in zip(hidden.split(part.chunk), tokens.split(part.chunk), strict=True):
                    moments(policy.logits(h, 1.0), t)
            else:
                hidden = hidden.to(head.weight.dtype)
                head.buffer(min(part.chunk, part.tokens))
    return Counted(ledger.peak, dict(ledger.at_peak))


@torch.no_grad()
def count_sampling(policy: Policy, prompts: int, prompt_tokens: int, options: SamplingOptions) -> Counted:
    """The native sampler's prefill, and its last step: a full cache, the model over one token of each, and the draw."""
    ledger = Ledger(policy.model.parameters())
    policy.model.eval()
    policy.causal.set_attn_implementation("sdpa")
    rows, seen = prompts * options.samples, prompt_tokens + options.max_new_tokens - 1
    with ledger, policy.autocast(), ledger.booking("sampling"):
        cache = _step(policy, prompts, prompt_tokens, prompt_tokens, None).past_key_values
        with ledger.booking("cache"):
            cache.batch_repeat_interleave(options.samples)
            for layer in cache.layers:
                layer.keys, layer.values = (
                    torch.cat([t, t.new_empty(rows, t.shape[1], seen - prompt_tokens - 1, t.shape[3])], 2)
                    for t in (layer.keys, layer.values)
                )
            logits = _step(policy, rows, 1, seen, cache).logits[:, -1]
        sample_tokens(logits, torch.zeros(rows, dtype=torch.int64), 0, options)
    return Counted(ledger.peak, dict(ledger.at_peak))


def _step(policy: Policy, rows: int, tokens: int, seen: int, cache: Any) -> Any:
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    mask = torch.ones(rows, 1, tokens, seen, dtype=torch.bool)
    return policy.model(
        input_ids=ids, attention_mask=mask, position_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
    )


def _hidden(policy: Policy, part: Part) -> Tensor:
    """The hidden states of a part, and of these (as they may all be) the ones that predict a response token."""
    policy.causal.set_attn_implementation(ATTENTION if part.packed else "sdpa")
    if part.packed:
        fuse_layers(policy.causal, NO_KERNELS)
    else:
        unfuse_layers(policy.causal)
    shape = (1, part.tokens) if part.packed else (part.rows, part.longest)
    ids = torch.zeros(shape, dtype=torch.int64)
    mask = None if part.packed else torch.ones(part.rows, 1, part.longest, part.longest, dtype=torch.bool)
    starts = {"cu_seq_lens_q": ids[0], "max_length_q": part.longest} if part.packed else {}
    with policy.autocast():
        out = policy.backbone(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False, **starts)
        rows: Tensor = out.last_hidden_state.flatten(0, 1)
        return rows.index_select(0, torch.zeros(part.tokens, dtype=torch.int64))


def _fused_head(policy: Policy, compute: Tensor, hidden: Tensor, chunk: int, ledger: Ledger) -> Tensor:
    """What `head_gradients` works with; the gradient of the hidden states."""
    weight: Any = policy.head.weight
    if weight.requires_grad and weight.grad is None:
        weight.grad = torch.empty_like(weight)
        ledger.move(weight.grad, "gradients")
    gradient, rows = torch.empty_like(hidden), hidden[:chunk]
    logits = compute.new_empty(len(rows), len(compute))
    product = rows.float() * 1.0  # coefficients are fp32, and so is what they multiply
    del logits, product
    return gradient


def _plain_head(policy: Policy, hidden: Tensor, chunk: int) -> Tensor:
    """The head by autograd, each chunk's logits made twice; a loss."""

    def head(some: Tensor, tokens: Tensor) -> Tensor:
        logits = policy.logits(some, 1.0)
        return logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(-1)

    with policy.autocast():
        tokens = torch.zeros(len(hidden), dtype=torch.int64)
        pieces = zip(hidden.split(chunk), tokens.split(chunk), strict=True)
        return torch.cat([checkpoint(head, h, t, use_reentrant=False) for h, t in pieces]).sum()


class _Flash(torch.autograd.Function):
    """Attention as flash kernels keep it: inputs, output, one number per head and token; backward has its own room."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        sums = query.new_empty(query.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, sums = ctx.saved_tensors
        made = tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value))
        # The kernel adds up d query in fp32, and has d key and d value for every query head before they are summed.
        _wide = torch.empty_like(query, dtype=torch.float32), torch.empty_like(sums)
        _grouped = (torch.empty_like(query), torch.empty_like(query)) if len(key[0]) < len(query[0]) else ()
        return made[0], made[1], made[2]


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attention as transformers asks for it: tensors are (1, heads, tokens, D), the answer (1, tokens, heads, D)."""
    flat = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
    if torch.is_autocast_enabled("cpu"):
        flat = [tensor.to(torch.get_autocast_dtype("cpu")) for tensor in flat]
    return _flash(*flat).unsqueeze(0), None


def _flash(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    out: Tensor = _Flash.apply(query, key, value)  # type: ignore[no-untyped-call]
    return out


def _nothing(*tensors: Any) -> None:
    """A kernel: it writes into what it is given, and makes nothing."""


NO_KERNELS = Kernels(_nothing, _nothing, _nothing, _nothing, _nothing, _nothing, _flash)


def _with_lora(model: Any, rank: int) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError("model.lora_rank needs peft: pip install 'trimtab[lora]'") from None
    return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))


def _to_fake(model: nn.Module) -> None:
    """Parameters and buffers of a model on the meta device become fake ones on the CPU; what was tied stays tied."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
