"""Verifiers: a response and an answer -> a verdict, in bounded time, whatever the model wrote."""

from trimtab.rewards.rules import RULES, Verdict, grade, grade_many

__all__ = ["RULES", "Verdict", "grade", "grade_many"]
