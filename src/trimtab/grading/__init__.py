"""Verifiers: grade a response against an answer, in bounded time, whatever the model wrote."""

from trimtab.grading.grade_lines import grade_lines
from trimtab.grading.python_rule import rule
from trimtab.grading.response_rules import RESPONSE_RULES
from trimtab.grading.rules import RULES, check_rule, grade, grade_many, grade_samples, load_rule
from trimtab.grading.verdicts import (
    CORRECT_SCORE,
    SCORE,
    VERDICT_KINDS,
    RuleErrors,
    Verdict,
    VerdictKind,
    crashed_diagnosis,
    describe_error,
    is_score,
    verdict_of,
)

__all__ = [
    "CORRECT_SCORE", "RESPONSE_RULES", "RULES", "SCORE", "VERDICT_KINDS", "RuleErrors", "Verdict",
    "VerdictKind", "check_rule", "crashed_diagnosis", "describe_error", "grade", "grade_lines", "grade_many",
    "grade_samples", "is_score", "load_rule", "rule", "verdict_of",
]  # fmt: skip
