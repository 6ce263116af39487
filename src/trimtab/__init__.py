"""trimtab finds the few tokens that decide whether an RL run stays stable, shows them, and keeps them in check."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.cli.from_python import train
    from trimtab.grading import rule
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
        reason_words,
        segment_ids,
        theory,
    )
    from trimtab.objectives.methods.compose import objective
    from trimtab.own_parts import register
    from trimtab.trainer.train import SavedRun, load_run

__version__ = "0.1.0"

__all__ = [
    "Comm", "LossOutput", "Objective", "Plan", "ProcessGroup", "Reason", "SavedRun", "TokenBatch", "advantages",
    "load_run", "merge_metrics", "objective", "reason_words", "register", "rule", "segment_ids", "theory", "train",
]  # fmt: skip

HOMES = {
    "SavedRun": "trimtab.trainer.train",
    "load_run": "trimtab.trainer.train",
    "register": "trimtab.own_parts",
    "rule": "trimtab.grading",
    "train": "trimtab.cli.from_python",
}


def __getattr__(name: str) -> Any:
    """The objectives on first use: a grader's worker imports trimtab and must not pay for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'trimtab' has no attribute {name!r}")
    return getattr(importlib.import_module(HOMES.get(name, "trimtab.objectives")), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
