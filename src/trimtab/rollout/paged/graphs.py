"""CUDA graphs: work of fixed shape, launched at once; and the few sizes that graphs are made for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def captured(work: Callable[[], None], pool: Any = None) -> Any:
    """Some work as a graph. It is run once before, which compiles what it needs: that run must do no harm.

    Graphs that never run at the same time can compute in one pool of memory: that of an earlier one (`graph.pool()`).
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        work()
    return graph


def bucket(size: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, ..."""
    power = 1 << (size - 1).bit_length()
    return power * 3 // 4 if power >= 4 and size <= power * 3 // 4 else power
