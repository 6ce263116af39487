"""trimtab inside TRL: `GRPOTrainer` with any of the objectives, and trimtab's tools."""

from trimtab.engines.trl.options import TrimtabConfig
from trimtab.engines.trl.tools import environment_reward, tool_environment
from trimtab.engines.trl.trainer import TrimtabTrainer
from trimtab.engines.turns import last_message

__all__ = ["TrimtabConfig", "TrimtabTrainer", "environment_reward", "last_message", "tool_environment"]
