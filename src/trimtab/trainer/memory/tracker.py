"""Track the bytes of all living tensors by what they are for, and their peak.

Under `FakeTensorMode` tensors have shapes, dtypes and lifetimes but no data. A forward and backward pass makes and
frees the same tensors in the same order with them as with real ones, so the peak of a model of any size is found in
seconds on any machine.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

BLOCK = 512  # torch's CUDA allocator rounds sizes up to a multiple of this


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes alive by category, the peak of their sum, and the categories at the peak.

    A new tensor belongs to the category that is set; a lower-precision copy of a weight to `weight_copies`. The
    weights themselves are not counted.
    """

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: Counter[str] = Counter()
        self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self._category = "other"
        self._weights = {id(weight.untyped_storage()) for weight in weights}
        self._tracked: dict[int, list[Any]] = {key: ["weights", 0] for key in self._weights}

    @contextmanager
    def category(self, name: str) -> Iterator[None]:
        """Count the tensors made inside the block in this category."""
        before, self._category = self._category, name
        try:
            yield
        finally:
            self._category = before

    def move(self, tensor: Tensor, category: str) -> None:
        """Count a tensor in another category from now on."""
        entry = self._tracked[id(tensor.untyped_storage())]
        self.alive[entry[0]] -= entry[1]
        self.alive[category] += entry[1]
        entry[0] = category

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        # Autocast casts weights deep inside the model's code, so its copies are known by their source alone.
        copy = func is torch.ops.aten._to_copy.default and id(args[0].untyped_storage()) in self._weights
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._track(tensor, "weight_copies" if copy else self._category)
        return out

    def _track(self, tensor: Tensor, category: str) -> None:
        # By storage, not by tensor: views and in-place results share one, and it lives as long as any of them.
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._tracked:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self._tracked[key] = [category, size]
        weakref.finalize(storage, self._free, key)
        self.alive[category] += size
        total = self.alive.total()
        if total > self.peak:
            self.peak, self.at_peak = total, self.alive.copy()

    def _free(self, key: int) -> None:
        category, size = self._tracked.pop(key)
        self.alive[category] -= size
