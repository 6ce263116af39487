"""Measure how often the intervals contain the true mean, by simulated benchmarks of 30 problems of known difficulty.

A problem's solve rate is drawn from a distribution of difficulty, its samples from that rate. Prints the table in
docs/evaluation.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from trimtab.experiments.intervals import difference_limits, mean_limits, share_limits

PROBLEMS, SAMPLES, ROUNDS, SEED = 30, (32, 4), 10_000, 0
GRID = 200_001  # points that means of difficulty are taken over


@dataclass(frozen=True)
class Difficulty:
    """A distribution of solve rates over problems, as a map from uniform numbers to rates."""

    name: str
    solve_rates: Callable[[Tensor], Tensor]

    @cached_property
    def mean(self) -> float:
        """Return the true mean that an interval should contain."""
        return float(self.solve_rates(_grid()).mean())


def logit_normal(center: float, spread: float) -> Difficulty:
    """Return solve rates whose log-odds are normal."""
    return Difficulty(
        f"log-odds {center:g} ± {spread:g}",
        lambda uniform: torch.sigmoid(center + spread * torch.special.ndtri(uniform)),
    )


def spikes(never: float, always: float) -> Difficulty:
    """Return solve rates of which a share is 0, a share is 1, and the rest is uniform."""

    def solve_rates(uniform: Tensor) -> Tensor:
        between = (uniform - never) / max(1 - never - always, 1e-9)
        return between.clamp(0.0, 1.0)

    return Difficulty(f"{never:.0%} never, {always:.0%} always, rest even", solve_rates)


PLAUSIBLE = (
    logit_normal(0, 2),
    logit_normal(-2, 2),
    logit_normal(2, 2),
    logit_normal(-3, 4),
    logit_normal(0, 4),
    spikes(0.8, 0.0),
    spikes(0.7, 0.1),
    spikes(0.6, 0.2),
    spikes(0.4, 0.4),
    spikes(0.2, 0.6),
    spikes(0.1, 0.8),
)
EDGES = (logit_normal(-4, 1), logit_normal(-4, 2), logit_normal(-5, 4), spikes(0.9, 0.0), spikes(0.0, 0.95))
# Two models: mean and spread of the first's log-odds, and of the second's shift from them, drawn per problem.
PAIRS = (
    (-3.0, 3.0, 0.5, 0.5),
    (-3.0, 3.0, 0.0, 1.5),
    (-1.0, 3.0, 1.0, 0.5),
    (0.0, 2.0, 0.0, 0.0),
    (1.0, 3.0, 0.5, 1.5),
)


@lru_cache(maxsize=256)
def coverage(difficulty: Difficulty, samples: int, rounds: int = ROUNDS) -> tuple[float, float]:
    """Return the share of simulated benchmarks whose interval contains the true mean: ours, and Student's t."""
    with _seeded(SEED):
        chance = difficulty.solve_rates(torch.rand(rounds, PROBLEMS, dtype=torch.float64))
        scores = _score(chance, samples)
    return _coverage(share_limits(scores), difficulty.mean), _coverage(mean_limits(scores), difficulty.mean)


@lru_cache(maxsize=256)
def paired_coverage(pair: tuple[float, float, float, float], samples: int, rounds: int = ROUNDS) -> float:
    """Return the share of simulated comparisons whose interval contains the true difference."""
    center, spread, shift, shift_spread = pair
    theirs, ours = logit_normal(center, spread), logit_normal(center + shift, (spread**2 + shift_spread**2) ** 0.5)
    with _seeded(SEED):
        odds = center + spread * torch.randn(rounds, PROBLEMS, dtype=torch.float64)
        better = odds + shift + shift_spread * torch.randn(rounds, PROBLEMS, dtype=torch.float64)
        differences = _score(better.sigmoid(), samples) - _score(odds.sigmoid(), samples)
    return _coverage(difference_limits(differences), ours.mean - theirs.mean)


def table(rounds: int = ROUNDS) -> str:
    """Return the simulated coverage as Markdown."""
    lines = [
        "| difficulty of the problems | true mean | 32 samples | 4 samples | Student's t, 32 | Student's t, 4 |",
        "|---" * 6 + "|",
    ]
    for difficulty in (*PLAUSIBLE, *EDGES):
        (ours, plain), (ours4, plain4) = (coverage(difficulty, samples, rounds) for samples in SAMPLES)
        edge = " (edge)" if difficulty in EDGES else ""
        cells = " | ".join(f"{share:.1%}" for share in (ours, ours4, plain, plain4))
        lines.append(f"| {difficulty.name}{edge} | {difficulty.mean:.1%} | {cells} |")
    lines += ["", "| two models, by problem | 32 samples | 4 samples |", "|---" * 3 + "|"]
    for pair in PAIRS:
        center, spread, shift, shift_spread = pair
        cells = " | ".join(f"{paired_coverage(pair, samples, rounds):.1%}" for samples in SAMPLES)
        lines.append(f"| log-odds {center:g} ± {spread:g}, the other moved by {shift:g} ± {shift_spread:g} | {cells} |")
    return "\n".join(lines)


def _score(chance: Tensor, samples: int) -> Tensor:
    return torch.binomial(torch.full_like(chance, samples), chance) / samples


def _coverage(limits: tuple[Tensor, Tensor], truth: float) -> float:
    low, high = limits
    return float(((low <= truth) & (truth <= high)).double().mean())


def _grid() -> Tensor:
    return (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch during the block, and restore the caller's generator afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


if __name__ == "__main__":
    print(table())
