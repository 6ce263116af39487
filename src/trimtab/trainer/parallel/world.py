"""The processes of a run: how many there are, which one this is, and how they exchange values.

Rank 0 runs the training loop and owns all files and all output. The other ranks follow: they wait for rank 0 to name a
function, run it on their own trainer together with rank 0, and wait again. A run of a single process goes through the
same code; every exchange then returns what it was given.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from trimtab.process import ignore_stop_signals
from trimtab.trainer.parallel.watch import Watch, count_exchange, longest_wait

Value = TypeVar("Value")


class LostProcessError(RuntimeError):
    """Another process of the run has ended, or has not answered for too long."""


@dataclass(frozen=True)
class World:
    """The processes of a run; `parallel` is set if torch.distributed connects them, even if there is only one.

    With `through_host` tensors on a GPU travel through main memory, for processes that share a GPU.
    `watch` notices when one of them is lost.
    """

    rank: int = 0
    size: int = 1
    parallel: bool = False
    through_host: bool = False
    watch: Watch | None = None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, the only one that writes files and prints."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """Return which of `count` items are this rank's, as many as any other rank's or one less."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks in rank order, on every rank; values travel pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with lost_processes():
            distributed.all_gather_object(values, value)
        return values

    def collect(self, value: Value) -> list[Value]:
        """Return the values of all ranks in rank order, on rank 0; nothing on the others. Values travel pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.leads else None
        with lost_processes():
            distributed.gather_object(value, values)
        return values or []

    def from_leader(self, value: Value) -> Value:
        """Return rank 0's value on every rank."""
        if self.leads:
            self.send(value)
            return value
        received: Value = self.receive()
        return received

    def gather_columns(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """Concatenate the columns (last axis) of all ranks' tensors; `counts` is how many each rank has."""
        if self.size == 1:
            return own
        # all_gather needs equal shapes, so every rank pads to the longest.
        padded = own.new_zeros(*own.shape[:-1], max(counts))
        padded[..., : own.shape[-1]] = own
        padded = self._to_send(padded)
        parts = [torch.empty_like(padded) for _ in counts]
        with lost_processes():
            distributed.all_gather(parts, padded)
        return torch.cat([part[..., :count] for part, count in zip(parts, counts, strict=True)], dim=-1).to(own.device)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors."""
        if self.size == 1:
            return tensor
        total = self._to_send(tensor)
        with lost_processes():
            distributed.all_reduce(total)
        return total.to(tensor.device)

    def reduce_scatter(self, flat: Tensor, own: Tensor | None = None) -> Tensor:
        """Return this rank's slice, by default a new tensor, of the sum of all ranks' flat tensors.

        `size` must divide their length.
        """
        own = flat.new_empty(len(flat) // self.size) if own is None else own
        sent = self._to_send(flat)
        received = own if sent is flat else sent.new_empty(len(own))
        with lost_processes():
            _reduce_scatter(received, sent)
        return own if received is own else own.copy_(received)

    def all_gather(self, whole: Tensor, own: Tensor) -> None:
        """Write every rank's slice into the flat tensor `whole`."""
        sent = self._to_send(own)
        received = whole if sent is own else sent.new_empty(len(whole))
        with lost_processes():
            _all_gather(received, sent)
        if received is not whole:
            whole.copy_(received)

    def send(self, call: object) -> None:
        """Send a value from rank 0 to the ranks that wait in `receive`."""
        if self.size > 1:
            with lost_processes():
                distributed.broadcast_object_list([call], src=0)

    def receive(self) -> Any:
        """Wait for what rank 0 sends."""
        call: list[Any] = [None]
        with lost_processes():
            distributed.broadcast_object_list(call, src=0)
        return call[0]

    def _to_send(self, tensor: Tensor) -> Tensor:
        return tensor.cpu() if self.through_host else tensor

    def end_watch(self) -> None:
        """From now on the other processes may end."""
        if self.watch is not None:
            self.watch.end()

    def lost_reason(self, error: LostProcessError) -> str:
        """Return which process was lost and why, as far as that is known."""
        return (self.watch and self.watch.reason()) or str(error)

    def leave(self) -> None:
        """Close the connections to the other ranks."""
        self.end_watch()
        if self.parallel and distributed.is_initialized():
            distributed.destroy_process_group()


# torch 2.13 has renamed both.
_reduce_scatter: Callable[..., Any] = (
    getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
)
_all_gather: Callable[..., Any] = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


@contextmanager
def lost_processes() -> Iterator[None]:
    """Turn errors of a connection into LostProcessError."""
    count_exchange()
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        ignore_stop_signals()  # torchrun sends SIGTERM to those that remain
        raise LostProcessError(f"another process of the run has ended or does not answer: {error!s:.200}") from error


def join_world(device: str) -> World:
    """Connect to the other processes if torchrun's variables are in the environment; `device` is `run.device`."""
    numbers = _launched_as()
    if numbers is None:
        return World()
    rank, size, local = numbers
    wants_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    # `cuda:0` names one GPU for all: a way to try several processes on one GPU, which NCCL refuses.
    own_gpu = wants_gpu and ":" not in device
    if own_gpu:
        found = torch.cuda.device_count()
        if local >= found:
            raise ValueError(f"process {rank} needs GPU {local}, but torch sees {found} here: start {found} processes")
        torch.cuda.set_device(local)
    with lost_processes():
        # Later than `Watch`, which knows who does not answer.
        timeout = longest_wait() + timedelta(minutes=5)
        distributed.init_process_group("cpu:gloo,cuda:nccl" if own_gpu else "gloo", timeout=timeout)
    world = World(rank, size, parallel=True, through_host=wants_gpu and not own_gpu)
    return world if size == 1 else replace(world, watch=_start_watch(world))


def _launched_as() -> tuple[int, int, int] | None:
    """Return rank, number of processes and local rank as torchrun sets them; None for a process by itself."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    texts = [os.environ.get(name, os.environ[other]) for name, other in zip(names, names[:2] * 2, strict=True)]
    try:
        rank, size, local, local_size = map(int, texts)
    except ValueError:
        wrong = ", ".join(f"{name}={text}" for name, text in zip(names, texts, strict=True))
        raise ValueError(f"the environment has {wrong}: they must be whole numbers, as torchrun sets them") from None
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        if size == 1:
            return None
        raise ValueError(
            f"the environment has RANK={rank} and WORLD_SIZE={size} but no {missing[0]}: start the processes with "
            "torchrun or --gpus, or unset RANK and WORLD_SIZE"
        )
    if local_size != size:
        raise ValueError(
            f"{local_size} of {size} processes are on this machine: trimtab trains on the GPUs of one machine. "
            "For several use its objectives in verl"
        )
    return rank, size, local


def _start_watch(world: World) -> Watch:
    """Start to watch the processes of the world."""
    # A separate connection: that of the process group may be blocked by a call that waits.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with lost_processes():
        store = distributed.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30))  # type: ignore[attr-defined]
    watch = Watch(world.rank, world.gather(os.getpid()), store)
    watch.start()
    return watch


def balanced_shares(costs: Sequence[float], size: int) -> list[slice]:
    """Split items into `size` consecutive shares of about equal cost, in rank order; shares may be empty."""
    ends = list(accumulate(costs))
    total = ends[-1] if ends else 0.0
    # An item belongs to the share in which its middle lies.
    middles = [end - cost / 2 for end, cost in zip(ends, costs, strict=True)]
    bounds = [bisect_left(middles, total * rank / size) for rank in range(size)]
    return [slice(first, last) for first, last in pairwise([*bounds, len(costs)])]
