"""trimtab inside TRL: `GRPOTrainer` with any of the objectives."""

from trimtab.engines.python_tool import PythonSession, python_tool
from trimtab.engines.trl.options import TrimtabConfig
from trimtab.engines.trl.trainer import TrimtabTrainer
from trimtab.engines.turns import last_message

__all__ = ["PythonSession", "TrimtabConfig", "TrimtabTrainer", "last_message", "python_tool"]
