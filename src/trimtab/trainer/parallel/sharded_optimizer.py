"""An optimizer whose state is split among the processes, while each keeps all weights (ZeRO stage 2).

Gradients of all parameters lie in one flat tensor. A step sums it over the processes, leaves to each the slice whose
optimizer state it holds, updates that slice of the weights, and gathers the slices. So the sampler in the same process
always has the whole weights, and a checkpoint's optimizer state does not depend on the number of processes.

Parameters whose weights are split too (`shard_layers`) have gradients and state where their part is (ZeRO stage 3).
Both kinds have one optimizer, and one norm to clip by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trimtab.trainer.parallel.sharded_layers import gather_rows, is_split, local_part, local_tensor
from trimtab.trainer.parallel.world import World


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
        self._whole = [p for p in self.parameters if not is_split(p)]
        self._split = [p for p in self.parameters if is_split(p)]
        self.slice_size = -(-sum(p.numel() for p in self._whole) // world.size)  # the last slice ends with padding
        # Their values exist within a step only; the optimizer's state belongs to the objects: first the slice of whole
        # parameters, then the parts of those that are split.
        self._own = [nn.Parameter(self.parameters[0].new_empty(0)) for _ in range(1 + len(self._split))]
        self.inner = make(self._own)
        self._flat: Tensor | None = None  # gradients, then the updated weights
        self._gradients: list[Tensor] = []  # of what this process updates, summed over all processes

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the wrapped optimizer, whose options can be changed between steps."""
        return self.inner.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        self._flat, self._gradients = None, []

    def start(self) -> None:
        """Allocate the gradients, all zero, for backward passes to add to."""
        self.zero_grad()
        self._flat = self._own[0].data.new_zeros(self.slice_size * self.world.size)
        for parameter, view in self._views(self._flat):
            parameter.grad = view

    def reduce(self, max_norm: float) -> Tensor:
        """Sum the gradients over the processes, clip the sum, and return its norm before that."""
        assert self._flat is not None, "reduce follows start"
        # Those of split parameters have been summed by the backward passes.
        split = [torch.zeros_like(local_tensor(p)) if p.grad is None else local_tensor(p.grad) for p in self._split]
        for parameter in self.parameters:
            parameter.grad = None
        self._gradients = [self.world.reduce_scatter(self._flat), *split]
        squares = torch.stack([torch.linalg.vector_norm(each).square() for each in self._gradients])
        norm = self.world.sum(squares.sum()).sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in self._gradients:
            gradient.mul_(scale)
        return norm

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights by the gradients that `reduce` has left."""
        assert self._flat is not None and self._gradients, "step follows reduce"
        flat = self._flat
        # From the parameters, not from a copy kept since the last step: somebody may have loaded other weights.
        for parameter, view in self._views(flat):
            view.copy_(parameter)
        own = flat[self.world.rank * self.slice_size :][: self.slice_size].clone()
        values = [own, *map(local_tensor, self._split)]
        for parameter, value, gradient in zip(self._own, values, self._gradients, strict=True):
            parameter.data, parameter.grad = value, gradient
        self.inner.step()
        self.world.all_gather(flat, own)
        for parameter, view in self._views(flat):
            parameter.copy_(view)
        for parameter in self._own:
            parameter.data, parameter.grad = own.new_empty(0), None

    def gather_state(self) -> dict[str, Tensor]:
        """Return on rank 0 the whole state as `NUMBER OF THE PARAMETER/NAME`, as one optimizer over all would have it.

        All processes must call it together; the others get nothing.
        """
        state: dict[str, Tensor] = {}

        def keep(parameter: nn.Parameter, name: str, value: Tensor) -> None:
            if self.world.leads:
                state[f"{numbers[parameter]}/{name}"] = value.to("cpu", copy=True)

        numbers = {parameter: number for number, parameter in enumerate(self.parameters)}
        for name, value in self.inner.state[self._own[0]].items():
            if not value.dim():  # a counter
                for parameter in self._whole:
                    keep(parameter, name, value)
                continue
            flat = value.new_empty(self.slice_size * self.world.size)
            self.world.all_gather(flat, value)
            for parameter, view in self._views(flat):
                keep(parameter, name, view)
        for parameter, own in zip(self._split, self._own[1:], strict=True):
            for name, value in self.inner.state[own].items():
                keep(parameter, name, value if not value.dim() else gather_rows(value, parameter))
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take this process's part of what `gather_state` returned, on any number of processes."""
        numbers = {parameter: number for number, parameter in enumerate(self.parameters)}
        loaded: dict[int, dict[str, Tensor]] = {}
        for name in sorted({key.partition("/")[2] for key in state}):
            parts = {p: state.get(f"{number}/{name}") for p, number in numbers.items()}
            known = [part for part in parts.values() if part is not None]
            if all(not part.dim() for part in known) and name == "step":
                for position in range(len(self._own)):
                    loaded.setdefault(position, {})[name] = torch.stack(known).max()
                continue
            flat = torch.zeros(self.slice_size * self.world.size)
            for parameter, view in self._views(flat):
                part = parts[parameter]
                if part is not None:  # a parameter that had no gradient yet has no state
                    view.copy_(part)
            own = flat[self.world.rank * self.slice_size :][: self.slice_size].clone()
            loaded.setdefault(0, {})[name] = own
            for position, parameter in enumerate(self._split, 1):
                part = parts[parameter]
                whole = torch.zeros(parameter.shape) if part is None else part
                loaded.setdefault(position, {})[name] = local_part(whole, parameter).clone()
        # Moves it to where the optimizer wants it.
        self.inner.load_state_dict({**self.inner.state_dict(), "state": loaded})

    def _views(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each whole parameter with its part of a flat tensor, in its shape."""
        first = 0
        for parameter in self._whole:
            yield parameter, flat[first : first + parameter.numel()].view_as(parameter)
            first += parameter.numel()
