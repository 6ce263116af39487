"""Reading prompts into the cache: all tokens of many prefixes in one pass, without padding between them.

Launching the kernels of a small pass takes longer than running them. Such a pass is a CUDA graph, made once for a few
sizes; what a size has room for beyond the prompts belongs to no sequence and is written nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimtab.rollout.paged.decode_state import PAGE
from trimtab.rollout.paged.decoder import Decoder, Memory, Reading
from trimtab.rollout.paged.graphs import bucket, captured

LAUNCHED = 3e10  # tokens x weights of a layer: below this a GPU computes a layer faster than a host launches it
LEAST = 256  # tokens of the smallest graph
MOST = 32  # graphs that are kept

Array = npt.NDArray[Any]


@dataclass
class Reader:
    """Reads prefixes into a memory's pages."""

    decoder: Decoder
    memory: Memory
    _graphs: dict[tuple[int, int, int], tuple[Reading, Callable[[], None]]] = field(default_factory=dict)
    _pool: Any = None  # the memory that all graphs compute in, one at a time

    def read(self, prefixes: Sequence[Sequence[int]], pages: Sequence[Sequence[int]]) -> None:
        """Fill the pages of some prefixes."""
        arrays, longest = laid_out(prefixes, pages), max(len(prefix) for prefix in prefixes)
        room = max(LEAST, bucket(len(arrays[0])))
        if not self._bound_by_launches(room):
            ids, position, page, starts = (self._sent(array) for array in arrays)
            self.decoder.prefill(Reading(ids, position, page, starts, longest), self.memory)
            return
        key = room, _power(len(prefixes)), _power(longest)
        if key not in self._graphs:
            if len(self._graphs) == MOST:
                self._graphs.clear()
                self._pool = None
            reading = self._nothing(*key)
            self._graphs[key] = reading, self._replayed(reading)
        reading, replay = self._graphs[key]
        nowhere, end = -1, len(arrays[0])
        for array, target, rest in zip(arrays, reading.tensors, (0, 0, nowhere, end), strict=True):
            whole = np.full(len(target), rest, dtype=array.dtype)
            whole[: len(array)] = array
            send(whole, target)
        replay()

    def _bound_by_launches(self, tokens: int) -> bool:
        """Whether a pass over so many tokens is bound by its launches."""
        layer = self.decoder.layers[0]
        weights = sum(part.weight.numel() for part in (layer.qkv, layer.output, layer.gate_up, layer.down))
        half = self.decoder.dtype != torch.float32  # fp32 has no attention that could be part of a graph
        return self.memory.cache.is_cuda and half and tokens * weights <= LAUNCHED

    def _nothing(self, tokens: int, sequences: int, longest: int) -> Reading:
        """Room for a reading, in which nothing is read yet."""
        device = self.memory.cache.device
        ids, position = torch.zeros(2, tokens, dtype=torch.int64, device=device)
        page, starts = torch.full_like(ids, -1), torch.zeros(sequences + 1, dtype=torch.int32, device=device)
        return Reading(ids, position, page, starts, longest)

    def _replayed(self, reading: Reading) -> Callable[[], None]:
        """The pass over a reading's places as a graph."""
        graph = captured(lambda: self.decoder.prefill(reading, self.memory), self._pool)
        self._pool = graph.pool()
        replay: Callable[[], None] = graph.replay
        return replay

    def _sent(self, array: Array) -> Tensor:
        target = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=self.memory.cache.device)
        send(array, target)
        return target


def laid_out(prefixes: Sequence[Sequence[int]], pages: Sequence[Sequence[int]]) -> tuple[Array, Array, Array, Array]:
    """The tokens of all prefixes in a row, each one's position and page, and where each prefix starts."""
    lengths = np.array([len(prefix) for prefix in prefixes])
    starts = np.concatenate([[0], lengths.cumsum()])
    ids = np.fromiter(chain.from_iterable(prefixes), np.int64, starts[-1])
    position = np.arange(starts[-1]) - starts[:-1].repeat(lengths)
    held = np.array([len(some) for some in pages])
    first = held.cumsum() - held
    flat = np.fromiter(chain.from_iterable(pages), np.int64, held.sum())
    return ids, position, flat[first.repeat(lengths) + position // PAGE], starts.astype(np.int32)


def send(array: Array, target: Tensor) -> None:
    """Copy an array to the device, by way of pinned memory so that the host need not wait."""
    tensor = torch.from_numpy(array)
    target.copy_(tensor.pin_memory() if target.is_cuda else tensor, non_blocking=True)


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()
