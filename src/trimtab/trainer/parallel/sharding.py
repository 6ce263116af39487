"""What processes split among them: the weights of decoder layers (FSDP2), and the optimizer's state and gradients.

With `model.shard`, for models that do not fit on one GPU, the weights of a layer's linear maps are one group: gathered
before the layer's forward or backward pass and freed after it, its gradients summed and scattered after every backward
pass. Everything else (embeddings, head, norms, adapters), and without `model.shard` every weight, stays
whole on every process. So tied weights and the fused head see nothing of it, and what is gathered can be gathered in
the compute type: autocast would round the same weights to it, and never norms.

Weights that stay whole share one flat tensor of gradients (ZeRO stage 2). FSDP2 could keep whole weights as well
(`reshard_after_forward=False`) and sends as many bytes, but holds a second copy of weights and gradients while it packs
them, needs a backward pass on every process, and knows no model whose layers are not in a list.

Bytes per process, for N processes, L weights in linear maps of layers, l in the largest layer, W others, T of them
trained, b bytes per value of the compute type (bf16 2, fp32 4):

| what | all weights trained | LoRA (W with adapters) |
|---|---|---|
| weights | 4 W + 4 L / N | 4 W + 4 L / N |
| gradients, in an update | 4 W + 4 (W + L) / N | 4 T + 4 T / N |
| AdamW | 8 (W + L) / N | 8 T / N |
| gathered, in a pass | up to 3 b l, and 4 l for gradients on their way | up to 3 b l |
| gathered, while the native sampler samples | b L | b L |
| the paged sampler's copy, always | b (L + head) | b (L + head) |

Without sharding L counts as W. Loading needs 4 (L + W) of the host's memory per process, and 4 l of the GPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from trimtab.trainer.parallel.world import World

if TYPE_CHECKING:  # importing them takes seconds, which only a command with a model should
    from torch.distributed.fsdp import FSDPModule

# The least share of a layer's weights that must be in linear maps. Experts of a mixture, for example, are not.
LEAST_SHARDED = 0.9


def shard_layers(model: nn.Module, backbone: nn.Module, world: World, device: torch.device, dtype: torch.dtype) -> None:
    """Move a model to a device with the weights of its decoder layers split among all processes.

    `backbone` is the part of the model that has the layers; they compute in `dtype`. Layers are moved one by one, so
    the device never holds the whole model.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    layers = _decoder_layers(backbone)
    sharded = {parameter for layer in layers for parameter in linear_parameters(layer)}
    _move(model, sharded, device)
    mesh = init_device_mesh(device.type, (world.size,))
    compute = None if dtype == torch.float32 else dtype
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in layers:
        whole = {parameter for parameter in module.parameters() if parameter not in sharded}
        layer = fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=whole)
        # Gradients are summed, as the loss is divided by the tokens of all processes. By default they are averaged; a
        # divide factor must be set on every module, and gloo knows no other reduction than the sum.
        layer.set_gradient_divide_factor(1.0)
        layer.set_force_sum_reduction_for_comms(True)
        layer.set_custom_all_gather(cast(Any, AllGather(world)))
        layer.set_custom_reduce_scatter(cast(Any, ReduceScatter(world)))
    # The backbone has no group. As their common root it lets a layer be gathered while another computes.
    whole = {parameter for parameter in backbone.parameters() if not is_split(parameter)}
    fully_shard(backbone, mesh=mesh, ignored_params=whole)


@dataclass(frozen=True)
class Exchange:
    """What FSDP exchanges goes through the world, for its errors and for processes that share a GPU."""

    world: World

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory to receive in."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(Exchange):
    """Gather the weights of a layer."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: object, async_op: bool = False) -> None:
        """Write all processes' parts into a tensor."""
        assert not async_op
        self.world.all_gather(output_tensor, input_tensor)


class ReduceScatter(Exchange):
    """Sum the gradients of a layer."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: object, op: object, async_op: bool = False
    ) -> None:
        """Write this process's part of the sum."""
        assert not async_op and op == distributed.ReduceOp.SUM
        self.world.reduce_scatter(input_tensor.view(-1), output_tensor.view(-1))


def _decoder_layers(backbone: nn.Module) -> list[nn.Module]:
    found = next((child for child in backbone.children() if isinstance(child, nn.ModuleList)), None)
    if not found:
        raise ValueError(f"model.shard = true: {type(backbone).__name__} has no list of decoder layers to split")
    for layer in found:
        own = [p for name, p in layer.named_parameters() if not _is_adapter(name)]
        linear = sum(p.numel() for p in linear_parameters(layer))
        # In a list of modules, some may get no gradient on some processes, and reductions would not fit each other.
        choice = any(isinstance(module, nn.ModuleList) for module in layer.modules())
        if choice or linear < LEAST_SHARDED * sum(p.numel() for p in own):
            raise ValueError(
                f"model.shard = true: most weights of a layer must be in linear maps that all tokens go through; those "
                f"of {type(layer).__name__} are not"
            )
    return list(found)


def linear_parameters(layer: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a layer's linear maps, without adapters, which are small."""
    linear = [m for name, m in layer.named_modules() if isinstance(m, nn.Linear) and not _is_adapter(name)]
    return [parameter for module in linear for parameter in module.parameters(recurse=False)]


def _is_adapter(name: str) -> bool:
    return any(part.startswith("lora_") for part in name.split("."))


def _move(model: nn.Module, without: set[nn.Parameter], device: torch.device) -> None:
    """Move a model to a device, all but some parameters."""
    torch.zeros((), device=device)  # else a device mesh would choose a GPU by the number of the process
    for parameter in model.parameters():
        if parameter not in without:
            parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


def is_split(tensor: Any) -> bool:
    """Return whether this process has only a part of a tensor."""
    return hasattr(tensor, "to_local")


def _fsdp_modules(model: Any) -> list[FSDPModule]:
    return [module for module in model.modules() if hasattr(module, "unshard")]


def unsharded_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, without the one that FSDP puts in its place."""
    return cast(type[nn.Module], type(module).__bases__[-1]) if hasattr(module, "unshard") else type(module)


def whole_tensor(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Gather a sharded tensor, cast to `dtype` before it travels; return any other as it is.

    All processes must call it together.
    """
    if not is_split(tensor):
        return tensor
    own = local_tensor(tensor)
    return gather_rows(own if dtype is None else own.to(dtype), tensor)


def gather_rows(own: Tensor, like: Any) -> Tensor:
    """Gather a tensor that is split as another, of which `own` is this process's part."""
    mesh, rows = like.device_mesh, _rows_per_process(like)
    through_host = own.is_cuda and distributed.get_backend() == "gloo"
    padded = own.new_zeros(rows, *like.shape[1:])
    padded[: len(own)] = own
    whole = own.new_empty(rows * mesh.size(), *like.shape[1:])
    World(mesh.get_local_rank(), mesh.size(), True, through_host).all_gather(whole.view(-1), padded.view(-1))
    return whole[: len(like)]


def _rows_per_process(tensor: Any) -> int:
    # FSDP splits the first axis as torch.chunk does: the last process may have less, or nothing.
    return int(-(-len(tensor) // tensor.device_mesh.size()))


def local_tensor(tensor: Any) -> Tensor:
    """Return this process's part of a sharded tensor, which shares its memory; any other as it is."""
    part: Tensor = tensor.detach().to_local() if is_split(tensor) else tensor
    return part


def local_part(whole: Tensor, like: Any) -> Tensor:
    """Return the part of a whole tensor that this process has of a sharded one of the same shape."""
    if not is_split(like):
        return whole
    rows = _rows_per_process(like)
    return whole[like.device_mesh.get_local_rank() * rows :][:rows]


def gather_to_leader(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return tensors with the sharded ones whole, in the host's memory, on rank 0; the other ranks get nothing.

    One tensor is gathered at a time. All processes must call it together.
    """
    gathered: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        whole = whole_tensor(tensor)
        if world.leads:
            gathered[name] = whole.to("cpu") if is_split(tensor) else whole
    return gathered


@contextmanager
def gathered_layers(model: Any) -> Iterator[None]:
    """Keep the layers whole on this process in the block: forward passes in it wait for no other process.

    All processes must enter it together, and no weight may change inside. Models that are not sharded are left alone.
    """
    layers = _fsdp_modules(model)
    for layer in layers:
        layer.unshard()
        layer.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_reshard_after_forward(True, recurse=False)
            layer.reshard()
        forget_forwards(model)


def forget_forwards(model: Any) -> None:
    """Drop what FSDP keeps of forward passes without a backward pass: it would grow with every one of them."""
    # torch empties these lists at the end of a backward pass only, and a reference model never has one. By their last
    # entries it gathers layers in advance: processes that have sampled for different times would gather different ones.
    for module in _fsdp_modules(model):
        state = module._get_fsdp_state()
        state._comm_ctx.post_forward_order.clear()
        if state._fsdp_param_group is not None:
            state._fsdp_param_group._post_forward_indices.clear()


class ShardedOptimizer:
    """Wraps an element-wise optimizer, such as AdamW or SGD, that `make` builds over what this process updates.

    Gradients of whole parameters lie in one flat tensor. A step sums it over the processes, leaves to each the slice
    whose optimizer state it holds, updates that slice of the weights, and gathers the slices. Split parameters
    (`shard_layers`) have gradients and state where their part is. Both kinds have one norm to clip by, and saved state
    does not depend on the number of processes.

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
        self._flat = None
        self._gradients = []

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
