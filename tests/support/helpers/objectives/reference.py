"""A second implementation of every method, its loss and gradient, composed of the terms in `reference_terms`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from helpers.objectives import reference_controllers as controllers
from helpers.objectives import reference_effects as effects
from helpers.objectives.reference_baselines import token_baseline
from helpers.objectives.reference_control import ATTACHMENTS as STEERING_ATTACHMENTS
from helpers.objectives.reference_control import stare_attached
from helpers.objectives.reference_terms import (
    STARE_VARIANTS,
    Batch,
    Response,
    Rule,
    Term,
    Token,
    Update,
    clip_cov_candidates,
    covariances,
    drop_these,
    flat,
    group_advantages,
    groups_with_signal,
    highest,
    k3,
    kl,
    log_ratio,
    log_ratio_slope,
    mean_entropy,
    s2t,
    segments,
    share_of,
    shared_ppo,
    silence_these,
    stare_rule,
    token_ppo,
    top_entropy_rule,
    update,
)

ATTACHMENTS = {
    **STEERING_ATTACHMENTS,
    "token_baseline": token_baseline,
    "clip_b": effects.clip_b,
    "clip_v": effects.clip_v,
    "steer": effects.steer,
    "repo_r": controllers.repo_r,
    "entropic": controllers.entropic,
    "entrocraft": controllers.entrocraft,
}

# ---------------------------------------------------------------------------------------------------------- methods


def grpo(
    batch: Batch,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    aggregation: str = "seq-mean-token-mean",
    also: Sequence[Rule] = (),
) -> Update:
    return update(batch, also, token_ppo(clip_low, clip_high, dual_clip), aggregation)


def dapo(
    batch: Batch,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
    aggregation: str = "token-mean",
    also: Sequence[Rule] = (),
) -> Update:
    return update(batch, also, token_ppo(clip_low, clip_high, dual_clip), aggregation)


justrl, gdpo = dapo, grpo


def maxrl(
    batch: Batch,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    aggregation: str = "token-mean",
    also: Sequence[Rule] = (),
) -> Update:
    return update(batch, also, token_ppo(clip_low, clip_high, dual_clip), aggregation)


def dr_grpo(
    batch: Batch,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    length: float = 3000.0,
    also: Sequence[Rule] = (),
) -> Update:
    return update(batch, also, token_ppo(clip_low, clip_high, dual_clip), "seq-mean-token-sum-norm", length)


def gspo(
    batch: Batch,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
    aggregation: str = "seq-mean-token-mean",
    also: Sequence[Rule] = (),
) -> Update:
    def whole(response: Response) -> list[list[Token]]:
        return [response] if response else []

    return update(batch, also, shared_ppo(whole, clip_low, clip_high, dual_clip), aggregation)


def luspo(
    batch: Batch,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
    aggregation: str = "seq-mean-token-sum",
    also: Sequence[Rule] = (),
) -> Update:
    return gspo(batch, clip_low, clip_high, dual_clip, aggregation, also)


def cispo(
    batch: Batch,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    upper_only: bool = False,
    aggregation: str = "token-mean",
    also: Sequence[Rule] = (),
) -> Update:
    def terms(response: Response) -> list[Term]:
        found = []
        for token in response:
            constant = min(math.exp(log_ratio(token)), 1.0 + clip_high)
            if not upper_only:
                constant = max(constant, 1.0 - clip_low)
            found.append((-constant * token.advantage * token.new, -constant * token.advantage))
        return found

    return update(batch, also, terms, aggregation)


def sapo(
    batch: Batch,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    aggregation: str = "seq-mean-token-mean",
    also: Sequence[Rule] = (),
) -> Update:
    def terms(response: Response) -> list[Term]:
        found = []
        for token in response:
            tau = tau_positive if token.advantage > 0 else tau_negative
            ratio = math.exp(log_ratio(token))
            away = math.exp(-tau * abs(ratio - 1.0))
            gate = 1.0 / (1.0 + away) if ratio >= 1.0 else away / (1.0 + away)
            loss = -token.advantage * 4.0 / tau * gate
            # sigmoid' = sigmoid (1 - sigmoid), which is even; tau cancels and d ratio / d ln p = ratio.
            slope = -token.advantage * 4.0 * away / (1.0 + away) ** 2 * ratio
            found.append((loss, slope * log_ratio_slope(token)))
        return found

    return update(batch, also, terms, aggregation)


def gmpo(batch: Batch, clip_low: float = 0.4, clip_high: float = 0.4, also: Sequence[Rule] = ()) -> Update:
    """A response's loss is -A exp(mean clipped log ratio); each token carries it whole and the mean divides it."""

    def terms(response: Response) -> list[Term]:
        logs, slopes = [], []
        for token in response:
            log, slope = log_ratio(token), log_ratio_slope(token)
            if token.advantage > 0 and log > clip_high:
                log, slope = clip_high, 0.0
            if token.advantage < 0 and log < -clip_low:
                log, slope = -clip_low, 0.0
            logs.append(log)
            slopes.append(slope)
        losses = [-token.advantage * math.exp(sum(logs) / len(logs)) for token in response]
        return [(loss, loss * slope) for loss, slope in zip(losses, slopes, strict=True)]

    return update(batch, also, terms, "seq-mean-token-mean")


def dppo(
    batch: Batch,
    divergence: str = "tv",
    shift_low: float = 0.2,
    shift_high: float = 0.2,
    cap: float = 20.0,
    aggregation: str = "token-mean",
    also: Sequence[Rule] = (),
) -> Update:
    def terms(response: Response) -> list[Term]:
        found = []
        for token in response:
            p, p_old = math.exp(token.new), math.exp(token.old)
            if divergence == "tv":
                risen, fallen = p - p_old, p_old - p
            else:
                rest, rest_old = max(1.0 - p, 1e-8), max(1.0 - p_old, 1e-8)
                kl = p_old * math.log(p_old / p) + rest_old * math.log(rest_old / rest)
                risen, fallen = (kl, 0.0) if p > p_old else (0.0, kl)
            masked = risen > shift_high if token.advantage > 0 else fallen > shift_low
            constant = 0.0 if masked else min(math.exp(log_ratio(token)), cap)
            found.append((-constant * token.advantage * token.new, -constant * token.advantage))
        return found

    return update(batch, also, terms, aggregation)


def vespo(
    batch: Batch,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
    aggregation: str = "token-mean",
    also: Sequence[Rule] = (),
) -> Update:
    def terms(response: Response) -> list[Term]:
        log_w = sum(log_ratio(token) for token in response)
        w = math.exp(min(max(log_w, math.log(1e-8)), 20.0))
        found = []
        for token in response:
            k, lam = (k_pos, lambda_pos) if token.advantage >= 0 else (k_neg, lambda_neg)
            phi = math.exp(lam) * w**k * math.exp(-lam * w)
            found.append((-phi * token.advantage * token.new, -phi * token.advantage))
        return found

    return update(batch, also, terms, aggregation)


def top_entropy(
    batch: Batch,
    share: float = 0.2,
    renormalize: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
    also: Sequence[Rule] = (),
) -> Update:
    return dapo(batch, clip_low, clip_high, dual_clip, also=[top_entropy_rule(share, renormalize), *also])


def clip_cov(batch: Batch, dropped: Sequence[int], also: Sequence[Rule] = ()) -> Update:
    """Clip-Cov once its random choice is made."""
    return dapo(batch, 1.0, 1.0, None, also=[drop_these(dropped), *also])


def kl_cov(batch: Batch, share: float = 2e-3, coef: float = 1.0, also: Sequence[Rule] = ()) -> Update:
    def rule(batch: Batch) -> None:
        cov = covariances(batch)
        order = sorted(range(len(cov)), key=lambda position: cov[position], reverse=True)
        tokens = flat(batch)
        for position in order[: share_of(share, len(order))]:
            token = tokens[position]
            token.clipped = False
            token.penalty += coef * abs(log_ratio(token))
            token.penalty_slope += coef * float(np.sign(log_ratio(token))) * log_ratio_slope(token)

    return dapo(batch, 1.0, 1.0, None, also=[rule, *also])


def entropy_advantage(
    batch: Batch,
    coef: float = 0.4,
    entropy_cap: float = 0.5,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
    also: Sequence[Rule] = (),
) -> Update:
    def rule(batch: Batch) -> None:
        for token in flat(batch):
            token.advantage += min(coef * token.entropy, abs(token.advantage) * entropy_cap)

    return dapo(batch, clip_low, clip_high, dual_clip, also=[rule, *also])


def lp_reg(
    batch: Batch,
    share: float = 0.01,
    coef: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
    also: Sequence[Rule] = (),
) -> Update:
    def rule(batch: Batch) -> None:
        punished = [token for token in flat(batch) if token.advantage < 0]
        for token in highest(punished, share, lambda token: -token.logp):
            q = token.old if token.proxy is None else token.proxy
            if token.new < q:
                token.clipped = False
                value, slope = k3(token.new, q)
                token.penalty += coef * value
                token.penalty_slope += coef * slope

    return dapo(batch, clip_low, clip_high, dual_clip, also=[rule, *also])


def reinforce(batch: Batch, also: Sequence[Rule] = ()) -> Update:
    def terms(response: Response) -> list[Term]:
        return [(-token.advantage * token.new, -token.advantage) for token in response]

    return update(batch, also, terms, "token-mean")


def dapo_with(rule: Callable[..., Rule]) -> Callable[..., Update]:
    """DAPO with a rule: options of the clip and the mean are DAPO's, all others the rule's."""

    def method(batch: Batch, also: Sequence[Rule] = (), **options: Any) -> Update:
        own = {key: options.pop(key) for key in ("clip_low", "clip_high", "dual_clip", "aggregation") if key in options}
        return dapo(batch, **own, also=[rule(**options), *also])

    return method


otb, clip_b, clip_v, steer = map(dapo_with, (token_baseline, effects.clip_b, effects.clip_v, effects.steer))
repo_r, entropic, entrocraft = map(dapo_with, (controllers.repo_r, controllers.entropic, controllers.entrocraft))


def stapo(
    batch: Batch,
    tau_p: float = 0.002,
    quantile: float = 0.75,
    population: str = "candidates",
    mask: str = "spurious",
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
    aggregation: str = "token-mean",
    also: Sequence[Rule] = (),
) -> Update:
    rule = s2t(tau_p, quantile, population, mask)
    return dapo(batch, clip_low, clip_high, dual_clip, aggregation, also=[rule, *also])


def stare(
    batch: Batch,
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
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
    also: Sequence[Rule] = (),
) -> Update:
    rule = stare_attached(rollouts, variant, share, boost, damp, target, gate, threshold, p_threshold, adaptive, rate)
    return dapo(batch, clip_low, clip_high, dual_clip, also=[rule, *also])


def sspo(
    batch: Batch,
    clip_low: float = 0.02,
    clip_high: float = 0.028,
    dual_clip: float | None = None,
    widen_low: float = 0.5,
    widen_high: float = 1.5,
    clip_scale: str = "fixed",
    aggregation: str = "seq-mean-token-mean",
    also: Sequence[Rule] = (),
) -> Update:
    def widen(batch: Batch) -> None:
        found = [segment for response in batch for segment in segments(response)]
        if not found:
            return
        mean = sum(mean_entropy(segment) for segment in found) / len(found)
        for segment in found:
            widening = min(max(mean_entropy(segment) / mean, widen_low), widen_high)
            for token in segment:
                token.widening = widening / math.sqrt(len(segment)) if clip_scale == "sqrt_length" else widening
                if widening > 1:
                    token.reasons.add("WIDENED")
                if widening < 1:
                    token.reasons.add("NARROWED")

    return update(batch, [widen, *also], shared_ppo(segments, clip_low, clip_high, dual_clip), aggregation)


__all__ = [
    "ATTACHMENTS",
    "STARE_VARIANTS",
    "Batch",
    "Response",
    "Rule",
    "Term",
    "Token",
    "Update",
    "cispo",
    "clip_b",
    "clip_cov",
    "clip_cov_candidates",
    "clip_v",
    "covariances",
    "dapo",
    "dppo",
    "dr_grpo",
    "drop_these",
    "entropy_advantage",
    "flat",
    "gdpo",
    "gmpo",
    "group_advantages",
    "groups_with_signal",
    "grpo",
    "gspo",
    "highest",
    "k3",
    "kl",
    "kl_cov",
    "log_ratio",
    "log_ratio_slope",
    "lp_reg",
    "luspo",
    "maxrl",
    "mean_entropy",
    "otb",
    "reinforce",
    "s2t",
    "sapo",
    "segments",
    "share_of",
    "shared_ppo",
    "silence_these",
    "sspo",
    "stapo",
    "stare",
    "stare_rule",
    "steer",
    "token_ppo",
    "top_entropy",
    "top_entropy_rule",
    "update",
    "vespo",
]  # fmt: skip
