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

from trimtab.trainer.sampling.paged.buffers import CachedKeys, DeviceBuffers, PrefillBatch
from trimtab.trainer.sampling.paged.decoder import Decoder, capture_graph, graph_size, next_power_of_2
from trimtab.trainer.sampling.paged.kv_cache import PAGE_SIZE

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

    def run(
        self, prefixes: Sequence[Sequence[int]], pages: Sequence[Sequence[int]], cached: Sequence[int] | None = None
    ) -> None:
        """Write the keys and values of prefixes into their pages; those of the first `cached` tokens are there."""
        if cached is not None:
            self._continue(prefixes, pages, cached)
            return
        arrays, max_seqlen = pack_prefixes(prefixes, pages), max(len(prefix) for prefix in prefixes)
        tokens, padded = len(arrays[0]), max(MIN_GRAPH_TOKENS, graph_size(len(arrays[0])))
        if is_launch_bound(self.decoder, padded):
            batch, graph = self._captured(padded, next_power_of_2(len(prefixes)), next_power_of_2(max_seqlen))
        else:
            batch, graph = PrefillBatch.padding(tokens, len(prefixes), max_seqlen, self.decoder.device), None
        # Padding belongs to no sequence (those beyond the last are empty) and to no page (-1).
        for array, target, fill in zip(arrays, batch.tensors, (0, 0, -1, tokens), strict=True):
            copy_to_device(np.pad(array, (0, len(target) - len(array)), constant_values=fill), target)
        if graph is None:
            self.decoder.prefill(batch, self.buffers)
        else:
            graph.replay()

    def _continue(
        self, prefixes: Sequence[Sequence[int]], pages: Sequence[Sequence[int]], cached: Sequence[int]
    ) -> None:
        """Prefill the tokens after the first `cached` ones, which attend to those in the cache."""
        # Not as a CUDA graph: the lengths of the cached tokens would be one more dimension of its size.
        device, added = self.decoder.device, [prefix[n:] for prefix, n in zip(prefixes, cached, strict=True)]
        arrays = pack_prefixes(added, pages, cached)
        lengths = [len(prefix) for prefix in prefixes]
        position, page, cu_seqlens = locate_tokens(lengths, pages)
        # At least 2: for 1 the flash kernel takes another path.
        max_seqlen = max(2, *map(len, added))
        batch = PrefillBatch.padding(len(arrays[0]), len(added), max_seqlen, device)
        keys = CachedKeys.empty(len(page), len(prefixes), max(lengths), device)
        pairs = zip((*arrays, page, position % PAGE_SIZE, cu_seqlens), (*batch.tensors, *keys.tensors), strict=True)
        for array, target in pairs:
            copy_to_device(array, target)
        self.decoder.prefill(batch, self.buffers, keys)

    def _captured(self, tokens: int, prefixes: int, max_seqlen: int) -> tuple[PrefillBatch, Any]:
        """Return the input and the graph of a prefill of this size."""
        key = tokens, prefixes, max_seqlen
        if key not in self._graphs:
            if len(self._graphs) == MAX_GRAPHS:
                self._graphs.clear()
                self._pool = None
            # Nothing but padding: the warm-up run before the capture writes no keys and values.
            batch = PrefillBatch.padding(*key, self.decoder.device)
            graph = capture_graph(lambda: self.decoder.prefill(batch, self.buffers), self._pool)
            self._pool = graph.pool()
            self._graphs[key] = batch, graph
        return self._graphs[key]


def is_launch_bound(decoder: Decoder, tokens: int) -> bool:
    """Return whether launching the kernels of a prefill takes longer than running them."""
    layer = decoder.layers[0]
    linears = (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
    weights = sum(linear.weight.numel() for linear in linears)
    # In fp32 attention is not the flash kernel but a loop with a host sync, which cannot be captured.
    return decoder.device.type == "cuda" and decoder.dtype != torch.float32 and tokens * weights <= LAUNCH_BOUND


def pack_prefixes(
    prefixes: Sequence[Sequence[int]], pages: Sequence[Sequence[int]], starts: Sequence[int] | None = None
) -> tuple[Array, Array, Array, Array]:
    """Return the tokens of all prefixes end to end, each one's position and page, and cu_seqlens.

    `starts` are the positions of the prefixes' first tokens; 0 unless given.
    """
    position, page, cu_seqlens = locate_tokens([len(prefix) for prefix in prefixes], pages, starts)
    return np.fromiter(chain.from_iterable(prefixes), np.int64, len(position)), position, page, cu_seqlens


def locate_tokens(
    counts: Sequence[int], pages: Sequence[Sequence[int]], starts: Sequence[int] | None = None
) -> tuple[Array, Array, Array]:
    """Return position and page of every token of sequences of so many tokens, end to end, and cu_seqlens."""
    lengths = np.array(counts)
    cu_seqlens = np.concatenate([[0], lengths.cumsum()])
    position = np.arange(cu_seqlens[-1]) - cu_seqlens[:-1].repeat(lengths)
    if starts is not None:
        position += np.repeat(starts, lengths)
    page_counts = np.array([len(held) for held in pages])
    first_page = page_counts.cumsum() - page_counts
    flat = np.fromiter(chain.from_iterable(pages), np.int64, page_counts.sum())
    return position, flat[first_page.repeat(lengths) + position // PAGE_SIZE], cu_seqlens.astype(np.int32)


def copy_to_device(array: Array, target: Tensor) -> None:
    """Copy an array into a tensor, from pinned memory where it is on a GPU: the host need not wait then."""
    tensor = torch.from_numpy(array)
    target.copy_(tensor.pin_memory() if target.is_cuda else tensor, non_blocking=True)
