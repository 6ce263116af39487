"""How much memory a run will take, before it starts; and what to lower when it runs out."""

from trimtab.memory.estimate import longest_response, minibatches
from trimtab.memory.estimate_text import describe_estimate
from trimtab.memory.oom_advice import advice, is_out_of_memory

__all__ = ["advice", "describe_estimate", "is_out_of_memory", "longest_response", "minibatches"]
