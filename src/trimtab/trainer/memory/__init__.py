"""Estimate the memory of a run before it starts, and advise what to lower when it runs out."""

from trimtab.trainer.memory.estimate import longest_response, minibatches
from trimtab.trainer.memory.estimate_text import DeviceMemory, describe_estimate, fits, visible_gpu
from trimtab.trainer.memory.model_shape import NoEstimateError, known_positions
from trimtab.trainer.memory.oom_advice import is_out_of_memory, oom_message

__all__ = [
    "DeviceMemory", "NoEstimateError", "describe_estimate", "fits", "is_out_of_memory", "known_positions",
    "longest_response", "minibatches", "oom_message", "visible_gpu",
]  # fmt: skip
