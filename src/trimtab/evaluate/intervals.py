"""Confidence intervals by question, right for as few as 30 of them.

What is estimated is the mean over the population of questions that a benchmark's were drawn from, so the questions are
the observations; the samples of a question only make its own value less noisy. `coverage.py` measures how often each
interval holds the truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

LEVEL = 0.95
PRIOR = 0.1  # of a question that scored 0 and of one that scored 1, in the estimate of the spread alone


@dataclass(frozen=True)
class Interval:
    """A mean over questions with its 95 % interval; one question has a mean and no interval."""

    mean: float
    low: float | None
    high: float | None
    questions: int


def share_interval(values: Sequence[float]) -> Interval | None:
    """The interval for values in [0, 1], such as a question's share of right answers; None without questions."""
    return _interval(values, share_limits)


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Student's t interval, for values without bounds, such as lengths and entropies."""
    return _interval(values, mean_limits)


def difference_interval(ours: Sequence[float], theirs: Sequence[float]) -> Interval | None:
    """The mean of ours - theirs, paired by question; both in [0, 1]."""
    return _interval([a - b for a, b in zip(ours, theirs, strict=True)], difference_limits)


def average(parts: Sequence[Interval]) -> Interval:
    """The plain mean over benchmarks, each counting the same, whose questions were drawn independently.

    Each side's distances add up in squares, so that lopsided intervals stay lopsided (Zou and Donner's MOVER).
    """
    count, mean = len(parts), math.fsum(part.mean for part in parts) / len(parts)
    questions = sum(part.questions for part in parts)
    low = [part.mean - part.low for part in parts if part.low is not None]
    high = [part.high - part.mean for part in parts if part.high is not None]
    if len(low) < count:
        return Interval(mean, None, None, questions)
    return Interval(mean, mean - math.hypot(*low) / count, mean + math.hypot(*high) / count, questions)


def share_limits(values: Tensor) -> tuple[Tensor, Tensor]:
    """Low and high for values in [0, 1] along the last dimension: Wilson's interval with questions for trials.

    Wilson's interval knows that a mean near 0 or 1 has little spread on one side. Its binomial variance is scaled by
    how much less than 0/1 the questions' values vary; with few questions that factor can come out far too small (no
    question solved: no spread seen), so it is estimated with a little of a failed and of a solved question added.
    """
    n = values.shape[-1]
    mean, t2 = values.mean(-1), t_quantile(n - 1) ** 2
    padded = (values.sum(-1) + PRIOR) / (n + 2 * PRIOR)
    spread = (values.square().sum(-1) + PRIOR) / (n + 2 * PRIOR) - padded.square()
    trials = (n - 1) * padded * (1 - padded) / spread
    center = (mean + t2 / (2 * trials)) / (1 + t2 / trials)
    half = (t2 * (mean * (1 - mean) / trials + t2 / (4 * trials.square()))).sqrt() / (1 + t2 / trials)
    return torch.minimum(center - half, mean).clamp(min=0.0), torch.maximum(center + half, mean).clamp(max=1.0)


def mean_limits(values: Tensor) -> tuple[Tensor, Tensor]:
    """Low and high by Student's t along the last dimension."""
    n = values.shape[-1]
    mean, half = values.mean(-1), t_quantile(n - 1) * values.std(-1) / math.sqrt(n)
    return mean - half, mean + half


def difference_limits(values: Tensor) -> tuple[Tensor, Tensor]:
    """Student's t for paired differences in [-1, 1]; where all are the same, what `share_limits` says of 0 in n."""
    n = values.shape[-1]
    low, high = mean_limits(values)
    t2 = t_quantile(n - 1) ** 2
    unseen = torch.where(high - low < 1e-9, t2 / (n - 1 + t2), 0.0)
    return (low - unseen).clamp(min=-1.0), (high + unseen).clamp(max=1.0)


@lru_cache(maxsize=1024)
def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """The two-sided quantile of Student's t, by bisection on its distribution function."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_inside(middle, freedom) < level else (low, middle)
    return high


def _t_inside(t: float, freedom: int) -> float:
    """The probability that |T| < t, by the finite sums for whole degrees of freedom (Abramowitz and Stegun 26.7)."""
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
    known = torch.tensor(values, dtype=torch.float64)
    if len(values) == 1:
        return Interval(values[0], None, None, 1)
    low, high = limits(known)
    return Interval(math.fsum(values) / len(values), float(low), float(high), len(values))
