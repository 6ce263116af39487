"""From verdicts to rewards: what a kind of verdict pays, further terms, the overlong penalty, and noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from trimtab.data import Response, Sample, SamplingOptions
from trimtab.grading import Verdict, VerdictKind, grade_samples
from trimtab.trainer.config import TASK_TERM, RewardConfig
from trimtab.trainer.sampling import rng_keys, uniform

# Where a grader compares an answer it may err; without an answer, or without a verdict, there is nothing to flip.
OPPOSITE: dict[VerdictKind, VerdictKind] = {"correct": "wrong", "wrong": "correct"}


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


def set_reward(
    sample: Sample, terms: Mapping[str, Verdict], flip: bool, config: RewardConfig, limit: int, training: bool
) -> None:
    """Set the reward of a graded sample from its verdict and those of `reward.terms`.

    With `flip` a right answer gets the reward of a wrong one, and the reverse.
    """
    rewarded = Verdict(OPPOSITE[sample.verdict.kind]) if flip and sample.verdict.kind in OPPOSITE else sample.verdict
    sample.flipped = rewarded != sample.verdict
    sample.failed = any(each.kind == "crashed" for each in (sample.verdict, *terms.values()))
    total = reward_of(rewarded, sample.response, config, limit)
    paid = _paid(rewarded, config)
    values: dict[str, float] = {TASK_TERM: paid} if terms and paid is not None else {}
    for name, found in terms.items():
        term = config.terms[name]
        value = found.value if found.kind != "crashed" else None if term.crashed == "exclude" else float(term.crashed)
        if value is not None:
            values[name] = value
        total = None if total is None or value is None else total + term.weight * value
    if total is not None and (terms or rewarded.score is not None):
        # Advantages are computed in float32. Sums that differ only beyond it, as 0.1 + 0.2 and 0.3, would make a group
        # look mixed, and its rounding errors would be normalised to advantages of 1.
        total = float(np.float32(total))
    void = training and config.void_turns == "exclude" and sample.has_void_turn
    sample.reward = total or 0.0
    sample.terms = values
    sample.excluded = sample.excluded or total is None or void


def separate_rewards(samples: Sequence[Sample], config: RewardConfig) -> tuple[NDArray[np.float32], list[float]]:
    """Return each of a sample's rewards, (samples, rewards), and the weight of each in the sum."""
    if not config.terms:
        return np.array([[sample.reward] for sample in samples], np.float32), [1.0]
    names = [TASK_TERM, *config.terms]
    weights = [config.weight, *(term.weight for term in config.terms.values())]
    columns = np.array([[sample.terms[name] for name in names] for sample in samples])
    # The overlong penalty is in the sum alone; rounded, because that is in float32.
    penalty = np.round([sample.reward for sample in samples] - columns @ weights, 5)
    if penalty.any():
        columns, weights = np.column_stack([columns, penalty]), [*weights, 1.0]
    return columns.astype(np.float32), weights


def _paid(verdict: Verdict, config: RewardConfig) -> float | None:
    """Return what the task's rule pays, before its weight: its number, else what its kind is worth."""
    if verdict.score is not None and verdict.kind != "crashed":
        return verdict.score
    return config.of(verdict.kind)


def grade_terms(samples: Sequence[Sample], config: RewardConfig) -> list[dict[str, Verdict]]:
    """Grade each sample by the rules of `reward.terms`; return its verdicts by name."""
    columns = {name: grade_samples(samples, term.rule, term.options) for name, term in config.terms.items()}
    return [{name: column[row] for name, column in columns.items()} for row in range(len(samples))]


def choose_flips(numbers: Sequence[int], step: int, options: SamplingOptions, noise: float) -> list[list[bool]]:
    """Return for every prompt number and sample whether its verdict is to be flipped, with probability `noise`."""
    # The sampler's random numbers are those of positions from 0 on, so -1 is independent of what is sampled.
    values = uniform(rng_keys(options.seed, step, numbers, options.samples), -1)
    flips: list[list[bool]] = (values < noise).view(len(numbers), options.samples).tolist()
    return flips


def refuse_noisy_numbers(samples: Sequence[Sample]) -> None:
    """Refuse `reward.noise` if a rule gives numbers."""
    for sample in samples:
        if sample.verdict.score is not None:
            raise ValueError(
                f"reward.noise rewards right answers as wrong ones and the reverse, but the rule {sample.problem.rule} "
                f"returned {sample.verdict.score:g}, and a number has no opposite: set reward.noise = 0, or let it "
                "return True or False"
            )
