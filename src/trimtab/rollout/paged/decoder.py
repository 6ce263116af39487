"""A decoder of a known family, run without transformers' modules: fused weights, fixed buffers, a paged cache.

Llama, Qwen2 and Qwen3 differ in a bias and two norms. The weights stay transformers': they are copied in the compute
type, queries, keys and values in one matrix, gate and up in another, and copied anew when the policy has changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.attention import causal_attention
from trimtab.rollout.paged.decode_state import PAGE, TOKEN, State
from trimtab.rollout.weights import causal_lm, checkpoint_weights

FAMILIES = ("llama", "qwen2", "qwen3")
ROTARY = ("default", "linear", "llama3", "yarn")  # those whose angles do not depend on what is being read
SMALLEST_HEAD, LARGEST_HEAD = 32, 256


def unsupported_reason(model: Any) -> str | None:
    """What about a model this decoder cannot do; None where it can."""
    config = causal_lm(model).config
    if config.model_type not in FAMILIES:
        return f"its family is {config.model_type}, not one of {', '.join(FAMILIES)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
        return "some of its layers have a sliding window"
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotary not in ROTARY:
        return f"its rotary embedding is {rotary}"
    d = head_size(config)
    if d & (d - 1) or not SMALLEST_HEAD <= d <= LARGEST_HEAD:
        return f"its heads are {d} wide, not a power of two from {SMALLEST_HEAD} to {LARGEST_HEAD}"
    return None


def head_size(config: Any) -> int:
    """The width of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


@dataclass(frozen=True)
class Linear:
    """A linear map."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x weight^T + bias."""
        if self.bias is None:
            return torch.mm(x, self.weight.T, out=out)
        return torch.addmm(self.bias, x, self.weight.T, out=out)


@dataclass(frozen=True)
class Layer:
    """The weights of one layer; norms are in fp32."""

    before_attention: Tensor
    before_mlp: Tensor
    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    norms: tuple[Tensor, Tensor] | None  # of queries and keys


class Decoder:
    """The weights of a policy, laid out for decoding."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        reason = unsupported_reason(model)
        if reason is not None:
            raise ValueError(f"this sampler cannot run {type(causal_lm(model)).__name__}: {reason}")
        self.model, self.dtype = model, dtype
        self.config = config = causal_lm(model).config
        self.device: torch.device = next(model.parameters()).device
        self.kv, self.d = int(config.num_key_value_heads), head_size(config)
        self.eps = float(config.rms_norm_eps)
        self._places: dict[str, Tensor] = {}  # where each weight is copied to, by its name in a checkpoint
        self._sizes = {name: weight.shape for name, weight in checkpoint_weights(model)}
        self.layers = [self._layer(f"model.layers.{n}") for n in range(config.num_hidden_layers)]
        self.last_norm = self._norm("model.norm")
        self.head = self._linear("lm_head")
        self.refresh()

    @property
    def embedding(self) -> Tensor:
        """The policy's own embedding, which is read and never copied."""
        weight: Tensor = causal_lm(self.model).get_input_embeddings().weight
        return weight.detach()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the policy's weights as they are now."""
        owners = self._find_owners()
        if owners is not None:
            pairs = [(place, getattr(*owner)) for place, owner in zip(self._places.values(), owners, strict=True)]
            for kind in {place.dtype for place, _ in pairs}:  # one kernel for all of a kind
                places, weights = zip(*((p, w) for p, w in pairs if p.dtype == kind), strict=True)
                torch._foreach_copy_(places, weights)
            return
        for name, weight in checkpoint_weights(self.model):  # adapters are merged one by one
            if name in self._places:
                self._places[name].copy_(weight)

    @torch.no_grad()
    def turns(self, positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embedding, (positions, D) each."""
        where = torch.arange(positions, device=self.device)[None]
        cos, sin = causal_lm(self.model).model.rotary_emb(torch.empty(0, device=self.device), where)
        return cos[0].float().contiguous(), sin[0].float().contiguous()

    def cache(self, pages: int) -> Tensor:
        """An empty cache: (layers, 2, pages, kv heads, PAGE, D)."""
        shape = (len(self.layers), 2, pages, self.kv, PAGE, self.d)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def prefill(self, reading: Reading, memory: Memory) -> None:
        """Fill the pages of some prefixes. Of the last layer only keys and values are wanted."""
        x = self.embedding[reading.ids].float()
        delta: Tensor | None = None
        normed = torch.empty_like(x, dtype=self.dtype)
        for layer, cache in zip(self.layers, memory.cache, strict=True):
            memory.parts.add_norm(x, delta, layer.before_attention, self.eps, normed)
            turned = (memory.turns, cache, reading.position, reading.page)
            q, k, v = memory.parts.place(layer.qkv(normed), layer.norms, self.eps, *turned)
            if layer is self.layers[-1]:
                break
            answer = causal_attention(q, k, v, reading.starts, reading.longest)
            delta = layer.output(answer.reshape(len(x), -1))
            memory.parts.add_norm(x, delta, layer.before_mlp, self.eps, normed)
            both = layer.gate_up(normed)
            inner = both.new_empty(len(x), both.shape[1] // 2)
            memory.parts.gated(both, inner)
            delta = layer.down(inner)

    @torch.no_grad()
    def step(self, rows: int, greedy: bool, memory: Memory) -> None:
        """One token for each of the first rows of the state."""
        b, state, parts = memory.buffers(rows), memory.state, memory.parts
        b.x.copy_(self.embedding.index_select(0, state.numbers[TOKEN, :rows]))
        delta: Tensor | None = None
        for layer, cache in zip(self.layers, memory.cache, strict=True):
            parts.add_norm(b.x, delta, layer.before_attention, self.eps, b.normed)
            layer.qkv(b.normed, b.qkv)
            parts.attend(b.qkv, layer.norms, self.eps, memory.turns, cache, state, b.answer)
            layer.output(b.answer, b.delta)
            parts.add_norm(b.x, b.delta, layer.before_mlp, self.eps, b.normed)
            layer.gate_up(b.normed, b.gate_up)
            parts.gated(b.gate_up, b.inner)
            delta = layer.down(b.inner, b.delta)
        parts.add_norm(b.x, delta, self.last_norm, self.eps, b.normed)
        self.head(b.normed, b.logits)
        parts.draw(b.logits, state, greedy)

    def _layer(self, at: str) -> Layer:
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        normed = f"{attention}.q_norm.weight" in self._sizes
        return Layer(
            before_attention=self._norm(f"{at}.input_layernorm"),
            before_mlp=self._norm(f"{at}.post_attention_layernorm"),
            qkv=self._linear(*(f"{attention}.{part}_proj" for part in "qkv")),
            output=self._linear(f"{attention}.o_proj"),
            gate_up=self._linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            down=self._linear(f"{mlp}.down_proj"),
            norms=(self._norm(f"{attention}.q_norm"), self._norm(f"{attention}.k_norm")) if normed else None,
        )

    def _find_owners(self) -> list[tuple[Any, str]] | None:
        """The modules that hold the weights now; None where adapters are in between."""
        modules = dict(causal_lm(self.model).named_modules())
        named = [name.rpartition(".") for name in self._places]
        if any(hasattr(modules[module], "get_delta_weight") for module, _, _ in named):
            return None
        return [(modules[module], attribute) for module, _, attribute in named]

    def _norm(self, name: str) -> Tensor:
        place = self._places[f"{name}.weight"] = torch.empty(self._sizes[f"{name}.weight"], device=self.device)
        return place

    def _linear(self, *parts: str) -> Linear:
        weight = self._joined([f"{part}.weight" for part in parts])
        biased = f"{parts[0]}.bias" in self._sizes
        return Linear(weight, self._joined([f"{part}.bias" for part in parts]) if biased else None)

    def _joined(self, names: list[str]) -> Tensor:
        """Room for some weights one below the other."""
        rows = [self._sizes[name][0] for name in names]
        whole = torch.empty(sum(rows), *self._sizes[names[0]][1:], dtype=self.dtype, device=self.device)
        self._places |= zip(names, whole.split(rows), strict=True)
        return whole


@dataclass(frozen=True)
class Reading:
    """Tokens of some prefixes in a row: each one's position and page (-1: none), and where each prefix starts."""

    ids: Tensor
    position: Tensor
    page: Tensor
    starts: Tensor
    longest: int

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All but the length of the longest prefix."""
        return self.ids, self.position, self.page, self.starts


@dataclass(frozen=True)
class Buffers:
    """What a step computes on its way, for some rows."""

    x: Tensor
    normed: Tensor
    qkv: Tensor
    answer: Tensor
    delta: Tensor
    gate_up: Tensor
    inner: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Memory:
    """All that lasts from step to step: cache, state, buffers; `parts` is `plain` or `kernels`."""

    cache: Tensor
    turns: tuple[Tensor, Tensor]
    state: State
    whole: Buffers
    parts: Any

    @classmethod
    def of(cls, decoder: Decoder, pages: int, state: State, parts: Any) -> Memory:
        """Room for a state's rows and so many pages."""
        rows, longest = state.rows, state.pages.shape[1] * PAGE
        layer, width = decoder.layers[0], decoder.config.hidden_size

        def room(columns: int) -> Tensor:
            return torch.zeros(rows, columns, dtype=decoder.dtype, device=decoder.device)

        whole = Buffers(
            x=torch.empty(rows, width, device=decoder.device),
            normed=room(width),
            qkv=room(len(layer.qkv.weight)),
            answer=room(layer.output.weight.shape[1]),
            delta=room(width),
            gate_up=room(len(layer.gate_up.weight)),
            inner=room(layer.down.weight.shape[1]),
            logits=room(len(decoder.head.weight)),
        )
        return cls(decoder.cache(pages), decoder.turns(longest), state, whole, parts)

    def buffers(self, rows: int) -> Buffers:
        """The buffers' first rows."""
        return Buffers(*(getattr(self.whole, name)[:rows] for name in Buffers.__dataclass_fields__))
