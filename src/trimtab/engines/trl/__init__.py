"""trimtab inside TRL: `GRPOTrainer` with any of the objectives."""

from trimtab.engines.trl.options import TrimtabConfig
from trimtab.engines.trl.trainer import TrimtabTrainer

__all__ = ["TrimtabConfig", "TrimtabTrainer"]
