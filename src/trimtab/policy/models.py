"""The policy: a causal LM of transformers and its tokenizer, with what scoring and sampling need of them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trimtab.policy.batch_tokenize import decode_texts, encode_texts
from trimtab.policy.demo_model import demo_model, demo_tokenizer
from trimtab.policy.head import Head
from trimtab.policy.layers import fuse_layers, gpu_kernels, unfuse_layers, why_not_fused
from trimtab.policy.packed import Packed, packed_hidden, use_packed_attention, why_not_packed
from trimtab.policy.smollm2 import smollm2_folder

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Policy:
    """A model, its tokenizer, and how to run them. The weights are fp32; bf16 is autocast over them.

    `packed`: forward passes take sequences end to end instead of padded ones (`with_packing`).
    """

    model: Any
    tokenizer: Any
    device: torch.device
    precision: Precision = "fp32"
    chat: bool = True
    packed: bool = False

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision that forward passes run in."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def unchanging(self) -> AbstractContextManager[Any]:
        """Around forward and backward passes between which no weight changes: bf16 copies of weights are made once.

        Autocast keeps its copies until the outermost context ends, be it one that casts nothing.
        """
        return nullcontext() if self.precision == "fp32" else torch.autocast(self.device.type, enabled=False)

    @cached_property
    def causal(self) -> Any:
        """The causal LM itself, without what LoRA wraps around it."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def backbone(self) -> Any:
        """The causal LM without its head."""
        return getattr(self.causal, self.causal.base_model_prefix)

    @property
    def head(self) -> nn.Module:
        """From hidden states to logits."""
        head: nn.Module = self.causal.get_output_embeddings()
        return head

    def hidden(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The hidden states under the head, (rows, positions, width)."""
        states: Tensor = self.backbone(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        return states

    def hidden_packed(self, packed: Packed) -> Tensor:
        """The hidden states under the head of sequences end to end, (tokens, width)."""
        return packed_hidden(self.backbone, packed)

    def logits(self, hidden: Tensor, temperature: float) -> Tensor:
        """Logits at the sampling temperature in fp32, soft-capped where the model does so."""
        logits: Tensor = self.head(hidden).float()
        cap = getattr(self.causal.config, "final_logit_softcapping", None)
        if cap:
            logits = torch.tanh(logits / cap) * cap
        return logits if temperature == 1 else logits / temperature

    def head_parts(self, temperature: float) -> Head | None:
        """The head as tensors in the precision of forward passes; None where it is more than a linear map."""
        linear = self.head
        if type(linear) is not nn.Linear:
            return None
        dtype = torch.bfloat16 if self.precision == "bf16" else linear.weight.dtype
        bias = None if linear.bias is None else linear.bias.detach().to(dtype)
        cap = getattr(self.causal.config, "final_logit_softcapping", None)
        return Head(linear.weight.detach().to(dtype), bias, cap, temperature)

    def fused_head(self, temperature: float, wanted: bool | None) -> Head | None:
        """The head for the fused pass where that is wanted and possible; None wants it on a GPU."""
        wanted = self.device.type == "cuda" if wanted is None else wanted
        return self.head_parts(temperature) if wanted else None

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end a response."""
        ends = getattr(self.causal.generation_config, "eos_token_id", None)
        listed = ends if isinstance(ends, list) else [ends]
        found = {token for token in (*listed, self.tokenizer.eos_token_id) if token is not None}
        if not found:
            raise ValueError(
                "neither the model nor the tokenizer names an end-of-text token: responses would never end"
            )
        return frozenset(found)

    @property
    def pad_token(self) -> int:
        """Any token will do where the mask is 0."""
        pad = self.tokenizer.pad_token_id
        return min(self.end_tokens) if pad is None else int(pad)

    def encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """A prompt's tokens: by the chat template where there is one, else the plain text."""
        ids: list[int] = self.tokenizer.encode(self._prompt_text(messages), add_special_tokens=not self.chat)
        return ids

    def encode_many(self, prompts: Sequence[Sequence[Mapping[str, str]]]) -> list[list[int]]:
        """The tokens of many prompts, which a tokenizer does in parallel."""
        return encode_texts(self.tokenizer, [self._prompt_text(messages) for messages in prompts], not self.chat)

    def _prompt_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        if self.chat and getattr(self.tokenizer, "chat_template", None):
            text: str = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
            return text
        return "\n".join(message["content"] for message in messages)

    def encode_solution(self, text: str) -> list[int]:
        """A worked solution as a response: its tokens and the end."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        end = self.tokenizer.eos_token_id
        return [*ids, end if end is not None else min(self.end_tokens)]

    def decode(self, tokens: Sequence[int]) -> str:
        """A response's text, without special tokens."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def decode_many(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """The texts of many responses, which a tokenizer does in parallel."""
        return decode_texts(self.tokenizer, responses)


def load_policy(
    path: str,
    *,
    device: str = "auto",
    precision: Precision = "fp32",
    attention: str | None = None,
    gradient_checkpointing: bool = False,
    lora_rank: int = 0,
    lora_alpha: int = 32,
    chat: bool = True,
    seed: int = 0,
) -> Policy:
    """A policy by path: a folder or hub name, `demo`, or `smollm2`."""
    where = pick_device(device)
    model, tokenizer = _demo(seed) if path == "demo" else _pretrained(path, attention)
    if lora_rank:
        model = _with_lora(model, lora_rank, lora_alpha, seed)
    if where.type == "cuda" and where.index is not None:
        torch.cuda.set_device(where)  # where Triton's kernels run
    model.to(where)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if lora_rank:
            model.enable_input_require_grads()
    policy = Policy(model, tokenizer, where, precision, chat)
    _check_head(policy)
    # In fp32 each sequence would go through attention by itself: padding is faster.
    return with_packing(policy) if where.type == "cuda" and precision == "bf16" else policy


def with_packing(policy: Policy) -> Policy:
    """The policy with forward passes without padding; as it was, with a warning, where its model cannot do that."""
    before = policy.causal.config._attn_implementation
    if before != "sdpa":  # somebody has chosen another attention
        return policy
    use_packed_attention(policy.causal)
    reason = why_not_packed(policy.backbone, policy.device, policy.autocast)
    name = type(policy.causal).__name__
    if reason:
        policy.causal.set_attn_implementation(before)
        warnings.warn(
            f"sequences are padded, which is slower: {name} cannot take them end to end ({reason})", stacklevel=2
        )
        return policy
    if policy.device.type == "cuda":
        _fuse(policy.causal)
    return replace(policy, packed=True)


def _fuse(causal: Any) -> None:
    """Fuse the layers where that works; a warning where it should and does not."""
    try:
        fuse_layers(causal, gpu_kernels())
    except ModuleNotFoundError:  # no Triton
        return
    reason = why_not_fused(causal)
    if reason:
        unfuse_layers(causal)
        warnings.warn(f"the layers of {type(causal).__name__} are not fused, which is slower ({reason})", stacklevel=3)


def pick_device(name: str) -> torch.device:
    """A device by name; `auto` is a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"run.device={name!r} is no device: say auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"run.device={name!r}, but torch sees no GPU here: say cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"run.device={name!r}, but torch sees {torch.cuda.device_count()} GPUs here, the first is cuda:0"
        )
    if device.type not in ("cpu", "cuda") and not _holds_numbers(device):
        raise ValueError(f"run.device={name!r}, which torch cannot use here: say auto, cpu or cuda")
    return device


def _holds_numbers(device: torch.device) -> bool:
    try:
        return torch.ones((), device=device).item() == 1
    except Exception:  # each kind of device that is not there, or holds nothing, has its own
        return False


def _demo(seed: int) -> tuple[Any, Any]:
    return demo_model(seed), demo_tokenizer()


def _pretrained(path: str, attention: str | None) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(smollm2_folder()) if path == "smollm2" else str(Path(path).expanduser())
    if path.startswith(("/", ".", "~")) and not Path(folder).is_dir():
        raise ValueError(f"model.path={path!r}: there is no such folder")
    options = {"attn_implementation": attention} if attention else {}
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
        return model, AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path={path!r} cannot be loaded: {error}") from None


def _with_lora(model: Any, rank: int, alpha: int, seed: int) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError("model.lora_rank needs peft: pip install 'trimtab[lora]'") from None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear"))


@torch.no_grad()
def _check_head(policy: Policy) -> None:
    """Some families scale their logits in ways of their own: find out now rather than train on wrong numbers."""
    ids = torch.tensor([[min(policy.end_tokens), policy.pad_token, 0]], device=policy.device)
    mask = torch.ones_like(ids)
    policy.model.eval()
    ours = policy.logits(policy.hidden(ids, mask), 1.0)
    theirs = policy.model(input_ids=ids, attention_mask=mask).logits.float()
    if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"{type(policy.causal).__name__} does more to its logits than its output embedding: this family is not "
            "supported yet"
        )
