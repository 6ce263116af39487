"""CUDA graphs: capture work of fixed shape, and the sizes that batches are padded to for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
