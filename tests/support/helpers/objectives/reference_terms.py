"""A second implementation of every rule and surrogate, in plain Python with loops, written from the formulas alone.

A batch is a list of responses, a response a list of tokens. A rule sets attributes of tokens; a term is a token's loss
and its derivative by the token's new log-probability, derived by hand. What a paper holds constant (old policy,
weights, ratios behind a stop-gradient) is constant here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np


@dataclass
class Token:
    """What is known of a token, and below it what the rules decide."""

    new: float
    old: float
    advantage: float
    entropy: float = 0.0
    segment: int = 0
    sampler: float = 0.0
    ref: float = 0.0
    proxy: float | None = None
    current: float | None = None
    sum_p2: float | None = None
    sum_p2_logp: float | None = None
    rollout: int | None = None
    group: int | None = None

    weight: float = 1.0
    counted: bool = True
    clipped: bool = True
    widening: float = 1.0
    penalty: float = 0.0
    penalty_slope: float = 0.0
    reasons: set[str] = field(default_factory=set)

    @property
    def logp(self) -> float:
        """ln p of the policy that rules look at: the current one where somebody measured it, else the old one."""
        return self.old if self.current is None else self.current


@dataclass
class Update:
    """The loss of a mini-batch, its gradient in the new log-probabilities, and the tokens with the verdicts on them."""

    loss: float
    grad: np.ndarray
    tokens: list[Token]


Response = list[Token]
Batch = list[Response]


@dataclass(frozen=True)
class LastRule:
    """A rule that looks at what all others leave of the update: the coefficient -d loss / d ln p of every token."""

    weigh: Callable[[Batch, list[float]], None]


Rule = Callable[[Batch], None] | LastRule
Term = tuple[float, float]
Terms = Callable[[Response], list[Term]]


# ---------------------------------------------------------------------------------------------------- small pieces


def flat(batch: Batch) -> list[Token]:
    return [token for response in batch for token in response]


def share_of(share: float, number: int) -> int:
    """How many tokens a share of so many is: rounded up, at least one where there are any."""
    return min(number, max(1, math.ceil(Fraction(str(share)) * number)))


def highest(tokens: Sequence[Token], share: float, value: Callable[[Token], float]) -> list[Token]:
    order = sorted(tokens, key=value, reverse=True)
    return order[: share_of(share, len(order))]


def linear_quantile(values: Sequence[float], q: float) -> float:
    order = sorted(values)
    position = (len(order) - 1) * q
    below = math.floor(position)
    above = min(below + 1, len(order) - 1)
    return order[below] + (position - below) * (order[above] - order[below])


def log_ratio(token: Token) -> float:
    return min(max(token.new - token.old, -20.0), 20.0)


def log_ratio_slope(token: Token) -> float:
    """The clamp stops the gradient."""
    return 1.0 if abs(token.new - token.old) < 20.0 else 0.0


def segments(response: Response) -> list[list[Token]]:
    """Spans of equal segment ids."""
    found: list[list[Token]] = []
    for token in response:
        if found and found[-1][-1].segment == token.segment:
            found[-1].append(token)
        else:
            found.append([token])
    return found


def k3(new: float, other: float) -> Term:
    d = other - new
    return math.exp(d) - d - 1.0, 1.0 - math.exp(d)


# ------------------------------------------------------------------------------------------------------- surrogates


def ppo_clip(token: Token, ratio: float, low: float, high: float, dual: float | None) -> Term:
    """PPO's term for a ratio, and its slope in the ratio's logarithm."""
    a = token.advantage
    if not token.clipped:
        return -a * ratio, -a * ratio
    loss, slope = -a * ratio, -a * ratio
    bounded = min(max(ratio, 1.0 - low * token.widening), 1.0 + high * token.widening)
    if -a * bounded > loss:
        loss, slope = -a * bounded, 0.0
    if dual is not None and a < 0 and loss > -a * dual:
        loss, slope = -a * dual, 0.0
    return loss, slope


def token_ppo(low: float, high: float, dual: float | None) -> Terms:
    def terms(response: Response) -> list[Term]:
        found = []
        for token in response:
            loss, slope = ppo_clip(token, math.exp(log_ratio(token)), low, high, dual)
            found.append((loss, slope * log_ratio_slope(token)))
        return found

    return terms


def shared_ppo(groups: Callable[[Response], list[list[Token]]], low: float, high: float, dual: float | None) -> Terms:
    """One ratio for all tokens of a group: stopgrad(r) * p / stopgrad(p), so that d ln r / d ln p is 1."""

    def terms(response: Response) -> list[Term]:
        found = []
        for group in groups(response):
            ratio = math.exp(sum(log_ratio(token) for token in group) / len(group))
            for token in group:
                found.append(ppo_clip(token, ratio, low, high, dual))
        return found

    return terms


# ------------------------------------------------------------------------------------------------------ aggregation


def scales(batch: Batch, aggregation: str, length: float) -> list[list[float]]:
    """What a token's term is multiplied by; tokens that do not count, and rollouts without any that do, are absent."""
    counts: dict[object, int] = {}
    for number, response in enumerate(batch):
        for token in response:
            key = number if token.rollout is None else ("rollout", token.rollout)
            counts[key] = counts.get(key, 0) + token.counted
    tokens, responses = sum(counts.values()), sum(count > 0 for count in counts.values())
    found = []
    for number, response in enumerate(batch):
        row = []
        for token in response:
            count = counts[number if token.rollout is None else ("rollout", token.rollout)]
            if not token.counted:
                row.append(0.0)
            elif aggregation == "token-mean":
                row.append(1.0 / tokens)
            elif aggregation == "seq-mean-token-mean":
                row.append(1.0 / responses / count)
            elif aggregation == "seq-mean-token-sum":
                row.append(1.0 / responses)
            else:
                assert aggregation == "seq-mean-token-sum-norm"
                row.append(1.0 / responses / length)
        found.append(row)
    return found


def coefficients(batch: Batch, terms: Terms, rows: list[list[float]]) -> list[float]:
    """-d loss / d ln p of every token where the update starts: at the policy that rules look at, without penalties."""
    found = []
    for response, row in zip(batch, rows, strict=True):
        here = [replace(token, new=token.logp) for token in response]
        found += [-scale * t.weight * slope for t, scale, (_, slope) in zip(here, row, terms(here), strict=True)]
    return found


def update(batch: Batch, rules: Sequence[Rule], terms: Terms, aggregation: str, length: float = math.nan) -> Update:
    batch = [[replace(token, reasons=set()) for token in response] for response in batch]
    for token in flat(batch):
        if token.advantage == 0:
            token.reasons.add("NO_SIGNAL")
    for rule in rules:
        if not isinstance(rule, LastRule):
            rule(batch)
    for rule in rules:
        if isinstance(rule, LastRule):
            rule.weigh(batch, coefficients(batch, terms, scales(batch, aggregation, length)))
    loss, grad = 0.0, []
    for response, row in zip(batch, scales(batch, aggregation, length), strict=True):
        for token, scale, (term, slope) in zip(response, row, terms(response), strict=True):
            loss += scale * (token.weight * term + token.penalty)
            grad.append(scale * (token.weight * slope + token.penalty_slope))
    return Update(loss, np.array(grad), flat(batch))


# ------------------------------------------------------------------------------------------------------------ rules


def _silence(token: Token) -> None:
    token.weight, token.counted = 0.0, False
    token.reasons.add("SILENCED")


def rare_rewarded(batch: Batch, tau_p: float) -> list[Token]:
    return [token for token in flat(batch) if token.advantage > 0 and math.exp(token.logp) < tau_p]


def s2t_threshold(batch: Batch, tau_p: float, quantile: float, population: str) -> float:
    judged = rare_rewarded(batch, tau_p) if population == "candidates" else flat(batch)
    return linear_quantile([token.entropy for token in judged], quantile)


def s2t(tau_p: float = 0.002, quantile: float = 0.75, population: str = "candidates", mask: str = "spurious") -> Rule:
    """The masks that leave nothing to chance: spurious, rare (probability alone) and uncertain (high entropy)."""

    def rule(batch: Batch) -> None:
        candidates = rare_rewarded(batch, tau_p)
        if not candidates:
            return
        tau_h = s2t_threshold(batch, tau_p, quantile, population)
        for token in candidates:
            confident, uncertain = token.entropy < tau_h, token.entropy > tau_h
            if {"spurious": confident, "rare": True, "uncertain": uncertain}[mask]:
                _silence(token)

    return rule


def groups_with_signal(batch: Batch) -> None:
    """Count no token of a group whose advantages are all zero; without groups a response is one."""
    silent: dict[object, bool] = {}
    for number, response in enumerate(batch):
        for token in response:
            group = ("response", number) if token.group is None else token.group
            silent[group] = silent.get(group, True) and token.advantage == 0
    for number, response in enumerate(batch):
        for token in response:
            group = ("response", number) if token.group is None else token.group
            token.counted = token.counted and not silent[group]


def silence_these(positions: Sequence[int]) -> Rule:
    """For a random choice that somebody else made."""

    def rule(batch: Batch) -> None:
        tokens = flat(batch)
        for position in positions:
            _silence(tokens[position])

    return rule


def drop_these(positions: Sequence[int]) -> Rule:
    """For a random choice that somebody else made: no term, but still in the denominator."""

    def rule(batch: Batch) -> None:
        tokens = flat(batch)
        for position in positions:
            tokens[position].weight = 0.0

    return rule


def mean_entropy(tokens: Sequence[Token]) -> float:
    return sum(token.entropy for token in tokens) / len(tokens) if tokens else math.nan


STARE_VARIANTS: dict[str, tuple[list[str], list[str]]] = {
    "O1": (["L+"], []),
    "O2": ([], ["U+"]),
    "O3": (["U-"], []),
    "O4": ([], ["L-"]),
    "C1": (["L+", "U-"], []),
    "C2": (["L+"], ["L-"]),
    "C3": (["U-"], ["U+"]),
    "C4": ([], ["U+", "L-"]),
}


def stare_state(
    rollouts: Sequence[Batch], boost: float, damp: float, target: float, adaptive: bool, rate: float
) -> tuple[bool, float, float]:
    """Whether the gate is open, and the two weights, after these rollout batches."""
    is_open = True
    for rollout in rollouts:
        entropy = mean_entropy(flat(rollout))
        if not math.isfinite(entropy):
            continue
        is_open = entropy < target
        if adaptive:
            sign = float(np.sign(target - entropy))
            boost = min(max(boost + rate * sign, 1.0), 1.5)
            damp = min(max(damp - rate * sign, 0.5), 1.0)
    return is_open, boost, damp


def stare_sets(batch: Batch, share: float, threshold: str, p_threshold: float) -> dict[str, list[int]]:
    """The positions in L+, L-, U+ and U-."""
    tokens = flat(batch)
    found: dict[str, list[int]] = {}
    for sign, of_sign in (("+", 1.0), ("-", -1.0)):
        members = [i for i, token in enumerate(tokens) if token.advantage * of_sign > 0]
        if threshold == "quantile":
            order = sorted(members, key=lambda i: -tokens[i].logp, reverse=True)
            surprising = order[: share_of(share, len(members))]
        else:
            surprising = [i for i in members if math.exp(tokens[i].logp) < p_threshold]
        found["L" + sign] = surprising
        found["U" + sign] = [i for i in members if i not in surprising]
    return found


def stare_tokens(
    batch: Batch, variant: str, share: float, target: float, gate: str, threshold: str, p_threshold: float, opened: bool
) -> tuple[list[Token], list[Token]]:
    """The tokens to boost and to damp, without those for which the gate is closed."""
    sets = stare_sets(batch, share, threshold, p_threshold)
    passing = []
    for response in batch:
        for token in response:
            open_for = {
                "none": True,
                "batch": opened,
                "sample": mean_entropy(response) < target,
                "token": token.entropy < target,
            }
            passing.append(open_for[gate])
    tokens = flat(batch)
    boosted, damped = (
        [tokens[i] for name in names for i in sets[name] if passing[i]] for names in STARE_VARIANTS[variant]
    )
    return boosted, damped


def multiply(tokens: Sequence[Token], factor: float, reason: str) -> None:
    for token in tokens:
        token.weight *= factor
        token.reasons.add(reason)


def stare_rule(
    rollouts: Sequence[Batch] = (),
    variant: str = "O1",
    share: float = 0.1,
    boost: float = 1.1,
    damp: float = 0.9,
    target: float = 0.3,
    gate: str = "batch",
    threshold: str = "quantile",
    p_threshold: float = 0.1,
    adaptive: bool = False,
    rate: float = 0.01,
) -> Rule:
    is_open, boost, damp = stare_state(rollouts, boost, damp, target, adaptive, rate)

    def rule(batch: Batch) -> None:
        boosted, damped = stare_tokens(batch, variant, share, target, gate, threshold, p_threshold, is_open)
        multiply(boosted, boost, "BOOSTED")
        multiply(damped, damp, "DAMPED")

    return rule


def top_entropy_rule(share: float = 0.2, renormalize: bool = False) -> Rule:
    def rule(batch: Batch) -> None:
        kept = {id(token) for token in highest(flat(batch), share, lambda token: token.entropy)}
        for token in flat(batch):
            if id(token) not in kept:
                token.weight = 0.0
                token.counted = token.counted and not renormalize

    return rule


def tis(cap: float = 2.0) -> Rule:
    def rule(batch: Batch) -> None:
        for token in flat(batch):
            token.weight *= min(math.exp(token.old - token.sampler), cap)

    return rule


def icepop(low: float = 0.5, high: float = 5.0, renormalize: bool = False) -> Rule:
    def rule(batch: Batch) -> None:
        for token in flat(batch):
            w = math.exp(token.old - token.sampler)
            if low <= w <= high:
                token.weight *= w
            else:
                token.weight = 0.0
                token.counted = token.counted and not renormalize

    return rule


def mis(low: float = 0.5, high: float = 2.0, geometric: bool = False, renormalize: bool = False) -> Rule:
    def rule(batch: Batch) -> None:
        for response in batch:
            if not response:
                continue
            log_w = sum(token.old - token.sampler for token in response)
            w = math.exp(log_w / len(response) if geometric else log_w)
            if low <= w <= high:
                continue
            for token in response:
                token.weight = 0.0
                token.counted = token.counted and not renormalize

    return rule


def kl(coef: float = 0.001, estimator: str = "k3", corrected: bool = False) -> Rule:
    def rule(batch: Batch) -> None:
        for token in flat(batch):
            d = token.new - token.ref
            estimates = {"k1": (d, 1.0), "k2": (d * d / 2, d), "k3": k3(token.new, token.ref)}
            value, slope = estimates[estimator]
            if corrected:  # (rho k)' = rho k' + rho k, but for a clamped rho
                rho = math.exp(log_ratio(token))
                value, slope = rho * value, rho * (slope + value * log_ratio_slope(token))
            token.penalty += coef * value
            token.penalty_slope += coef * slope

    return rule


ATTACHMENTS: dict[str, Callable[..., Rule]] = {
    "s2t": s2t,
    "stare": stare_rule,
    "top_entropy": top_entropy_rule,
    "tis": tis,
    "icepop": icepop,
    "mis": mis,
    "kl": kl,
}


def covariances(batch: Batch) -> list[float]:
    tokens = flat(batch)
    if not tokens:
        return []
    mean_a = sum(token.advantage for token in tokens) / len(tokens)
    mean_logp = sum(token.logp for token in tokens) / len(tokens)
    return [(token.advantage - mean_a) * (token.logp - mean_logp) for token in tokens]


def clip_cov_candidates(batch: Batch, cov_low: float, cov_high: float) -> set[int]:
    """Unclipped tokens in the band. The clip range is [0, 2], so only a rewarded token above 2 is clipped."""
    found = set()
    for position, (token, cov) in enumerate(zip(flat(batch), covariances(batch), strict=True)):
        is_clipped = token.advantage > 0 and math.exp(token.logp - token.old) > 2.0
        if cov_low < cov < cov_high and not is_clipped:
            found.add(position)
    return found


def group_advantages(rewards: Sequence[float], groups: Sequence[int], normalized: bool) -> list[float]:
    """Reward less the group's mean, over the deviation where `normalized` (else Dr.GRPO's); a group of one has none."""
    found = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = [other for other, its_group in zip(rewards, groups, strict=True) if its_group == group]
        mean, deviation = 0.0, 1.0
        if len(peers) > 1:
            mean = sum(peers) / len(peers)
            deviation = math.sqrt(sum((peer - mean) ** 2 for peer in peers) / (len(peers) - 1))
        found.append((reward - mean) / (deviation + 1e-6) if normalized else reward - mean)
    return found
