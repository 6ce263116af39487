"""trimtab inside TRL: `GRPOTrainer` with any of the objectives, trimtab's tools, and agents of users' own."""

from trimtab.engines.conversations import last_message
from trimtab.engines.trl.agents import agent_reward, agent_rollouts
from trimtab.engines.trl.options import TrimtabConfig
from trimtab.engines.trl.tools import environment_reward, tool_environment
from trimtab.engines.trl.trainer import TrimtabTrainer

__all__ = [
    "TrimtabConfig", "TrimtabTrainer", "agent_reward", "agent_rollouts", "environment_reward", "last_message",
    "tool_environment",
]  # fmt: skip
