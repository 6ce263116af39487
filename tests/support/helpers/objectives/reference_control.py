"""A second implementation of the rules that steer the entropy: trim, STARE's critical weight, the entropy bonus.

e = -c Phi is what a token does to the entropy of its own distribution, with c its coefficient -d loss / d ln p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from helpers.objectives import reference_terms
from helpers.objectives.reference_terms import (
    Batch,
    LastRule,
    Rule,
    Token,
    flat,
    mean_entropy,
    multiply,
    stare_rule,
    stare_state,
    stare_tokens,
)

# ------------------------------------------------------------------------------------------- the effect of a token


def surprise(token: Token) -> float:
    """p (ln p + H)."""
    return math.exp(token.logp) * (token.logp + token.entropy)


def exact_s2(tokens: Sequence[Token]) -> list[float]:
    """The sum of p^2 (ln p + H) over the vocabulary of each token."""
    return [t.sum_p2_logp + t.entropy * t.sum_p2 for t in tokens]  # type: ignore[operator]


def estimated_s2(tokens: Sequence[Token]) -> list[float]:
    """The mean of p (ln p + H) among the about 64 tokens of similar entropy: ranks cut into equal blocks."""
    order = sorted(range(len(tokens)), key=lambda i: tokens[i].entropy)
    blocks = max(1, len(tokens) // 64)
    found = [0.0] * len(tokens)
    for block in range(blocks):
        members = [i for rank, i in enumerate(order) if rank * blocks // len(tokens) == block]
        for i in members:
            found[i] = sum(surprise(tokens[j]) for j in members) / len(members)
    return found


def phis(batch: Batch, phi: str | None = None) -> list[float]:
    tokens = flat(batch)
    known = all(token.sum_p2 is not None for token in tokens) and phi != "estimated"
    s2 = exact_s2(tokens) if known else estimated_s2(tokens)
    return [surprise(token) - s for token, s in zip(tokens, s2, strict=True)]


def effects(batch: Batch, coefficients: Sequence[float], phi: str | None = None) -> list[float]:
    return [-c * value for c, value in zip(coefficients, phis(batch, phi), strict=True)]


# ------------------------------------------------------------------------------------------------------------ trim


def trim_drive(
    entropies: Sequence[float],
    floor: float,
    ceiling: float | None,
    relative: bool,
    fall: float,
    fall_steps: int,
    gain: float,
    integral_gain: float,
) -> tuple[int, float]:
    """Where to push after rollouts of these entropies (up 1, down -1, in the band 0), and how strongly."""
    seen = [entropy for entropy in entropies if math.isfinite(entropy)]
    integral, push = 0.0, (0, 0.0)
    for number, entropy in enumerate(seen):
        factor = (1 - (1 - fall) * min(1, number / fall_steps)) * (seen[0] if relative else 1)
        low, high = floor * factor, math.inf if ceiling is None else ceiling * factor

        def distance(end: float, entropy: float = entropy) -> float:
            """(end - H) / end, not below -1."""
            return max(-1.0, (end - entropy) / end) if end > 0 else -1.0

        push = (0, 0.0)
        if low <= entropy <= high:
            # Run down, not through 0.
            if integral > 0:
                integral = max(0.0, integral + integral_gain * distance(low))
            elif integral < 0:
                integral = min(0.0, integral + integral_gain * distance(high))
            continue
        where, end = (1, low) if entropy < low else (-1, high)
        integral = min(1.0, max(-1.0, integral + integral_gain * distance(end)))
        push = (where, min(1.0, max(0.0, where * (gain * distance(end) + integral))))
    return push


def trim(
    rollouts: Sequence[Batch] = (),
    floor: float = 0.3,
    ceiling: float | None = None,
    relative: bool = False,
    fall: float = 1.0,
    fall_steps: int = 1000,
    gain: float = 0.5,
    integral_gain: float = 0.02,
    max_weight: float = 10.0,
    phi: str | None = None,
) -> Rule:
    entropies = [mean_entropy(flat(rollout)) for rollout in rollouts]
    where, drive = trim_drive(entropies, floor, ceiling, relative, fall, fall_steps, gain, integral_gain)

    def weigh(batch: Batch, coefficients: list[float]) -> None:
        if not where:
            return
        e = effects(batch, coefficients, phi)
        surprising = [x if value < 0 else 0.0 for x, value in zip(e, phis(batch, phi), strict=True)]
        p, n = sum(x for x in surprising if x > 0), -sum(x for x in surprising if x < 0)
        rest = sum(x - y for x, y in zip(e, surprising, strict=True))
        k = where * drive * sum(abs(x) for x in e) - rest  # a p - n / a = k
        if p == 0 and n == 0:
            return
        if p == 0:  # damping alone
            a = -n / k if k < 0 else math.inf
        elif n == 0:  # boosting alone
            a = max(0.0, k / p)
        else:
            b = (math.sqrt(k * k + 4 * p * n) + abs(k)) / 2  # without cancellation, whatever the sign of k
            a = b / p if k > 0 else n / b
        # One-sided: an update that does more than is asked for is left alone.
        a = min(max_weight, max(1.0, a)) if where > 0 else max(1 / max_weight, min(1.0, a))
        if a == 1:
            return
        tokens = flat(batch)
        up, down = ("BOOSTED", "DAMPED") if a > 1 else ("DAMPED", "BOOSTED")
        multiply([token for token, x in zip(tokens, surprising, strict=True) if x > 0], a, up)
        multiply([token for token, x in zip(tokens, surprising, strict=True) if x < 0], 1 / a, down)

    return LastRule(weigh)


# ----------------------------------------------------------------------------------------------------- critical STARE


def stare_attached(
    rollouts: Sequence[Batch] = (),
    variant: str = "O1",
    share: float = 0.1,
    boost: float | str = 1.1,
    damp: float = 0.9,
    target: float = 0.3,
    gate: str = "batch",
    threshold: str = "quantile",
    p_threshold: float = 0.1,
    adaptive: bool = False,
    rate: float = 0.01,
) -> Rule:
    """STARE with a number as its boost, or with the weight W that makes the effects of all tokens cancel."""
    if not isinstance(boost, str):
        return stare_rule(rollouts, variant, share, boost, damp, target, gate, threshold, p_threshold, adaptive, rate)
    is_open, _, _ = stare_state(rollouts, 1.0, damp, target, adaptive=False, rate=0.0)

    def weigh(batch: Batch, coefficients: list[float]) -> None:
        boosted, damped = stare_tokens(batch, variant, share, target, gate, threshold, p_threshold, is_open)
        multiply(damped, damp, "DAMPED")
        weighed, counted = {id(token) for token in boosted}, {id(token) for token in damped}
        gamma, rest = 0.0, 0.0
        for token, e in zip(flat(batch), effects(batch, coefficients), strict=True):
            if id(token) in weighed:
                gamma += e
            else:
                rest += damp * e if id(token) in counted else e
        critical = min(10.0, max(1.0, -rest / gamma)) if gamma > 0 else 1.0  # W gamma + rest = 0
        multiply(boosted, critical, "BOOSTED")

    return LastRule(weigh)


# ------------------------------------------------------------------------------------------------------ entropy bonus


def entropy_bonus(
    rollouts: Sequence[Batch] = (), coef: float = 0.01, target: float | None = None, rate: float = 0.005
) -> Rule:
    """A' = A - coef (ln p + H); the other rules judge by A, so this one is to be applied after them."""
    acts = True
    for entropy in [mean_entropy(flat(rollout)) for rollout in rollouts]:
        if target is not None and math.isfinite(entropy):
            acts = entropy < target
            coef = max(0.0, coef + rate if acts else coef - rate)

    def rule(batch: Batch) -> None:
        if acts and coef:
            for token in flat(batch):
                token.advantage -= coef * (token.logp + token.entropy)
                token.reasons.add("RESHAPED")

    return rule


ATTACHMENTS: dict[str, Callable[..., Rule]] = {
    **reference_terms.ATTACHMENTS,
    "stare": stare_attached,
    "trim": trim,
    "entropy_bonus": entropy_bonus,
}
