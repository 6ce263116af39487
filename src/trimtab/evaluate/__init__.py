"""Benchmarks with figures one can trust: avg@k, pass@k and maj@k with intervals by question, every response kept."""

from trimtab.evaluate.figures import Figures, Sample, figures, majority, paired_difference, pass_at_k
from trimtab.evaluate.intervals import Interval, average, difference_interval, mean_interval, share_interval

__all__ = [
    "Figures",
    "Interval",
    "Sample",
    "average",
    "difference_interval",
    "figures",
    "majority",
    "mean_interval",
    "paired_difference",
    "pass_at_k",
    "share_interval",
]
