"""Detectors of what the policy and its updates do: entropy, tokens that weigh too much, ratios, clip, sampler."""

from __future__ import annotations

import math
from statistics import fmean

from trimtab.insight.alarms.detector_input import Finding, View, percent
from trimtab.insight.alarms.history import slope
from trimtab.train import FEW, FEW_SHARE

ENTROPY = "policy/entropy"


def entropy_collapse(view: View) -> Finding | None:
    """Entropy far below its start or the objective's target, or on its way there."""
    entropy, limits = view.shift(ENTROPY), view.limits
    if entropy is None or entropy.start <= 0:
        return None
    low = limits.collapse_level * entropy.start
    if view.entropy_target is not None and entropy.start >= view.entropy_target:
        low = max(low, limits.collapse_target * view.entropy_target)
    share = percent(entropy.now / entropy.start)
    if entropy.now < low:
        return Finding(
            f"entropy is down to {entropy.now:.3g}, {share} of the {entropy.start:.3g} at the start",
            entropy.evidence,
        )
    ahead = forecast(view)
    if ahead is None or ahead > limits.collapse_floor * entropy.start or not entropy.sure(limits.sure):
        return None
    return Finding(
        f"entropy falls fast: {entropy.now:.3g} now, {share} of the start; going on like this it is {ahead:.2g} in "
        f"{limits.ahead} steps",
        {**entropy.evidence, "forecast": {"steps": limits.ahead, ENTROPY: ahead}},
    )


def entropy_explosion(view: View) -> Finding | None:
    """Entropy far above both its start and the objective's target, or on its way there."""
    entropy, limits = view.shift(ENTROPY), view.limits
    if entropy is None:
        return None
    usual = max(entropy.start, view.entropy_target or 0.0)
    high = max(limits.explosion_level * usual, usual + limits.explosion_least)
    if not entropy.sure(limits.sure) or entropy.now <= usual:
        return None
    if entropy.now > high:
        return Finding(
            f"entropy is up to {entropy.now:.3g} from {entropy.start:.3g} at the start; {high:.3g} is the limit",
            {**entropy.evidence, "limit": high},
        )
    ahead = forecast(view)
    if ahead is None or ahead < max(limits.explosion_ceiling * usual, usual + limits.explosion_least):
        return None
    return Finding(
        f"entropy rises fast: {entropy.now:.3g} now, {entropy.start:.3g} at the start; going on like this it is "
        f"{ahead:.2g} in {limits.ahead} steps",
        {**entropy.evidence, "forecast": {"steps": limits.ahead, ENTROPY: ahead}},
    )


def forecast(view: View) -> float | None:
    """The entropy some steps ahead if its trend goes on, by the logarithm."""
    values = view.history.last(ENTROPY, view.limits.trend)
    if not values or min(values) <= 0:
        return None
    logs = [math.log(value) for value in values]
    return math.exp(fmean(logs[-view.limits.recent :]) + slope(logs) * view.limits.ahead)


def spurious_growth(view: View) -> Finding | None:
    """More rare, confident, rewarded tokens than at the start. Counted, for there are one or two in a thousand."""
    metric, limits = "tokens/spurious_share", view.limits
    shares, tokens = view.history.values(metric), view.history.values("tokens/count")
    if len(shares) < limits.start + limits.trend or len(shares) != len(tokens):
        return None
    before, now = _pooled(shares, tokens, slice(limits.start)), _pooled(shares, tokens, slice(-limits.trend, None))
    expected = before[0] / before[1] * now[1]
    share, usual = now[0] / now[1], before[0] / before[1]
    sure = (now[0] - expected) / math.sqrt(now[0] + expected + 1) > limits.sure / 2
    if share < limits.spurious_least or share < limits.spurious_growth * usual or not sure:
        return None
    steps = view.history.steps(metric)
    evidence = {
        metric: {
            "now": share,
            "steps": [steps[-limits.trend], steps[-1]],
            "start": usual,
            "start_steps": [steps[0], steps[limits.start - 1]],
        }
    }
    return Finding(
        f"{percent(share)} of the tokens are rare, confident and rewarded; {percent(usual)} were at the start", evidence
    )


def _pooled(shares: list[float], tokens: list[float], where: slice) -> tuple[float, float]:
    """How many tokens, of how many, over a window without its most extreme tenth."""
    pairs = sorted(zip(shares[where], tokens[where], strict=True))
    del pairs[-max(1, len(pairs) // 10) :]
    return sum(share * count for share, count in pairs), max(sum(count for _, count in pairs), 1.0)


def gradient_concentration(view: View) -> Finding | None:
    """Few tokens hold much more of the gradient than at the start, and more than having few mixed groups explains."""
    metric, limits = "tokens/top_gradient_share", view.limits
    held, mixed, count = view.shift(metric), view.shift("groups/mixed_share"), view.shift("tokens/count")
    if held is None or mixed is None or count is None:
        return None
    even_now, even_start = even_share(count.now * mixed.now), even_share(count.start * mixed.start)
    grown = (held.now / even_now) / max(held.start / even_start, 1e-9)
    if held.now < limits.gradient_least or grown < limits.gradient_growth or not held.sure(limits.sure):
        return None
    return Finding(
        f"few tokens hold {percent(held.now)} of the gradient; at the start they held {percent(held.start)}",
        {**held.evidence, **mixed.evidence},
    )


def even_share(tokens: float) -> float:
    """What the few tokens would hold if all tokens with signal had the same gradient."""
    return min(1.0, max(FEW, FEW_SHARE * tokens) / max(tokens, 1.0))


def ratio(view: View) -> Finding | None:
    """A policy that moves too far within a step."""
    limits, moved, highest = view.limits, view.now("update/approx_kl"), view.now("update/ratio_max")
    if moved is not None and moved > limits.ratio_kl:
        return Finding(
            f"the policy moves {moved:.2g} nats within a step; {limits.ratio_kl:g} is the limit",
            view.level("update/approx_kl", limit=limits.ratio_kl),
        )
    once = max(view.history.values("update/approx_kl")[-limits.recent :], default=0.0)
    if once > limits.ratio_kl_once:
        return Finding(
            f"the policy has moved {once:.2g} nats within one step; {limits.ratio_kl_once:g} is the limit",
            {"update/approx_kl": {"now": once, "limit": limits.ratio_kl_once}},
        )
    shift = view.shift("update/approx_kl")
    if shift is not None and shift.now > max(limits.ratio_least, limits.ratio_growth * shift.start):
        return Finding(
            f"the policy moves {shift.now:.2g} nats within a step; at the start {shift.start:.2g}",
            shift.evidence,
        )
    if highest is not None and highest > limits.ratio_high:
        return Finding(
            f"the largest ratio of a step is {highest:.3g}; {limits.ratio_high:g} is the limit",
            view.level("update/ratio_max", limit=limits.ratio_high),
        )
    return None


def clip(view: View) -> Finding | None:
    """A clip that cuts many more tokens than it did at the start."""
    cut, limits = view.shift("update/clip_share"), view.limits
    if cut is None or cut.now < max(limits.clip_least, limits.clip_growth * cut.start) or not cut.sure(limits.sure):
        return None
    return Finding(
        f"the clip cuts {percent(cut.now)} of the tokens; at the start {percent(cut.start)}",
        cut.evidence,
    )


def sampler_mismatch(view: View) -> Finding | None:
    """A sampler whose log-probabilities are not the trainer's."""
    metric, limits = "sampler/mismatch_mean", view.limits
    now, shift = view.now(metric), view.shift(metric)
    if now is not None and now > limits.mismatch_level:
        return Finding(
            f"sampler and trainer differ by {now:.2g} nats per token; {limits.mismatch_level:g} is the limit",
            view.level(metric, limit=limits.mismatch_level),
        )
    if shift is None or shift.now < max(limits.mismatch_least, limits.mismatch_growth * shift.start):
        return None
    return Finding(
        f"sampler and trainer differ by {shift.now:.2g} nats per token; at the start by {shift.start:.2g}",
        shift.evidence,
    )
