"""A second implementation of REPO-R, EntroPIC and Entrocraft, from all rollouts so far."""

from __future__ import annotations

import math
from collections.abc import Sequence

from helpers.objectives.reference_terms import (
    Batch,
    LastRule,
    Rule,
    flat,
    log_ratio,
    log_ratio_slope,
    mean_entropy,
)


def entropies(rollouts: Sequence[Batch]) -> list[float]:
    found = [mean_entropy(flat(rollout)) for rollout in rollouts]
    return [entropy for entropy in found if math.isfinite(entropy)]


def repo_r(
    rollouts: Sequence[Batch] = (), target: float = 0.3, strength_min: float = 1e-4, strength_max: float = 0.05
) -> Rule:
    size, sign = strength_min, 1
    for entropy in entropies(rollouts):
        wanted = 1 if entropy < target else -1
        if entropy == target:
            continue
        if wanted == sign:
            size = min(strength_max, size * 2)
        elif size / 2 >= strength_min:
            size /= 2
        else:
            size, sign = strength_min, wanted

    def rule(batch: Batch) -> None:
        for token in flat(batch):
            if token.advantage == 0:
                continue
            up = token.advantage > 0
            factor = max(0.0, 1 - sign * size * token.logp if up else 1 + sign * size * token.logp)
            token.weight *= factor
            token.reasons |= {"BOOSTED"} if factor > 1 else {"DAMPED"} if factor < 1 else set()

    return rule


def entropic(
    rollouts: Sequence[Batch] = (),
    target: float = 0.3,
    gain: float = 1.0,
    integral_gain: float = 0.01,
    p_least: float = 0.95,
) -> Rule:
    errors = [entropy - target for entropy in entropies(rollouts)]
    alpha = gain * errors[-1] + integral_gain * sum(errors) if errors else 0.0
    alpha = min(1.0, max(-1.0, alpha))

    def weigh(batch: Batch, coefficients: list[float]) -> None:
        counted = [token for token in flat(batch) if token.counted]
        probable = [token for token in counted if math.exp(token.logp) > p_least]
        for token in probable if alpha else []:
            value = -alpha * len(counted) / len(probable) * math.exp(log_ratio(token)) * abs(token.advantage)
            token.penalty += value
            token.penalty_slope += value * log_ratio_slope(token)
            token.reasons.add("PENALIZED")

    return LastRule(weigh)


def entrocraft(
    rollouts: Sequence[Batch] = (),
    floor: float = 0.6,
    ceiling: float = 0.7,
    decline: float = 0.5,
    fall_steps: int = 1000,
    renormalize: bool = True,
) -> Rule:
    seen = entropies(rollouts)
    fallen = decline * min(fall_steps, max(0, len(seen) - 1)) / fall_steps

    def rule(batch: Batch) -> None:
        if not seen or floor - fallen <= seen[-1] <= ceiling - fallen:
            return
        above = seen[-1] > ceiling - fallen
        for token in flat(batch):
            if token.advantage < 0 if above else token.advantage > 0:
                token.weight = 0.0
                token.counted = token.counted and not renormalize
                token.reasons.add("DROPPED")

    return rule
