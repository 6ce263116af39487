"""Several processes that train one policy: who they are, what they exchange, and an optimizer that they share."""

from trimtab.parallel.sharded_optimizer import ShardedOptimizer
from trimtab.parallel.shares import balanced_shares
from trimtab.parallel.world import LostProcessError, World, join_world

__all__ = ["LostProcessError", "ShardedOptimizer", "World", "balanced_shares", "join_world"]
