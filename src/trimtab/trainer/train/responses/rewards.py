"""From verdicts to rewards: what a kind of verdict pays, further terms, the overlong penalty, and noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from trimtab.data import Response, SamplingOptions
from trimtab.grading import Submission, Verdict, VerdictKind, grade_submissions
from trimtab.trainer.config import TASK_TERM, RewardConfig
from trimtab.trainer.sampling import rng_keys, uniform

# Where a grader compares an answer it may err; without an answer, or without a verdict, there is nothing to flip.
OPPOSITE: dict[VerdictKind, VerdictKind] = {"correct": "wrong", "wrong": "correct"}


@dataclass(frozen=True)
class Reward:
    """The reward of a response; `value` is None if it is excluded from training.

    `terms` has each reward by itself and before its weight, by name, where there are several.
    """

    value: float | None
    terms: Mapping[str, float] = field(default_factory=dict)


def reward_of(verdict: Verdict, response: Response, config: RewardConfig, limit: int) -> float | None:
    """Return the reward by the task's rule with DAPO's soft overlong penalty; None if it is excluded from training."""
    reward = _paid(verdict, config)
    if reward is None:
        return None
    reward *= config.weight
    if config.overlong_buffer:
        over = response.num_sampled - (limit - config.overlong_buffer)
        reward += min(-over / config.overlong_buffer, 0.0) * config.overlong_factor
    return reward


def combined_reward(
    verdict: Verdict, terms: Mapping[str, Verdict], response: Response, config: RewardConfig, limit: int
) -> Reward:
    """Return the reward of a response from the verdict of the task's rule and those of `reward.terms`."""
    total, paid = reward_of(verdict, response, config, limit), _paid(verdict, config)
    values: dict[str, float] = {TASK_TERM: paid} if terms and paid is not None else {}
    for name, found in terms.items():
        term = config.terms[name]
        value = found.value if found.kind != "crashed" else None if term.crashed == "exclude" else float(term.crashed)
        if value is not None:
            values[name] = value
        total = None if total is None or value is None else total + term.weight * value
    if total is not None and (terms or verdict.score is not None):
        # Advantages are computed in float32. Sums that differ only beyond it, as 0.1 + 0.2 and 0.3, would make a group
        # look mixed, and its rounding errors would be normalised to advantages of 1.
        total = float(np.float32(total))
    return Reward(total, values)


def _paid(verdict: Verdict, config: RewardConfig) -> float | None:
    """Return what the task's rule pays, before its weight: its number, else what its kind is worth."""
    if verdict.score is not None and verdict.kind != "crashed":
        return verdict.score
    return config.of(verdict.kind)


def grade_terms(items: Sequence[Submission], config: RewardConfig) -> list[dict[str, Verdict]]:
    """Grade each response by the rules of `reward.terms`; return its verdicts by name."""
    columns = {name: grade_submissions(items, term.rule, term.options) for name, term in config.terms.items()}
    return [{name: column[row] for name, column in columns.items()} for row in range(len(items))]


def choose_flips(numbers: Sequence[int], step: int, options: SamplingOptions, noise: float) -> list[list[bool]]:
    """Return for every prompt number and sample whether its verdict is to be flipped, with probability `noise`."""
    # The sampler's random numbers are those of positions from 0 on, so -1 is independent of what is sampled.
    values = uniform(rng_keys(options.seed, step, numbers, options.samples), -1)
    flips: list[list[bool]] = (values < noise).view(len(numbers), options.samples).tolist()
    return flips


def flipped_verdict(verdict: Verdict) -> Verdict:
    """Return the opposite verdict, for `reward.noise`."""
    return Verdict(OPPOSITE[verdict.kind]) if verdict.kind in OPPOSITE else verdict


def refuse_noisy_numbers(rules: Sequence[str], verdicts: Sequence[Verdict]) -> None:
    """Refuse `reward.noise` where a rule gives numbers."""
    for rule, verdict in zip(rules, verdicts, strict=True):
        if verdict.score is not None:
            raise ValueError(
                f"reward.noise rewards right answers as wrong ones and the reverse, but the rule {rule} returned "
                f"{verdict.score:g}, and a number has no opposite: set reward.noise = 0, or let it return True or False"
            )
