"""Benchmarks with figures one can trust: avg@k, pass@k and maj@k with intervals by question, every response kept."""

from trimtab.evaluate.endpoint import Connection
from trimtab.evaluate.figures import Figures, Sample, figures, majority, paired_difference, pass_at_k
from trimtab.evaluate.intervals import Interval, average, difference_interval, mean_interval, share_interval
from trimtab.evaluate.launch import evaluate_and_show, regrade
from trimtab.evaluate.run import EvalRequest

__all__ = [
    "Connection",
    "EvalRequest",
    "Figures",
    "Interval",
    "Sample",
    "average",
    "difference_interval",
    "evaluate_and_show",
    "figures",
    "majority",
    "mean_interval",
    "paired_difference",
    "pass_at_k",
    "regrade",
    "share_interval",
]
