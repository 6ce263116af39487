"""Prefill: write the keys and values of many prompts into their pages in one pass, without padding between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimtab.rollout.paged.buffers import DeviceBuffers, PrefillBatch
from trimtab.rollout.paged.cuda_graphs import capture_graph, graph_size
from trimtab.rollout.paged.decoder import Decoder
from trimtab.rollout.paged.kv_cache import PAGE_SIZE

# Tokens x weights of a layer. Below, a GPU runs a layer faster than the host launches its kernels: use a CUDA graph.
LAUNCH_BOUND = 3e10
MIN_GRAPH_TOKENS = 256
MAX_GRAPHS = 32  # all graphs are dropped when there would be more

Array = npt.NDArray[Any]


@dataclass
class Prefill:
    """Runs prefills into the KV cache; small ones as CUDA graphs, padded to a few sizes."""

    decoder: Decoder
    buffers: DeviceBuffers
    _graphs: dict[tuple[int, int, int], tuple[PrefillBatch, Any]] = field(default_factory=dict)
    _pool: Any = None  # the memory that all graphs share, since they run one at a time

    def run(self, prefixes: Sequence[Sequence[int]], pages: Sequence[Sequence[int]]) -> None:
        """Write the keys and values of prefixes into their pages."""
        arrays, max_seqlen = pack_prefixes(prefixes, pages), max(len(prefix) for prefix in prefixes)
        padded = max(MIN_GRAPH_TOKENS, graph_size(len(arrays[0])))
        if not is_launch_bound(self.decoder, padded):
            ids, position, page, cu_seqlens = (_to_device(array, self.decoder.device) for array in arrays)
            self.decoder.prefill(PrefillBatch(ids, position, page, cu_seqlens, max_seqlen), self.buffers)
            return
        key = padded, _next_power_of_2(len(prefixes)), _next_power_of_2(max_seqlen)
        if key not in self._graphs:
            self._capture(key)
        batch, graph = self._graphs[key]
        # Padding belongs to no sequence (those beyond the last are empty) and to no page (-1).
        fills = (0, 0, -1, len(arrays[0]))
        for array, target, fill in zip(arrays, batch.tensors, fills, strict=True):
            padded_array = np.full(len(target), fill, dtype=array.dtype)
            padded_array[: len(array)] = array
            copy_to_device(padded_array, target)
        graph.replay()

    def _capture(self, key: tuple[int, int, int]) -> None:
        """Capture the prefill of so many tokens, prefixes and tokens of the longest prefix."""
        if len(self._graphs) == MAX_GRAPHS:
            self._graphs.clear()
            self._pool = None
        tokens, sequences, max_seqlen = key
        device = self.decoder.device
        ids, position = torch.zeros(2, tokens, dtype=torch.int64, device=device)
        # Nothing but padding: the warm-up run before the capture writes no keys and values.
        page, cu_seqlens = torch.full_like(ids, -1), torch.zeros(sequences + 1, dtype=torch.int32, device=device)
        batch = PrefillBatch(ids, position, page, cu_seqlens, max_seqlen)
        graph = capture_graph(lambda: self.decoder.prefill(batch, self.buffers), self._pool)
        self._pool = graph.pool()
        self._graphs[key] = batch, graph


def is_launch_bound(decoder: Decoder, tokens: int) -> bool:
    """Return whether launching the kernels of a prefill takes longer than running them."""
    layer = decoder.layers[0]
    linears = (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
    weights = sum(linear.weight.numel() for linear in linears)
    # In fp32 attention is not the flash kernel but a loop with a host sync, which cannot be captured.
    return decoder.device.type == "cuda" and decoder.dtype != torch.float32 and tokens * weights <= LAUNCH_BOUND


def pack_prefixes(
    prefixes: Sequence[Sequence[int]], pages: Sequence[Sequence[int]]
) -> tuple[Array, Array, Array, Array]:
    """Return the tokens of all prefixes end to end, each one's position and page, and cu_seqlens."""
    lengths = np.array([len(prefix) for prefix in prefixes])
    cu_seqlens = np.concatenate([[0], lengths.cumsum()])
    ids = np.fromiter(chain.from_iterable(prefixes), np.int64, cu_seqlens[-1])
    position = np.arange(cu_seqlens[-1]) - cu_seqlens[:-1].repeat(lengths)
    page_counts = np.array([len(held) for held in pages])
    first_page = page_counts.cumsum() - page_counts
    flat = np.fromiter(chain.from_iterable(pages), np.int64, page_counts.sum())
    return ids, position, flat[first_page.repeat(lengths) + position // PAGE_SIZE], cu_seqlens.astype(np.int32)


def copy_to_device(array: Array, target: Tensor) -> None:
    """Copy an array into a tensor, from pinned memory where it is on a GPU: the host need not wait then."""
    tensor = torch.from_numpy(array)
    target.copy_(tensor.pin_memory() if target.is_cuda else tensor, non_blocking=True)


def _to_device(array: Array, device: torch.device) -> Tensor:
    target = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=device)
    copy_to_device(array, target)
    return target


def _next_power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()
