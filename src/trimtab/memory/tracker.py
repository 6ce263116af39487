"""Memory counted before there is any: a model's passes run on tensors without data, and every tensor is booked.

Tensors under `FakeTensorMode` have shapes, types and lifetimes, but no bytes. A pass over them makes and drops the
tensors that the pass over real ones would, in the same order, so what is alive at the worst moment can be read off,
for a model of any size, in seconds and on any machine.
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

BLOCK = 512  # the GPU's allocator gives memory in multiples of this


class Ledger(TorchDispatchMode):
    """The bytes alive by account, the most there ever were, and the accounts at that moment.

    What is made is booked to the account that is open; a lower-precision copy of a weight, whoever makes it, to
    `copies`.
    """

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.account = "other"
        self.alive: Counter[str] = Counter()
        self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self._weights = {id(weight.untyped_storage()) for weight in weights}
        self._booked: dict[int, list[Any]] = {id_: ["weights", 0] for id_ in self._weights}

    @contextmanager
    def booking(self, account: str) -> Iterator[None]:
        """Book what is made in here to this account."""
        before, self.account = self.account, account
        try:
            yield
        finally:
            self.account = before

    def move(self, tensor: Tensor, account: str) -> None:
        """Book a tensor to another account: it has become something else."""
        entry = self._booked[id(tensor.untyped_storage())]
        self.alive[entry[0]] -= entry[1]
        self.alive[account] += entry[1]
        entry[0] = account

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        copy = func is torch.ops.aten._to_copy.default and id(args[0].untyped_storage()) in self._weights
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._book(tensor, "copies" if copy else self.account)
        return out

    def _book(self, tensor: Tensor, account: str) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._booked:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self._booked[key] = [account, size]
        weakref.finalize(storage, self._close, key)
        self.alive[account] += size
        total = self.alive.total()
        if total > self.peak:
            self.peak, self.at_peak = total, self.alive.copy()

    def _close(self, key: int) -> None:
        account, size = self._booked.pop(key)
        self.alive[account] -= size
