"""The policy: a causal LM of transformers, its tokenizer, and what scoring and sampling need of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trimtab.trainer.model.lm_head import Head
from trimtab.trainer.model.prompts import (
    check_lengths,
    check_survival,
    decode_batch,
    encode_batch,
    render_prompts,
    tokenizer_errors,
)

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_CONTEXT = 1 << 20  # tokens; configs may claim any number


@dataclass(frozen=True)
class Policy:
    """A model, its tokenizer, and how forward passes run: weights are fp32, `bf16` and `fp16` are autocast over
    them.

    `chat`: prompts go through the chat template. `packed`: forward passes take packed sequences instead of padded rows.
    `shared_prompts`: responses to one prompt share its forward pass.
    `sharded`: every process has a part of each layer's weights, so all must run the same number of passes.
    """

    model: Any
    tokenizer: Any
    device: torch.device
    precision: Precision = "fp32"
    chat: bool = True
    packed: bool = False
    sharded: bool = False
    shared_prompts: bool = False

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context for forward passes."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[self.precision])

    def keep_autocast_cache(self) -> AbstractContextManager[Any]:
        """Keep autocast's copies of weights across micro-batches; weights must not change inside."""
        # Autocast clears its cache when the outermost context ends, even if that one is disabled.
        return nullcontext() if self.precision == "fp32" else torch.autocast(self.device.type, enabled=False)

    @cached_property
    def causal_lm(self) -> Any:
        """The causal LM, without the wrapper that LoRA puts around it."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def backbone(self) -> Any:
        """The causal LM without its head."""
        return getattr(self.causal_lm, self.causal_lm.base_model_prefix)

    @property
    def num_weights(self) -> int:
        """The number of weights, trained or not."""
        return sum(weight.numel() for weight in self.model.parameters())

    @property
    def lm_head(self) -> nn.Module:
        """The output embedding, which maps hidden states to logits."""
        head: nn.Module = self.causal_lm.get_output_embeddings()
        return head

    def hidden_states(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the last hidden states of padded rows, (rows, positions, width)."""
        states: Tensor = self.backbone(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        return states

    def logits(self, hidden: Tensor, temperature: float) -> Tensor:
        """Return fp32 logits divided by the sampling temperature, soft-capped if the model does so."""
        logits: Tensor = self.lm_head(hidden).float()
        cap = getattr(self.causal_lm.config, "final_logit_softcapping", None)
        if cap:
            logits = torch.tanh(logits / cap) * cap
        return logits if temperature == 1 else logits / temperature

    def head_tensors(self, temperature: float) -> Head | None:
        """Return the LM head as tensors in the precision of forward passes; None if it is not a plain linear layer."""
        linear = self.lm_head
        if type(linear) is not nn.Linear:
            return None
        dtype = linear.weight.dtype if self.precision == "fp32" else DTYPES[self.precision]
        bias = None if linear.bias is None else linear.bias.detach().to(dtype)
        cap = getattr(self.causal_lm.config, "final_logit_softcapping", None)
        return Head(linear.weight.detach().to(dtype), bias, cap, temperature)

    def fused_head(self, temperature: float, enabled: bool | None) -> Head | None:
        """Return the head for the fused pass, or None to use autograd; `enabled=None` fuses on a GPU only."""
        enabled = self.device.type == "cuda" if enabled is None else enabled
        return self.head_tensors(temperature) if enabled else None

    @cached_property
    def attention_crossover(self) -> float:
        """The length at which a token's attention to those before it costs as much as its pass through the weights."""
        config = self.causal_lm.config
        embedding = self.causal_lm.get_input_embeddings().weight
        weights = sum(p.numel() for p in self.backbone.parameters() if p is not embedding)
        # Attention to half of `length` tokens on average, for queries times keys and for the weighted values.
        width = getattr(config, "num_attention_heads", 1) * getattr(config, "head_dim", config.hidden_size)
        return max(1.0, float(weights / (width * config.num_hidden_layers)))

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a response, by the generation config and the tokenizer."""
        configured = getattr(self.causal_lm.generation_config, "eos_token_id", None)
        listed = configured if isinstance(configured, list) else [configured]
        found = {token for token in (*listed, self.tokenizer.eos_token_id) if token is not None}
        if not found:
            raise ValueError("neither model nor tokenizer names an end-of-text token: responses would never end")
        return frozenset(found)

    @property
    def pad_token_id(self) -> int:
        """The token that fills padded positions; any will do, since the mask is 0 there."""
        pad = self.tokenizer.pad_token_id
        return min(self.eos_token_ids) if pad is None else int(pad)

    def encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokenize a prompt: by the chat template if there is one, else as plain text."""
        return self.encode_batch([messages])[0]

    def encode_batch(
        self,
        prompts: Sequence[Sequence[Mapping[str, str]]],
        limit: int | None = None,
        tools: Sequence[Sequence[Mapping[str, Any]]] | None = None,
    ) -> list[list[int]]:
        """Tokenize prompts in parallel; raise LongPromptError for one with far more than `limit` tokens.

        The chat template gets the JSON schemas of each prompt's `tools`.
        """
        texts = render_prompts(self.tokenizer if self.chat else None, prompts, tools)
        return self._encode_texts(texts, limit)

    def check_survival(
        self, prompts: Sequence[Sequence[Mapping[str, str]]], tools: Sequence[Sequence[Mapping[str, Any]]] | None = None
    ) -> list[str]:
        """Raise ValueError for a prompt that its tokens do not say; return all as the model reads them."""
        texts = render_prompts(self.tokenizer if self.chat else None, prompts, tools)
        ids = self._encode_texts(texts, None)
        with tokenizer_errors():
            check_survival(self.tokenizer, prompts, texts, ids)
            return [str(self.tokenizer.decode(each)) for each in ids]

    def _encode_texts(self, texts: Sequence[str], limit: int | None) -> list[list[int]]:
        with tokenizer_errors():
            check_lengths(self.tokenizer, texts, self.context if limit is None else limit)
            return encode_batch(self.tokenizer, texts, not self.chat)

    @property
    def context(self) -> int:
        """The most tokens that the model takes, or a million."""
        known = getattr(getattr(self.model, "config", None), "max_position_embeddings", None)
        return min(known, MAX_CONTEXT) if isinstance(known, int) else MAX_CONTEXT

    def encode_solution(self, text: str) -> list[int]:
        """Tokenize a worked solution as a response: its tokens and the end-of-text token."""
        with tokenizer_errors():
            check_lengths(self.tokenizer, [text], self.context)
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        end = self.tokenizer.eos_token_id
        return [*ids, end if end is not None else min(self.eos_token_ids)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return a response's text without special tokens."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def decode_batch(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """Decode responses in parallel, each as `decode` does."""
        return decode_batch(self.tokenizer, responses)
