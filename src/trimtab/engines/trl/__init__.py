"""trimtab inside TRL: `GRPOTrainer` with any of the objectives, and trimtab's tools."""

from trimtab.engines.conversations import last_message
from trimtab.engines.trl.options import TrimtabConfig
from trimtab.engines.trl.tools import environment_reward, tool_environment
from trimtab.engines.trl.trainer import TrimtabTrainer

__all__ = ["TrimtabConfig", "TrimtabTrainer", "environment_reward", "last_message", "tool_environment"]
