"""The same run under several objectives and seeds, each run in a process of its own."""

from trimtab.compare.report import show_comparison
from trimtab.compare.runs import Comparison, plan_runs

__all__ = ["Comparison", "plan_runs", "show_comparison"]
