"""Estimate the memory of a run before it starts, and advise what to lower when it runs out."""

from trimtab.memory.estimate import longest_response, minibatches
from trimtab.memory.estimate_text import describe_estimate
from trimtab.memory.model_shape import known_positions
from trimtab.memory.oom_advice import is_out_of_memory, oom_message

__all__ = [
    "describe_estimate", "is_out_of_memory", "known_positions", "longest_response", "minibatches", "oom_message",
]  # fmt: skip
