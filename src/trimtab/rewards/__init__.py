"""Verifiers: grade a response against an answer, in bounded time, whatever the model wrote."""

from trimtab.rewards.grade_lines import grade_lines
from trimtab.rewards.pool import WorkerLimits, call_worker, start_worker
from trimtab.rewards.rules import RULES, check_rule, grade, grade_many, submit
from trimtab.rewards.verdicts import VERDICT_KINDS, Verdict, VerdictKind

__all__ = [
    "RULES", "VERDICT_KINDS", "Verdict", "VerdictKind", "WorkerLimits", "call_worker", "check_rule", "grade",
    "grade_lines", "grade_many", "start_worker", "submit",
]  # fmt: skip
