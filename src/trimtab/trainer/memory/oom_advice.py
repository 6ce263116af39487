"""Which settings to lower when memory runs out in a phase of a step, or is estimated to."""

from __future__ import annotations

from traceback import walk_tb
from typing import Literal

import torch

from trimtab.trainer.config import Config

Phase = Literal["sampling", "scoring", "update", "optimizer_step"]
DURING: dict[Phase, str] = {
    "sampling": "while sampling",
    "scoring": "while scoring responses",
    "update": "in an update",
    "optimizer_step": "in the optimizer step",
}


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
    update, rollout = config.update, config.rollout
    budget = f"update.token_budget (now {update.token_budget})"
    head = f"update.head_chunk (now {update.head_chunk})"
    if phase == "sampling":
        return f"lower rollout.batch_size (now {rollout.batch_size})"
    if phase == "scoring":
        return f"lower {budget}, then {head}"
    if phase == "optimizer_step":
        return "set model.lora_rank=16"
    # Gradient checkpointing comes before the head: activations are far larger than a chunk of logits.
    more = "" if config.model.gradient_checkpointing else ", set model.gradient_checkpointing=true"
    return f"lower {budget}{more}, then lower {head}"


def too_large(config: Config) -> str:
    """Return what to change where weights and optimizer state alone do not fit."""
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
