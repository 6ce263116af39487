"""The heart of trimtab: objectives for RL with verifiable rewards, in plain torch. See `objective`."""

from trimtab.objectives import advantages, theory
from trimtab.objectives.comm import Comm, ProcessGroup
from trimtab.objectives.compose import objective
from trimtab.objectives.objective import LossOutput, Objective
from trimtab.objectives.plan import Plan, merge_metrics
from trimtab.objectives.reasons import Reason, reason_words
from trimtab.objectives.registry import ATTACHMENTS, METHODS
from trimtab.objectives.segments import segment_ids
from trimtab.objectives.tokens import TokenBatch

__all__ = [
    "ATTACHMENTS",
    "METHODS",
    "Comm",
    "LossOutput",
    "Objective",
    "Plan",
    "ProcessGroup",
    "Reason",
    "TokenBatch",
    "advantages",
    "merge_metrics",
    "objective",
    "reason_words",
    "segment_ids",
    "theory",
]
