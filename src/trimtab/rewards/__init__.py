"""Verifiers: grade a response against an answer, in bounded time, whatever the model wrote."""

from trimtab.rewards.grade_lines import grade_lines
from trimtab.rewards.pool import (
    WorkerLimits,
    WorkerResult,
    WorkerSession,
    call_worker,
    keep_output,
    start_worker,
)
from trimtab.rewards.python_rule import rule
from trimtab.rewards.response_rules import RESPONSE_RULES
from trimtab.rewards.rule_errors import RuleErrors, crashed_diagnosis, describe_error
from trimtab.rewards.rules import RULES, check_rule, grade, grade_many, grade_submissions, load_rule, submit
from trimtab.rewards.submission import FACTS, Submission
from trimtab.rewards.verdicts import CORRECT_SCORE, SCORE, VERDICT_KINDS, Verdict, VerdictKind, is_score, verdict_of

__all__ = [
    "CORRECT_SCORE", "FACTS", "RESPONSE_RULES", "RULES", "SCORE", "VERDICT_KINDS", "RuleErrors", "Submission",
    "Verdict", "VerdictKind", "WorkerLimits", "WorkerResult", "WorkerSession", "call_worker", "check_rule",
    "crashed_diagnosis", "describe_error", "grade", "grade_lines", "grade_many", "grade_submissions", "is_score",
    "keep_output", "load_rule", "rule", "start_worker", "submit", "verdict_of",
]  # fmt: skip
