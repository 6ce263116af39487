"""The decoder forward of Llama, Qwen2 and Qwen3 over a paged KV cache, without transformers' modules.

The three differ in a bias and in QK-norm. Weights are copied from the policy in the compute type, fused into one matrix
for queries, keys and values and one for gate and up, and copied again before every rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from trimtab.trainer.attention import causal_attention
from trimtab.trainer.parallel import is_split, whole_tensor
from trimtab.trainer.sampling.paged.buffers import (
    PAGE_SIZE,
    Activations,
    CachedKeys,
    DecodeState,
    DeviceBuffers,
    PrefillBatch,
    Scalar,
)
from trimtab.trainer.sampling.weights import causal_lm, checkpoint_weights

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those whose angles depend on the position alone: a table will do
MIN_HEAD_DIM, MAX_HEAD_DIM = 32, 256


def unsupported_reason(model: Any) -> str | None:
    """Return why the paged sampler cannot run a model, or None where it can."""
    config = causal_lm(model).config
    if config.model_type not in FAMILIES:
        return f"its family is {config.model_type}, not one of {', '.join(FAMILIES)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
        return "some of its layers have a sliding window"
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        return f"its rotary embedding is {rope_type}"
    dim = get_head_dim(config)
    if dim & (dim - 1) or not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM:
        return f"its heads are {dim} wide, not a power of two from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
    return None


def get_head_dim(config: Any) -> int:
    """Return the width of an attention head; configs of older models leave it out."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


@dataclass(frozen=True)
class FusedLinear:
    """Linear maps of the same input, with their weights stacked in one matrix."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return x weight^T + bias."""
        if self.bias is None:
            return torch.mm(x, self.weight.T, out=out)
        return torch.addmm(self.bias, x, self.weight.T, out=out)


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer: linear maps in the compute type, norms in fp32."""

    input_norm: Tensor
    post_attention_norm: Tensor
    qkv_proj: FusedLinear
    o_proj: FusedLinear
    gate_up_proj: FusedLinear
    down_proj: FusedLinear
    qk_norm: tuple[Tensor, Tensor] | None  # Qwen3's norms of queries and keys


class Decoder:
    """A copy of a policy's weights, laid out for decoding, with its prefill and its decoding step."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        reason = unsupported_reason(model)
        if reason is not None:
            raise ValueError(f"the paged sampler cannot run {type(causal_lm(model)).__name__}: {reason}")
        self.model, self.dtype = model, dtype
        self.config = config = causal_lm(model).config
        self.device: torch.device = next(model.parameters()).device
        self.num_kv_heads, self.head_dim = int(config.num_key_value_heads), get_head_dim(config)
        self.eps = float(config.rms_norm_eps)
        self._targets: dict[str, Tensor] = {}  # where each weight is copied to, by its name in a checkpoint
        self._shapes = {name: weight.shape for name, weight in checkpoint_weights(model)}
        self.layers = [self._allocate_layer(f"model.layers.{n}") for n in range(config.num_hidden_layers)]
        self.final_norm = self._allocate_norm("model.norm")
        self.lm_head = self._allocate_linear("lm_head")
        self.refresh()

    @property
    def embedding(self) -> Tensor:
        """The policy's own embedding: a lookup needs no copy in the compute type."""
        weight: Tensor = causal_lm(self.model).get_input_embeddings().weight
        return weight.detach()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the policy's current weights."""
        modules = dict(causal_lm(self.model).named_modules())
        owners = [(modules[module], attribute) for module, _, attribute in (n.rpartition(".") for n in self._targets)]
        if any(hasattr(module, "get_delta_weight") for module, _ in owners):
            for name, weight in checkpoint_weights(self.model):  # merges adapters, one weight at a time
                if name in self._targets:
                    self._targets[name].copy_(weight)
            return
        pairs = [(target, getattr(*owner)) for target, owner in zip(self._targets.values(), owners, strict=True)]
        split = [is_split(weight) for _, weight in pairs]
        for target, weight in compress(pairs, split):  # gathered one at a time, together with the other processes
            target.copy_(whole_tensor(weight, target.dtype))
        pairs = [pair for pair, gathered in zip(pairs, split, strict=True) if not gathered]
        # One multi-tensor kernel per dtype: a copy for each weight is bound by its launches.
        for dtype in {target.dtype for target, _ in pairs}:
            targets, weights = zip(*((t, w) for t, w in pairs if t.dtype == dtype), strict=True)
            torch._foreach_copy_(targets, weights)

    @torch.no_grad()
    def allocate(self, num_pages: int, state: DecodeState, ops: Any) -> DeviceBuffers:
        """Allocate KV cache, RoPE table and activations for a state's rows."""
        layer, width = self.layers[0], self.config.hidden_size

        def zeros(columns: int) -> Tensor:
            return torch.zeros(state.rows, columns, dtype=self.dtype, device=self.device)

        activations = Activations(
            residual=torch.empty(state.rows, width, device=self.device),
            normed=zeros(width),
            qkv=zeros(len(layer.qkv_proj.weight)),
            attention=zeros(layer.o_proj.weight.shape[1]),
            delta=zeros(width),
            gate_up=zeros(len(layer.gate_up_proj.weight)),
            mlp=zeros(layer.down_proj.weight.shape[1]),
            logits=zeros(len(self.lm_head.weight)),
        )
        shape = (len(self.layers), 2, num_pages, self.num_kv_heads, PAGE_SIZE, self.head_dim)
        kv_cache = torch.empty(shape, dtype=self.dtype, device=self.device)
        position = torch.arange(state.page_table.shape[1] * PAGE_SIZE, device=self.device)[None]
        # The first argument gives device and dtype alone.
        cos, sin = causal_lm(self.model).model.rotary_emb(torch.empty(0, device=self.device), position)
        cos_sin = cos[0].float().contiguous(), sin[0].float().contiguous()
        return DeviceBuffers(kv_cache, cos_sin, state, activations, ops)

    @torch.no_grad()
    def prefill(self, batch: PrefillBatch, buffers: DeviceBuffers, cached: CachedKeys | None = None) -> None:
        """Write the keys and values of a batch of prefixes into the KV cache; `cached`: of continued prefixes."""
        ops = buffers.ops
        residual = self.embedding[batch.ids].float()
        delta: Tensor | None = None
        normed = torch.empty_like(residual, dtype=self.dtype)
        for layer, cache in zip(self.layers, buffers.kv_cache, strict=True):
            ops.fused_add_rms_norm(residual, delta, layer.input_norm, self.eps, normed)
            projected = (layer.qkv_proj(normed), layer.qk_norm, self.eps, buffers.cos_sin, cache)
            q, k, v = ops.rope_and_write_kv(*projected, batch.position, batch.page)
            if layer is self.layers[-1]:
                break  # a prefix samples nothing: of the last layer only keys and values are needed
            if cached is not None:
                k, v = cached.gather(cache)
            keys = None if cached is None else (cached.cu_seqlens, cached.max_seqlen)
            attention = causal_attention(q, k, v, batch.cu_seqlens, batch.max_seqlen, keys=keys)
            delta = layer.o_proj(attention.reshape(len(residual), -1))
            ops.fused_add_rms_norm(residual, delta, layer.post_attention_norm, self.eps, normed)
            gate_up = layer.gate_up_proj(normed)
            mlp = gate_up.new_empty(len(residual), gate_up.shape[1] // 2)
            ops.swiglu(gate_up, mlp)
            delta = layer.down_proj(mlp)

    @torch.no_grad()
    def decode_step(self, rows: int, greedy: bool, buffers: DeviceBuffers) -> None:
        """Sample one token for each of the first rows of the decode state."""
        a, state, ops = buffers.activations.first(rows), buffers.state, buffers.ops
        a.residual.copy_(self.embedding.index_select(0, state.scalars[Scalar.LAST_TOKEN, :rows]))
        delta: Tensor | None = None
        for layer, cache in zip(self.layers, buffers.kv_cache, strict=True):
            ops.fused_add_rms_norm(a.residual, delta, layer.input_norm, self.eps, a.normed)
            layer.qkv_proj(a.normed, a.qkv)
            ops.paged_attention(a.qkv, layer.qk_norm, self.eps, buffers.cos_sin, cache, state, a.attention)
            layer.o_proj(a.attention, a.delta)
            ops.fused_add_rms_norm(a.residual, a.delta, layer.post_attention_norm, self.eps, a.normed)
            layer.gate_up_proj(a.normed, a.gate_up)
            ops.swiglu(a.gate_up, a.mlp)
            delta = layer.down_proj(a.mlp, a.delta)
        ops.fused_add_rms_norm(a.residual, delta, self.final_norm, self.eps, a.normed)
        self.lm_head(a.normed, a.logits)
        ops.sample_tokens(a.logits, state, greedy)

    def _allocate_layer(self, name: str) -> LayerWeights:
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        has_qk_norm = f"{attention}.q_norm.weight" in self._shapes
        qk_norm = (f"{attention}.q_norm", f"{attention}.k_norm")
        return LayerWeights(
            input_norm=self._allocate_norm(f"{name}.input_layernorm"),
            post_attention_norm=self._allocate_norm(f"{name}.post_attention_layernorm"),
            qkv_proj=self._allocate_linear(*(f"{attention}.{which}_proj" for which in "qkv")),
            o_proj=self._allocate_linear(f"{attention}.o_proj"),
            gate_up_proj=self._allocate_linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            down_proj=self._allocate_linear(f"{mlp}.down_proj"),
            qk_norm=(self._allocate_norm(qk_norm[0]), self._allocate_norm(qk_norm[1])) if has_qk_norm else None,
        )

    def _allocate_norm(self, name: str) -> Tensor:
        weight = self._targets[f"{name}.weight"] = torch.empty(self._shapes[f"{name}.weight"], device=self.device)
        return weight

    def _allocate_linear(self, *names: str) -> FusedLinear:
        weight = self._allocate_stacked([f"{name}.weight" for name in names])
        has_bias = f"{names[0]}.bias" in self._shapes
        return FusedLinear(weight, self._allocate_stacked([f"{name}.bias" for name in names]) if has_bias else None)

    def _allocate_stacked(self, names: list[str]) -> Tensor:
        """Allocate one tensor for several weights, stacked along their rows."""
        rows = [self._shapes[name][0] for name in names]
        stacked = torch.empty(sum(rows), *self._shapes[names[0]][1:], dtype=self.dtype, device=self.device)
        self._targets |= zip(names, stacked.split(rows), strict=True)
        return stacked


def capture_graph(work: Callable[[], None], pool: Any = None) -> Any:
    """Run `work` once as warm-up, then capture it as a CUDA graph.

    Graphs that never run at the same time can share the memory of an earlier one: pass its `graph.pool()`.
    """
    # The warm-up compiles Triton kernels and creates cuBLAS handles, which is not allowed during capture.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Thread-local: a CUDA call of another thread must not invalidate the capture.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        work()
    return graph


def next_power_of_2(size: int) -> int:
    """Round up to a power of two."""
    return 1 << (size - 1).bit_length()


def graph_size(size: int) -> int:
    """Round up to 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ...: few graphs, and at most half as much padding as work."""
    power = next_power_of_2(size)
    return power * 3 // 4 if power >= 4 and size <= power * 3 // 4 else power
