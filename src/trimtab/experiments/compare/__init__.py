"""The same run under several objectives and seeds, each run in a process of its own."""

from trimtab.experiments.compare.processes import ProcessPool
from trimtab.experiments.compare.report import markdown_table, progress_bars, show_comparison
from trimtab.experiments.compare.runs import (
    MAX_RUNS,
    CompareRun,
    Comparison,
    RunOutcome,
    check_objectives,
    plan_run,
    plan_runs,
)

__all__ = [
    "MAX_RUNS", "CompareRun", "Comparison", "ProcessPool", "RunOutcome", "check_objectives", "markdown_table",
    "plan_run", "plan_runs", "progress_bars", "show_comparison",
]  # fmt: skip
