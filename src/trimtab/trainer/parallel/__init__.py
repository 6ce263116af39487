"""Several processes that train one policy: who they are, what they exchange, and an optimizer that they share."""

from trimtab.trainer.parallel.sharding import (
    ShardedOptimizer,
    forget_forwards,
    gather_to_leader,
    gathered_layers,
    is_split,
    linear_parameters,
    local_part,
    local_tensor,
    shard_layers,
    unsharded_class,
    whole_tensor,
)
from trimtab.trainer.parallel.watch import LOST, Notices, StoppedProcesses
from trimtab.trainer.parallel.world import LostProcessError, World, balanced_shares, join_world

__all__ = [
    "LOST", "LostProcessError", "Notices", "ShardedOptimizer", "StoppedProcesses", "World", "balanced_shares",
    "forget_forwards", "gather_to_leader", "gathered_layers", "is_split", "join_world", "linear_parameters",
    "local_part", "local_tensor", "shard_layers", "unsharded_class", "whole_tensor",
]  # fmt: skip
