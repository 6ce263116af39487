"""What to lower when memory runs out: told from where in the code it happened, or from a forecast that it will."""

from __future__ import annotations

from types import TracebackType
from typing import Literal

import torch

from trimtab.config import Config

Phase = Literal["sampling", "scoring", "update", "step"]
WHILE: dict[Phase, str] = {
    "sampling": "while sampling",
    "scoring": "while scoring responses",
    "update": "in an update",
    "step": "in the optimizer step",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is a GPU or the machine that has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def oom_message(error: BaseException, config: Config) -> str:
    """One sentence on what the run was doing, and the settings that make it smaller."""
    phase = _phase(_places(error.__traceback__))
    if phase is None:
        return f"out of memory before the first step: {too_large(config)}"
    why = ", whose state is two numbers per weight" if phase == "step" else ""
    return f"out of memory {WHILE[phase]}{why}: {remedy(phase, config)}"


def remedy(phase: Phase, config: Config) -> str:
    """The settings that make a phase smaller, the best first."""
    update, rollout = config.update, config.rollout
    parts = f"update.token_budget (now {update.token_budget})"
    head = f"update.head_chunk (now {update.head_chunk})"
    if phase == "sampling":
        return f"lower rollout.batch_size (now {rollout.batch_size})"
    if phase == "scoring":
        return f"lower {parts}, then {head}"
    if phase == "step":
        return "set model.lora_rank=16"
    more = "" if config.model.gradient_checkpointing else ", set model.gradient_checkpointing=true"
    return f"lower {parts}{more}, then lower {head}"


def too_large(config: Config) -> str:
    """What to do where the weights and what belongs to them are too many."""
    lora = "" if config.model.lora_rank else ", or set model.lora_rank=16"
    return f"{config.model.path} is too large for {config.run.device}; take a smaller model.path{lora}"


def _phase(where: list[tuple[str, str]]) -> Phase | None:
    """The phase of a step that a place in the code belongs to; None outside of all."""
    if any(module.startswith("trimtab.rollout") for module, _ in where):
        return "sampling"
    if ("trimtab.policy.score", "score") in where:
        return "scoring"
    if ("trimtab.policy.update", "_step") in where:
        return "step"
    if ("trimtab.policy.update", "update") in where or ("trimtab.policy.score", "log_probs") in where:
        return "update"
    return None


def _places(trace: TracebackType | None) -> list[tuple[str, str]]:
    """Module and function of every frame, outermost first."""
    places = []
    while trace is not None:
        frame = trace.tb_frame
        places.append((str(frame.f_globals.get("__name__", "")), frame.f_code.co_name))
        trace = trace.tb_next
    return places
