"""An optimizer whose state is split among the processes, while each keeps all weights (ZeRO stage 2).

Gradients of all parameters lie in one flat tensor. A step sums it over the processes, leaves to each the slice whose
optimizer state it holds, updates that slice of the weights, and gathers the slices. So the sampler in the same process
always has the whole weights, and a checkpoint's optimizer state does not depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trimtab.parallel.world import World


class ShardedOptimizer:
    """Wraps an element-wise optimizer, such as AdamW or SGD, that `make` builds over this process's slice.

    Unlike a torch optimizer it updates every parameter in every step, also one that had no gradient.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], world: World, make: Callable[[list[nn.Parameter]], Optimizer]
    ) -> None:
        self.world = world
        self.parameters = list(parameters)
        if len({(p.dtype, p.device) for p in self.parameters}) != 1:
            raise ValueError("the trained parameters must have one type and lie on one device")
        self.total = sum(p.numel() for p in self.parameters)
        self.slice_size = -(-self.total // world.size)  # rounded up: the last slice ends with padding
        first = self.parameters[0]
        # Its values exist within a step only; the optimizer's state belongs to the object.
        self._own = nn.Parameter(first.new_empty(0))
        self.inner = make([self._own])
        self._flat: Tensor | None = None  # gradients, then the updated weights
        self._gradient: Tensor | None = None  # the slice of their sum

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the wrapped optimizer, whose options can be changed between steps."""
        return self.inner.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        self._flat = self._gradient = None

    def start(self) -> None:
        """Allocate the gradients, all zero, for backward passes to add to."""
        self.zero_grad()
        self._flat = self.parameters[0].new_zeros(self.slice_size * self.world.size)
        for parameter, view in self._views(self._flat):
            parameter.grad = view

    def reduce(self, max_norm: float) -> Tensor:
        """Sum the gradients over the processes, clip the sum, and return its norm before that."""
        assert self._flat is not None, "reduce follows start"
        for parameter in self.parameters:
            parameter.grad = None
        gradient = self._gradient = self.world.reduce_scatter(self._flat)
        norm = self.world.sum(torch.linalg.vector_norm(gradient).square()).sqrt()
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights by the gradients that `reduce` has left."""
        assert self._flat is not None and self._gradient is not None, "step follows reduce"
        flat = self._flat
        # From the parameters, not from a copy kept since the last step: somebody may have loaded other weights.
        for parameter, view in self._views(flat):
            view.copy_(parameter)
        own = flat[self.world.rank * self.slice_size :][: self.slice_size].clone()
        self._own.data, self._own.grad = own, self._gradient
        self.inner.step()
        self.world.all_gather(flat, own)
        for parameter, view in self._views(flat):
            parameter.copy_(view)
        self._own.data, self._own.grad = own.new_empty(0), None

    def gather_state(self) -> dict[str, Tensor]:
        """Return the whole state as `NUMBER OF THE PARAMETER/NAME`, as an optimizer over all parameters has it.

        All processes must call it together.
        """
        state: dict[str, Tensor] = {}
        for name, value in self.inner.state[self._own].items():
            if not value.dim():  # a counter
                state |= {f"{number}/{name}": value.to("cpu", copy=True) for number in range(len(self.parameters))}
                continue
            flat = value.new_empty(self.slice_size * self.world.size)
            self.world.all_gather(flat, value)
            views = enumerate(view for _, view in self._views(flat))
            state |= {f"{number}/{name}": view.to("cpu", copy=True) for number, view in views}
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take this process's slice of what `gather_state` returned, on any number of processes."""
        loaded: dict[str, Tensor] = {}
        for name in sorted({key.partition("/")[2] for key in state}):
            parts = [state.get(f"{number}/{name}") for number in range(len(self.parameters))]
            known = [part for part in parts if part is not None]
            if all(not part.dim() for part in known) and name == "step":
                loaded[name] = torch.stack(known).max()
                continue
            flat = torch.zeros(self.slice_size * self.world.size)
            for (_, view), part in zip(self._views(flat), parts, strict=True):
                if part is not None:  # a parameter that had no gradient yet has no state
                    view.copy_(part)
            loaded[name] = flat[self.world.rank * self.slice_size :][: self.slice_size].clone()
        # Moves it to where the optimizer wants it.
        self.inner.load_state_dict({**self.inner.state_dict(), "state": {0: loaded} if loaded else {}})

    def _views(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter with its part of a flat tensor, in its shape."""
        first = 0
        for parameter in self.parameters:
            yield parameter, flat[first : first + parameter.numel()].view_as(parameter)
            first += parameter.numel()
