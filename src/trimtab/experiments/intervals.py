"""Confidence intervals over problems, valid for as few as 30 of them, and of differences between runs, by seed.

The estimand is the mean over the population of problems that a benchmark's were drawn from, so the problems are the
observations; more samples per problem only make its own value less noisy. `benchmarks/interval_coverage.py` measures
how often each interval contains the true mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

LEVEL = 0.95
PRIOR = 0.1  # pseudo-count of a problem that scored 0 and of one that scored 1, in the estimate of the variance only


@dataclass(frozen=True)
class Interval:
    """A mean over problems with its 95 % interval; one problem has a mean and no interval."""

    mean: float
    low: float | None
    high: float | None
    problems: int


class SeedDifference(NamedTuple):
    """Differences between runs of the same seed: their mean, its 95 % interval, and how many have the mean's sign."""

    mean: float
    low: float
    high: float
    pairs: int
    agree: int
    unpaired: int

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def seed_difference(ours: Mapping[int, float | None], theirs: Mapping[int, float | None]) -> SeedDifference | None:
    """Compare a figure seed by seed: mean difference and its interval by Student's t; None without a pair.

    A seed that only one of them has is left out and counted. One pair has no interval: it is unbounded.
    """
    values = [(ours.get(seed), theirs.get(seed)) for seed in sorted({*ours, *theirs})]
    differences = [a - b for a, b in values if a is not None and b is not None]
    if not differences:
        return None
    center, low, high = math.fsum(differences) / len(differences), -math.inf, math.inf
    if len(differences) > 1:
        low, high = (float(end) for end in mean_limits(torch.tensor(differences, dtype=torch.float64)))
    agree = sum(each * center > 0 for each in differences)
    return SeedDifference(center, low, high, len(differences), agree, len(values) - len(differences))


def share_interval(values: Sequence[float]) -> Interval | None:
    """Return the interval for values in [0, 1], such as a problem's share of correct samples; None without values."""
    return _interval(values, share_limits)


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return Student's t interval for values of 0 or more without an upper bound, such as lengths and entropies."""
    return _interval(values, positive_mean_limits)


def score_interval(values: Sequence[float]) -> Interval | None:
    """Return Student's t interval for values without bounds, such as a rule's numbers and their differences."""
    return _interval(values, mean_limits)


def difference_interval(ours: Sequence[float], theirs: Sequence[float]) -> Interval | None:
    """Return the interval of the mean of ours - theirs, paired by problem; both in [0, 1]."""
    return _interval([a - b for a, b in zip(ours, theirs, strict=True)], difference_limits)


def average(intervals: Sequence[Interval]) -> Interval:
    """Return the unweighted mean over benchmarks, whose problems are independent of each other's."""
    count, mean = len(intervals), math.fsum(each.mean for each in intervals) / len(intervals)
    problems = sum(each.problems for each in intervals)
    low = [each.mean - each.low for each in intervals if each.low is not None]
    high = [each.high - each.mean for each in intervals if each.high is not None]
    if len(low) < count:
        return Interval(mean, None, None, problems)
    # Distances add in squares, each side on its own, so that asymmetric intervals stay so (Zou and Donner's MOVER).
    return Interval(mean, mean - math.hypot(*low) / count, mean + math.hypot(*high) / count, problems)


def share_limits(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return low and high for values in [0, 1] along the last dimension: Wilson's interval with problems as trials.

    Its binomial variance is scaled by how much less than 0/1 the problems' values vary.
    """
    n = values.shape[-1]
    mean, t2 = values.mean(-1), t_quantile(n - 1) ** 2
    # With few problems the variance can come out far too small (none solved: no variance at all), so a fraction of a
    # failed and of a solved problem is added to its estimate.
    padded = (values.sum(-1) + PRIOR) / (n + 2 * PRIOR)
    spread = (values.square().sum(-1) + PRIOR) / (n + 2 * PRIOR) - padded.square()
    trials = (n - 1) * padded * (1 - padded) / spread
    center = (mean + t2 / (2 * trials)) / (1 + t2 / trials)
    half = (t2 * (mean * (1 - mean) / trials + t2 / (4 * trials.square()))).sqrt() / (1 + t2 / trials)
    return torch.minimum(center - half, mean).clamp(min=0.0), torch.maximum(center + half, mean).clamp(max=1.0)


def mean_limits(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return low and high by Student's t along the last dimension."""
    n = values.shape[-1]
    mean, half = values.mean(-1), t_quantile(n - 1) * values.std(-1) / math.sqrt(n)
    return mean - half, mean + half


def positive_mean_limits(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return low and high by Student's t for values whose mean cannot be below 0."""
    low, high = mean_limits(values)
    # With two problems the quantile is 12.7, and the interval would reach far below. Rounding may give a mean below 0.
    return torch.maximum(low, values.mean(-1).clamp(max=0.0)), high


def difference_limits(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return low and high for paired differences in [-1, 1] by Student's t.

    Where all differences are equal, the half-width is that of `share_limits` for 0 of n.
    """
    n = values.shape[-1]
    low, high = mean_limits(values)
    t2 = t_quantile(n - 1) ** 2
    unseen = torch.where(high - low < 1e-9, t2 / (n - 1 + t2), 0.0)
    return (low - unseen).clamp(min=-1.0), (high + unseen).clamp(max=1.0)


@lru_cache(maxsize=1024)
def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """Return the two-sided quantile of Student's t, by bisection on its distribution function."""
    # `statistics` has the normal quantile only and torch none of Student's; mpmath's incomplete beta function would
    # need a root search too. scipy would be a dependency for this one number.
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_inside(middle, freedom) < level else (low, middle)
    return high


def _t_inside(t: float, freedom: int) -> float:
    """Return P(|T| < t) by the finite sums for integer degrees of freedom (Abramowitz and Stegun 26.7)."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine2, odd = math.cos(angle) ** 2, freedom % 2
    term = total = 1.0 if not odd else math.cos(angle)
    if freedom == 1:
        return 2 * angle / math.pi
    for k in range(2 if not odd else 3, freedom - 1, 2):
        term *= (k - 1) / k * cosine2
        total += term
    return math.sin(angle) * total if not odd else 2 / math.pi * (angle + math.sin(angle) * total)


def _interval(values: Sequence[float], limits: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Interval | None:
    if not values:
        return None
    if len(values) == 1:
        return Interval(values[0], None, None, 1)
    low, high = limits(torch.tensor(values, dtype=torch.float64))
    return Interval(math.fsum(values) / len(values), float(low), float(high), len(values))
