"""Estimate the memory of a run before it starts, and advise what to lower when it runs out."""

from trimtab.trainer.memory.advice import (
    DeviceMemory,
    describe_estimate,
    fits,
    is_out_of_memory,
    oom_message,
    visible_gpu,
)
from trimtab.trainer.memory.estimate import NoEstimateError, known_positions, longest_response, minibatches

__all__ = [
    "DeviceMemory", "NoEstimateError", "describe_estimate", "fits", "is_out_of_memory", "known_positions",
    "longest_response", "minibatches", "oom_message", "visible_gpu",
]  # fmt: skip
