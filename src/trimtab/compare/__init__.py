"""The same run under several objectives and seeds."""

from trimtab.compare.report import show_comparison
from trimtab.compare.runs import Comparison, plan_jobs

__all__ = ["Comparison", "plan_jobs", "show_comparison"]
