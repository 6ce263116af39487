"""A second implementation of Clip_B, Clip_V and STEER."""

from __future__ import annotations

import math
from collections.abc import Sequence

from helpers.objectives.reference_control import phis, surprise
from helpers.objectives.reference_terms import Batch, Rule, flat


def deviation(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def drop_lowest(batch: Batch, centred: Sequence[float], mu: float) -> None:
    if len(centred) < 2:
        return
    limit = -mu * deviation(centred)
    for token, value in zip(flat(batch), centred, strict=True):
        if token.advantage < 0 and value < limit:
            token.weight = 0.0
            token.reasons.add("DROPPED")


def clip_b(mu: float = 2.5) -> Rule:
    def rule(batch: Batch) -> None:
        own = [surprise(token) for token in flat(batch)]
        drop_lowest(batch, [value - sum(own) / len(own) for value in own], mu)

    return rule


def clip_v(mu: float = 2.5, phi: str | None = None) -> Rule:
    def rule(batch: Batch) -> None:
        drop_lowest(batch, phis(batch, phi), mu)

    return rule


def steer(weight_low: float = 0.8, weight_high: float = 1.2, falloff: str = "linear", effect: str = "paper") -> Rule:
    def rule(batch: Batch) -> None:
        tokens = flat(batch)
        if not tokens:
            return
        change = []
        for token, phi in zip(tokens, phis(batch), strict=True):
            ratio = math.exp(min(max(token.logp - token.old, -20.0), 20.0))
            own = (1 - math.exp(token.logp)) * (token.logp + token.entropy) if effect == "paper" else phi
            change.append(abs(token.advantage * ratio * own))
        least, most = min(change), max(change)
        for token, value in zip(tokens, change, strict=True):
            if falloff == "linear":
                rest = (most - value) / (most - least) if most > least else None
                factor = 1.0 if rest is None else weight_low + (weight_high - weight_low) * rest
            else:
                factor = math.exp(math.log(weight_low) * value / most) if most else 1.0
            token.weight *= factor
            token.reasons |= {"BOOSTED"} if factor > 1 else {"DAMPED"} if factor < 1 else set()

    return rule
