"""verl on a CPU, for the tests: a platform, and what puts the sampler of `verl_sampler` in the place of vLLM.

verl loads this module by itself in the driver and in every worker (`VERL_USE_EXTERNAL_MODULES=helpers.engines.verl_cpu
VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda`). It stands in for GPUs and vLLM only:
trainer, engine, optimizer and queues are verl's.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry, set_platform

NAME = "cpu_sampler"


class _Device(types.ModuleType):
    """What verl asks of `torch.cuda`, on a CPU."""

    def __getattr__(self, name: str) -> Any:
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        if name.startswith(("max_memory_", "memory_")):
            return lambda *_, **__: 0
        known = {
            "mem_get_info": lambda *_: (1 << 34, 1 << 34),
            "get_rng_state": lambda *_: torch.get_rng_state(),
            "set_rng_state": lambda state, *_: torch.set_rng_state(state),
            "get_device_name": lambda *_: "cpu",
        }
        if name in known:
            return known[name]
        if name.startswith(("empty", "ipc", "manual", "set", "reset")):
            return lambda *_, **__: None
        raise AttributeError(name)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """A CPU that Ray counts as a GPU."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _Device("cpu_device")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, number: int) -> dict[str, int]:
        return {"num_gpus": number}

    def is_ipc_supported(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def _nothing(self, *_: Any, **__: Any) -> None:
        """There is no device to do this on."""

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing


def _replica() -> Any:
    from verl.workers.rollout.replica import RolloutReplica

    class Replica(RolloutReplica):
        """One server, as a Ray actor."""

        async def launch_servers(self) -> None:
            name = f"{NAME}_{self.replica_rank}"
            options = {"name": name, "num_cpus": 0, "max_concurrency": 256}
            tokens = int(self.config.response_length)
            from helpers.engines.verl_sampler import Sampler

            handle = ray.remote(Sampler).options(**options).remote(self.model_config.path, tokens)
            await handle.ping.remote()
            self.servers, self._server_handle, self._server_address = [handle], handle, name

    return Replica


def __getattr__(name: str) -> Any:
    """The adapter, made when verl asks for it: its base class cannot be imported while verl itself is."""
    if name != "Adapter":
        raise AttributeError(name)
    from verl.workers.rollout.base import BaseRollout

    class Adapter(BaseRollout):
        """Hands new weights to the server."""

        def __init__(self, config: Any, model_config: Any, device_mesh: Any, **_: Any) -> None:
            super().__init__(config, model_config, device_mesh)
            self.rank = int(os.environ["RANK"])

        async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
            copied = {name: tensor.detach().cpu().clone() for name, tensor in weights}
            await ray.get_actor(f"{NAME}_{self.rank}").update.remote(copied, global_steps)

        async def resume(self, tags: list[str]) -> None: ...

        async def release(self) -> None: ...

    return Adapter


def _gloo_once() -> None:
    """verl names a backend for the CPU and one for the device; where both are the CPU, torch wants one name."""
    begin = torch.distributed.init_process_group

    def init_process_group(backend: str | None = None, *arguments: Any, **options: Any) -> None:
        begin("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *arguments, **options)

    torch.distributed.init_process_group = init_process_group


def install() -> None:
    """Make this process's verl run on the CPU."""
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")  # FSDP is registered for that name alone
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[assignment,method-assign]  # nothing to pin for
    set_platform(CpuPlatform())
    base._ROLLOUT_REGISTRY["cpu", "async"] = "helpers.engines.verl_cpu.Adapter"
    RolloutReplicaRegistry.register("cpu", _replica)
    _gloo_once()


install()
