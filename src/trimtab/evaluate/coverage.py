"""How often the intervals hold the truth: simulated benchmarks of 30 questions whose difficulty is known.

A question's chance of a right answer is drawn from a distribution of difficulty, its samples from that chance.
`python -m trimtab.evaluate.coverage` prints the table that the documentation shows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from trimtab.evaluate.intervals import difference_limits, mean_limits, share_limits

QUESTIONS, SAMPLES, ROUNDS, SEED = 30, (32, 4), 10_000, 0
FINE = 200_001  # points of the grid that means of difficulty are taken over

Draw = Callable[[Tensor], Tensor]  # from uniform numbers to chances of a right answer


@dataclass(frozen=True)
class Difficulty:
    """How hard a benchmark's questions are for a model: from uniform numbers to chances of a right answer."""

    name: str
    draw: Draw

    @cached_property
    def mean(self) -> float:
        """The truth that an interval should hold."""
        return float(self.draw(_grid()).mean())


def logit_normal(center: float, spread: float) -> Difficulty:
    """Chances whose log-odds are normal."""
    return Difficulty(
        f"log-odds {center:g} ± {spread:g}",
        lambda uniform: torch.sigmoid(center + spread * torch.special.ndtri(uniform)),
    )


def spikes(never: float, always: float) -> Difficulty:
    """A share of questions is never solved, a share always, the rest lies evenly between."""

    def draw(uniform: Tensor) -> Tensor:
        between = (uniform - never) / max(1 - never - always, 1e-9)
        return between.clamp(0.0, 1.0)

    return Difficulty(f"{never:.0%} never, {always:.0%} always, rest even", draw)


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
# Two models: the first's log-odds, and by how much the second's are moved, with a spread of its own per question.
PAIRS = (
    (-3.0, 3.0, 0.5, 0.5),
    (-3.0, 3.0, 0.0, 1.5),
    (-1.0, 3.0, 1.0, 0.5),
    (0.0, 2.0, 0.0, 0.0),
    (1.0, 3.0, 0.5, 1.5),
)


@lru_cache(maxsize=256)
def coverage(difficulty: Difficulty, samples: int, rounds: int = ROUNDS) -> tuple[float, float]:
    """The share of simulated benchmarks whose interval holds the truth: ours, and Student's t beside it."""
    with _seeded(SEED):
        chance = difficulty.draw(torch.rand(rounds, QUESTIONS, dtype=torch.float64))
        scores = _score(chance, samples)
    return _held(share_limits(scores), difficulty.mean), _held(mean_limits(scores), difficulty.mean)


@lru_cache(maxsize=256)
def paired_coverage(pair: tuple[float, float, float, float], samples: int, rounds: int = ROUNDS) -> float:
    """The share of simulated comparisons whose interval holds the true difference."""
    center, spread, moved, own = pair
    theirs, ours = logit_normal(center, spread), logit_normal(center + moved, (spread**2 + own**2) ** 0.5)
    with _seeded(SEED):
        odds = center + spread * torch.randn(rounds, QUESTIONS, dtype=torch.float64)
        better = odds + moved + own * torch.randn(rounds, QUESTIONS, dtype=torch.float64)
        differences = _score(better.sigmoid(), samples) - _score(odds.sigmoid(), samples)
    return _held(difference_limits(differences), ours.mean - theirs.mean)


def table(rounds: int = ROUNDS) -> str:
    """Simulated coverage as Markdown."""
    lines = [
        "| difficulty of the questions | true mean | 32 samples | 4 samples | Student's t, 32 | Student's t, 4 |",
        "|---" * 6 + "|",
    ]
    for difficulty in (*PLAUSIBLE, *EDGES):
        (ours, plain), (ours4, plain4) = (coverage(difficulty, samples, rounds) for samples in SAMPLES)
        edge = " (edge)" if difficulty in EDGES else ""
        cells = " | ".join(f"{share:.1%}" for share in (ours, ours4, plain, plain4))
        lines.append(f"| {difficulty.name}{edge} | {difficulty.mean:.1%} | {cells} |")
    lines += ["", "| two models, by question | 32 samples | 4 samples |", "|---" * 3 + "|"]
    for pair in PAIRS:
        center, spread, moved, own = pair
        cells = " | ".join(f"{paired_coverage(pair, samples, rounds):.1%}" for samples in SAMPLES)
        lines.append(f"| log-odds {center:g} ± {spread:g}, the other moved by {moved:g} ± {own:g} | {cells} |")
    return "\n".join(lines)


def _score(chance: Tensor, samples: int) -> Tensor:
    return torch.binomial(torch.full_like(chance, samples), chance) / samples


def _held(limits: tuple[Tensor, Tensor], truth: float) -> float:
    low, high = limits
    return float(((low <= truth) & (truth <= high)).double().mean())


def _grid() -> Tensor:
    return (torch.arange(FINE, dtype=torch.float64) + 0.5) / FINE


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random numbers of a seed, and the caller's own afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
