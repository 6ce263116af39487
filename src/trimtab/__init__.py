"""trimtab finds the few tokens that decide whether an RL run stays stable, shows them, and keeps them in check."""

from trimtab.objectives import (
    Comm,
    LossOutput,
    Objective,
    Plan,
    ProcessGroup,
    Reason,
    TokenBatch,
    advantages,
    merge_metrics,
    objective,
    reason_words,
    segment_ids,
    theory,
)

__version__ = "0.1.0"

__all__ = [
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
