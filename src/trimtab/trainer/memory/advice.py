"""The memory estimate as text, whether it fits, and which settings to lower if it does not or if memory runs out."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb

import torch

from trimtab.trainer.config import Config
from trimtab.trainer.memory.estimate import DURING, MemoryEstimate, NoEstimateError, Phase, estimate_memory

SLACK = 1.05  # torch's caching allocator reserves a few percent more than is in use
ROWS = {
    "weights": "weights, fp32",
    "gradients": "gradients",
    "optimizer_state": "AdamW's state",
    "reference": "reference model",
    "sampler": "sampler: copy of the weights, buffers",
    "kv_cache": "sampler: KV cache",
    "activations": "update: activations of a micro-batch",
    "weight_copies": "update: weights in bf16",
    "head": "update: logits and their gradients",
    "backward": "update: backward pass",
}


@dataclass(frozen=True)
class DeviceMemory:
    """A device's memory in bytes, in total and free."""

    name: str
    total: int
    free: int


def describe_estimate(config: Config, available: DeviceMemory | None = None, gpus: int | None = None) -> list[str]:
    """Return lines on the memory that a run will take; `available` is the GPU's, by default that of the visible one.

    With a number of `gpus` it is what each of them needs.
    """
    kind = config.run.device.split(":")[0]
    if available is None and kind in {"auto", "cuda"}:
        available = visible_gpu(config.run.device)
    on_gpu = kind == "cuda" or (kind == "auto" and available is not None)
    try:
        if on_gpu:
            total = available.total if available else None
            return _on_gpu(config, estimate_memory(config, "cuda", total, gpus), available, gpus)
        return _on_cpu(config, estimate_memory(config, "cpu", processes=gpus))
    except NoEstimateError as error:
        return [f"  no estimate: {error}"]
    except Exception as error:  # models may do anything that fake tensors cannot
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return [f"  no estimate: {config.model.path} does not run on tensors without data: {why}"]


def describe_fit(estimate: MemoryEstimate, config: Config, available: DeviceMemory) -> str:
    """Return whether a run fits into a device, and if not what to lower."""
    # Gradients are freed before sampling, but weights, gradients and state are there together in every optimizer step.
    needed = estimate.peak * SLACK
    there = f"{available.name} has {_gb(available.free)} GB free"
    if needed <= available.free:
        return f"{there}: it fits"
    if estimate.weights + estimate.gradients + estimate.optimizer_state + estimate.reference > available.free:
        return f"{there}: it does not fit, nor do weights and optimizer alone: {too_large(config)}"
    phases = [phase for phase, peak in estimate.phases.items() if peak * SLACK > available.free]
    todo = "; ".join(f"{DURING[phase]}: {remedy(phase, config)}" for phase in phases)
    return f"{there}: it does not fit, {todo}"


def fits(config: Config, available: DeviceMemory) -> bool:
    """Return whether a run is estimated to fit into a GPU."""
    return estimate_memory(config, "cuda", available.total).peak * SLACK <= available.free


def visible_gpu(device: str) -> DeviceMemory | None:
    """Return the memory of the GPU that a run would use; None without one."""
    if not torch.cuda.is_available():
        return None
    where = torch.device("cuda" if device == "auto" else device)
    free, total = torch.cuda.mem_get_info(where)
    return DeviceMemory(torch.cuda.get_device_name(where), total, free)


def _on_gpu(config: Config, estimate: MemoryEstimate, available: DeviceMemory | None, gpus: int | None) -> list[str]:
    rollout = config.rollout
    width = max(map(len, ROWS.values()))
    rows = [(label, getattr(estimate, name)) for name, label in ROWS.items()]
    on, each = ("a GPU", "the") if gpus is None else (f"each of {gpus} GPUs", "each")
    lines = [
        f"  estimated for {on}, in GB (10^9 bytes), with every prompt and response at its maximal length:",
        *(f"    {label:<{width}} {_gb(size):>8}" for label, size in rows if size),
        "  at most " + ", ".join(f"{_gb(peak)} {DURING[phase]}" for phase, peak in estimate.phases.items()),
        f"  so the run needs {_gb(estimate.peak)} GB of {each} GPU's memory, {DURING[estimate.worst_phase]}",
    ]
    if available is not None:
        return [*lines, f"  {describe_fit(estimate, config, available)}"]
    if rollout.engine == "vllm":
        share = rollout.vllm_gpu_memory_utilization
        lines.append(f"  and {share:.0%} of the device for vLLM while it samples (rollout.vllm_gpu_memory_utilization)")
    elif estimate.kv_cache:
        share = rollout.kv_cache_memory
        lines.append(f"  the KV cache takes at most {share:.0%} of the device (rollout.kv_cache_memory)")
    return [*lines, "  whether that fits is unknown: no GPU is visible here"]


def _on_cpu(config: Config, estimate: MemoryEstimate) -> list[str]:
    lines = [
        f"  estimated: {_gb(estimate.peak)} GB of main memory beside torch's own, {DURING[estimate.worst_phase]}, "
        "with every prompt and response at its maximal length",
    ]
    # Main memory is shared and can be swapped: a line is added only if the estimate clearly exceeds it.
    free = _main_memory()
    if free is not None and estimate.peak > free:
        lines.append(f"  {describe_fit(estimate, config, DeviceMemory('this machine', free, free))}")
    return [*lines, "  (what a GPU would need: --set run.device=cuda)"]


def _main_memory(table: Path = Path("/proc/meminfo")) -> int | None:
    """Return the main memory that a program can still get; None if the system does not report it."""
    # Linux gives up its file cache when a program needs memory, but SC_AVPHYS_PAGES does not count it as free.
    with suppress(OSError):
        if available := re.search(r"^MemAvailable: *(\d+) kB", table.read_text(), re.MULTILINE):
            return 1024 * int(available[1])
    with suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _gb(size: float) -> str:
    # Small models get two significant digits instead of 0.0 GB.
    return f"{size / 1e9:.1f}" if size >= 5e7 else f"{size / 1e9:.2g}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the GPU or the machine has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # torch's CPU allocator raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def oom_message(error: BaseException, config: Config) -> str:
    """Return one sentence on what the run was doing when memory ran out, and which settings to lower."""
    # By the call stack, since torch's error does not contain what the memory was for.
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    phase = _phase([(str(frame.f_globals.get("__name__", "")), frame.f_code.co_name) for frame in frames])
    if phase is None:
        return f"out of memory before the first step: {too_large(config)}"
    why = ", whose state is two numbers per weight" if phase == "optimizer_step" else ""
    return f"out of memory {DURING[phase]}{why}: {remedy(phase, config)}"


def remedy(phase: Phase, config: Config) -> str:
    """Return the settings that lower a phase's memory, the most effective first."""
    update = config.update
    rollout = config.rollout
    budget = f"update.token_budget (now {update.token_budget})"
    head = f"update.head_chunk (now {update.head_chunk})"
    if phase == "sampling":
        lower = f"lower rollout.batch_size (now {rollout.batch_size})"
        return lower + (", or on a GPU rollout.kv_cache_memory" if rollout.engine == "native" else "")
    if phase == "scoring":
        return f"lower {budget}, then {head}"
    if phase == "optimizer_step":
        return "set model.lora_rank=16"
    # Gradient checkpointing comes before the head: activations are far larger than a chunk of logits.
    more = "" if config.model.gradient_checkpointing else ", set model.gradient_checkpointing=true"
    return f"lower {budget}{more}, then lower {head}"


def too_large(config: Config) -> str:
    """Return what to change if even weights and optimizer state do not fit."""
    lora = "" if config.model.lora_rank else ", or set model.lora_rank=16"
    return f"{config.model.path} is too large for {config.run.device}; take a smaller model.path{lora}"


def _phase(stack: list[tuple[str, str]]) -> Phase | None:
    """Return the phase of a call stack, given as (module, function) pairs; None outside of all phases."""
    if any(module.startswith("trimtab.trainer.sampling") for module, _ in stack):
        return "sampling"
    if ("trimtab.trainer.model.score", "score") in stack:
        return "scoring"
    if ("trimtab.trainer.model.update", "_step") in stack:  # inside `update`, so before it
        return "optimizer_step"
    if ("trimtab.trainer.model.update", "update") in stack or ("trimtab.trainer.model.score", "log_probs") in stack:
        return "update"
    return None
