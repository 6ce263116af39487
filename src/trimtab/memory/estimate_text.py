"""The forecast in words: what takes how much, whether it fits, and what to lower if not."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from trimtab.config import Config
from trimtab.memory.estimate import Forecast, forecast
from trimtab.memory.model_shape import NoForecastError
from trimtab.memory.oom_advice import WHILE, remedy, too_large

SLACK = 1.05  # torch's allocator holds a little more than is in use
ROWS = {
    "weights": "weights, fp32",
    "gradients": "their gradients",
    "optimizer": "AdamW's state",
    "reference": "the reference model",
    "sampler": "sampler: a copy of the weights, buffers",
    "cache": "sampler: the cache of responses",
    "activations": "update: activations of a part",
    "copies": "update: weights in bf16",
    "head": "update: logits and what is made of them",
    "backward": "update: the backward pass",
}


@dataclass(frozen=True)
class Room:
    """A device's memory in bytes: all of it, and what is free."""

    name: str
    whole: int
    free: int


def describe_estimate(config: Config, room: Room | None = None) -> list[str]:
    """Lines on the memory that a run will take; `room` is the GPU's, by default that of the one that is there."""
    kind = config.run.device.split(":")[0]
    if room is None and kind in {"auto", "cuda"}:
        room = visible_gpu(config.run.device)
    on_gpu = kind == "cuda" or (kind == "auto" and room is not None)
    try:
        if on_gpu:
            return _on_gpu(config, forecast(config, "cuda", None if room is None else room.whole), room)
        return _on_cpu(config, forecast(config, "cpu"))
    except NoForecastError as error:
        return [f"  no forecast: {error}"]
    except Exception as error:  # whatever a model does that cannot be done without data
        why = " ".join(str(error).split())[:200]
        return [
            f"  no forecast: {config.model.path} cannot be counted without its weights: {type(error).__name__}: {why}"
        ]


def fits(made: Forecast, config: Config, room: Room) -> str:
    """Whether a run fits into a device, and if not what to lower."""
    needed, there = made.peak * SLACK, f"{room.name} has {_gb(room.free)} GB free"
    if needed <= room.free:
        return f"{there}: it fits"
    if made.weights + made.gradients + made.optimizer + made.reference > room.free:
        return f"{there}: it does not fit, nor do weights and optimizer alone: {too_large(config)}"
    phases = [phase for phase, peak in made.phases.items() if peak * SLACK > room.free]
    todo = "; ".join(f"{WHILE[phase]}: {remedy(phase, config)}" for phase in phases)
    return f"{there}: it does not fit, {todo}"


def visible_gpu(device: str) -> Room | None:
    """The memory of the GPU that a run would be on."""
    if not torch.cuda.is_available():
        return None
    where = torch.device("cuda" if device == "auto" else device)
    free, whole = torch.cuda.mem_get_info(where)
    return Room(torch.cuda.get_device_name(where), whole, free)


def _on_gpu(config: Config, made: Forecast, room: Room | None) -> list[str]:
    rows = {words: getattr(made, name) for name, words in ROWS.items()}
    width = max(len(words) for words in rows)
    lines = [
        "  foretold for a GPU, in GB (10^9 bytes), were every prompt and response as long as it may be:",
        *(f"    {words:<{width}} {_gb(size):>8}" for words, size in rows.items() if size),
        "  at most " + ", ".join(f"{_gb(peak)} {WHILE[phase]}" for phase, peak in made.phases.items()),
        f"  so the run needs {_gb(made.peak)} GB of device memory, {WHILE[made.worst]}",
    ]
    if room is not None:
        return [*lines, f"  {fits(made, config, room)}"]
    more = []
    if config.rollout.engine == "vllm":
        share = config.rollout.vllm_gpu_memory_utilization
        more = [f"  and {share:.0%} of the device for vLLM while it samples (rollout.vllm_gpu_memory_utilization)"]
    elif made.cache:
        more = [
            f"  the cache takes at most {config.rollout.kv_cache_memory:.0%} of the device (rollout.kv_cache_memory)"
        ]
    return [*lines, *more, "  no GPU is visible here to say whether that fits"]


def _on_cpu(config: Config, made: Forecast) -> list[str]:
    lines = [
        f"  foretold: {_gb(made.peak)} GB of main memory beside torch's own, {WHILE[made.worst]}, were every prompt "
        "and response as long as it may be",
    ]
    free = _main_memory()
    if free is not None and made.peak > free:
        lines.append(f"  {fits(made, config, Room('this machine', free, free))}")
    return [*lines, "  (what a GPU would need: --set run.device=cuda)"]


def _main_memory() -> int | None:
    """Free main memory; None where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}" if size >= 5e7 else f"{size / 1e9:.2g}"
