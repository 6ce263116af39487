"""What to lower when memory runs out: told from where in the code it happened."""

from __future__ import annotations

from types import TracebackType

import torch

from trimtab.train.config import Config


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is a GPU or the machine that has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def advice(error: BaseException, config: Config) -> str:
    """One sentence on what the run was doing, and the settings that make it smaller."""
    where = _places(error.__traceback__)
    update, rollout = config.update, config.rollout
    parts = f"update.token_budget (now {update.token_budget})"
    head = f"update.head_chunk (now {update.head_chunk})"
    if any(module.startswith("trimtab.rollout") for module, _ in where):
        return f"out of memory while sampling: lower rollout.batch (now {rollout.batch})"
    if ("trimtab.policy.score", "score") in where:
        return f"out of memory while scoring responses: lower {parts}, then {head}"
    if ("trimtab.policy.update", "_step") in where:
        return "out of memory in the optimizer step, whose state is two numbers per weight: set model.lora_rank=16"
    if any(place in where for place in [("trimtab.policy.update", "update"), ("trimtab.policy.score", "log_probs")]):
        more = "" if config.model.gradient_checkpointing else ", set model.gradient_checkpointing=true"
        return f"out of memory in an update: lower {parts}{more}, then lower {head}"
    return (
        f"out of memory before the first step: {config.model.path} is too large for {config.run.device}; "
        "take a smaller model.path, or set model.lora_rank=16"
    )


def _places(trace: TracebackType | None) -> list[tuple[str, str]]:
    """Module and function of every frame, outermost first."""
    places = []
    while trace is not None:
        frame = trace.tb_frame
        places.append((str(frame.f_globals.get("__name__", "")), frame.f_code.co_name))
        trace = trace.tb_next
    return places
