"""Detectors over the policy and its updates: entropy and its control, gradient, ratio, clipping, sampler mismatch."""

from __future__ import annotations

import math
from statistics import fmean

from trimtab.insight.alarms.detector_input import DetectorInput, Finding, percent, slope
from trimtab.trainer.train import TOP_GRADIENT_SHARE, TOP_GRADIENT_TOKENS

ENTROPY = "policy/entropy"
LARGEST_LOG = 700.0  # whose exponential a float holds: a log of another trainer may hold anything
CONTROL_ADVICE = {
    "leverage": "Without mixed groups no weights can steer: train on other problems, raise rollout.samples, or set "
    "rollout.dynamic_sampling = true",
    "saturated": "At the limit of its weight trim can do no more: lower update.lr, raise objective.max_weight, or set "
    "a higher objective.floor so that it begins earlier",
    "theory": "Where the prediction does not fit, updates are too large for a first-order theory: lower update.lr, or "
    "take fewer update.per_step or update.passes",
}


def entropy_collapse(run: DetectorInput) -> Finding | None:
    """Detect entropy that is, or soon will be, far below the target or its start, without a gain in accuracy."""
    entropy = run.shift(ENTROPY)
    limits = run.limits
    if entropy is None or entropy.start <= 0:
        return None
    # Entropy is what a policy pays for accuracy: 2.2 nats of a base model that does not know the task are no loss.
    low = 0.0 if run.has_learned() else limits.collapse_level * entropy.start
    # A run that starts below its target is on its way up: only its own start counts.
    target = run.target()
    if target is not None and entropy.start >= target:
        low = max(low, limits.collapse_target * target)
    share = percent(entropy.now / entropy.start)
    if entropy.now < low:
        message = f"entropy is down to {entropy.now:.3g}, {share} of the {entropy.start:.3g} at the start"
        return Finding(message, entropy.evidence)
    ahead = forecast(run)
    if ahead is None or ahead > limits.collapse_floor * entropy.start or not entropy.significant or run.has_learned():
        return None
    # An entropy that comes back from an explosion falls fast too.
    if entropy.now > entropy.start:
        return None
    return Finding(
        f"entropy falls fast: {entropy.now:.3g} now, {share} of the start; going on like this it is {ahead:.2g} in "
        f"{limits.forecast_steps} steps",
        {**entropy.evidence, "forecast": {"steps": limits.forecast_steps, ENTROPY: ahead}},
    )


def entropy_explosion(run: DetectorInput) -> Finding | None:
    """Detect entropy that is, or soon will be, far above both its start and the objective's target."""
    entropy = run.shift(ENTROPY)
    limits = run.limits
    if entropy is None:
        return None
    # Entropy that rises to the objective's target is intended.
    usual = max(entropy.start, run.target() or 0.0)
    high = max(limits.explosion_level * usual, usual + limits.explosion_min_rise)
    if not entropy.significant or entropy.now <= usual:
        return None
    if entropy.now > high:
        message = f"entropy is up to {entropy.now:.3g} from {entropy.start:.3g} at the start; {high:.3g} is the limit"
        return Finding(message, {**entropy.evidence, "limit": high})
    ahead = forecast(run)
    if ahead is None or ahead < max(limits.explosion_ceiling * usual, usual + limits.explosion_min_rise):
        return None
    return Finding(
        f"entropy rises fast: {entropy.now:.3g} now, {entropy.start:.3g} at the start; going on like this it is "
        f"{ahead:.2g} in {limits.forecast_steps} steps",
        {**entropy.evidence, "forecast": {"steps": limits.forecast_steps, ENTROPY: ahead}},
    )


def forecast(run: DetectorInput) -> float | None:
    """Extrapolate the entropy by its log-linear trend; None until there are enough positive values."""
    values = run.history.last(ENTROPY, run.limits.trend_steps)
    if not values or min(values) <= 0:
        return None
    # Of the logarithm, since entropy decays by about the same factor from step to step.
    logs = [math.log(value) for value in values]
    ahead = fmean(logs[-run.limits.recent_steps :]) + slope(logs) * run.limits.forecast_steps
    return math.exp(min(ahead, LARGEST_LOG))


def spurious_growth(run: DetectorInput) -> Finding | None:
    """Detect many more rare, confident, rewarded tokens than at the start, for as many tokens in mixed groups."""
    metric = "tokens/spurious_share"
    limits = run.limits
    names = (metric, "tokens/count", "groups/mixed_share")
    if len({run.history.count(name) for name in names}) > 1:
        return None
    # Only tokens of mixed groups can be spurious. A run that begins to learn has more of them: that is divided out.
    kept = zip(run.history.steps(metric), *(run.history.values(name) for name in names), strict=True)
    mixed = [(step, share * count, count, count * part) for step, share, count, part in kept if count * part >= 1]
    if len(mixed) < limits.start_steps + limits.trend_steps:
        return None
    first, recent = mixed[: limits.start_steps], mixed[-limits.trend_steps :]
    spurious, tokens, in_mixed = _pooled(recent)
    spurious_before, tokens_before, in_mixed_before = _pooled(first)
    # There are one or two in a thousand tokens, so shares are too noisy: counts are compared, as of a Poisson process.
    expected = spurious_before / in_mixed_before * in_mixed
    significant = (spurious - expected) / math.sqrt(spurious + expected + 1) > limits.min_spreads / 2
    share, usual = spurious / tokens, spurious_before / tokens_before
    if share < limits.spurious_min_share or spurious < limits.spurious_growth * expected or not significant:
        return None
    message = f"{percent(share)} of the tokens are rare, confident and rewarded; {percent(usual)} were at the start"
    steps = {"steps": [recent[0][0], recent[-1][0]], "start_steps": [first[0][0], first[-1][0]]}
    return Finding(message, {metric: {"now": share, "start": usual, **steps}})


def _pooled(window: list[tuple[int, float, float, float]]) -> tuple[float, float, float]:
    """Return (spurious tokens, all, those in mixed groups) without the highest tenth, which one odd step could fill."""
    kept = sorted(window, key=lambda step: step[1] / step[3])
    del kept[-max(1, len(kept) // 10) :]
    _, spurious, tokens, in_mixed = map(sum, zip(*kept, strict=True))
    return spurious, tokens, in_mixed


def gradient_concentration(run: DetectorInput) -> Finding | None:
    """Detect that a few tokens hold much more of the gradient than at the start, without a gain in accuracy."""
    metric = "tokens/top_gradient_share"
    limits = run.limits
    held = run.shift(metric)
    mixed = run.shift("groups/mixed_share")
    count = run.shift("tokens/count")
    if held is None or mixed is None or count is None:
        return None
    # With fewer mixed groups fewer tokens have a gradient at all, and each holds more of it: that is divided out.
    even_now, even_start = even_share(count.now * mixed.now), even_share(count.start * mixed.start)
    grown = (held.now / even_now) / max(held.start / even_start, 1e-9)
    if held.now < limits.gradient_min_share or grown < limits.gradient_growth or not held.significant:
        return None
    # A policy that is certain of most tokens has its gradient in the few where it is not.
    if run.has_learned():
        return None
    message = f"few tokens hold {percent(held.now)} of the gradient; at the start they held {percent(held.start)}"
    return Finding(message, {**held.evidence, **mixed.evidence})


def even_share(tokens: float) -> float:
    """Return the share that the few tokens would hold if all tokens with signal had the same gradient."""
    return min(1.0, max(TOP_GRADIENT_TOKENS, TOP_GRADIENT_SHARE * tokens) / max(tokens, 1.0))


def ratio(run: DetectorInput) -> Finding | None:
    """Detect a policy that moves too far within a step."""
    metric = "update/approx_kl"
    limits = run.limits
    moved = run.now(metric)
    shift = run.shift(metric)
    highest = run.now("update/ratio_max")
    # An absolute limit first, which needs no start: a wrong learning rate shows at step 1.
    if moved is not None and moved > limits.ratio_kl:
        message = f"the policy moves {moved:.2g} nats within a step; {limits.ratio_kl:g} is the limit"
        return Finding(message, run.level(metric, limit=limits.ratio_kl))
    # A single huge step, which the median hides.
    once = max(run.history.values(metric)[-limits.recent_steps :], default=0.0)
    if once > limits.ratio_kl_once:
        message = f"the policy has moved {once:.2g} nats within one step; {limits.ratio_kl_once:g} is the limit"
        return Finding(message, {metric: {"now": once, "limit": limits.ratio_kl_once}})
    if shift is not None and shift.now > max(limits.ratio_kl_min, limits.ratio_growth * shift.start):
        message = f"the policy moves {shift.now:.2g} nats within a step; at the start {shift.start:.2g}"
        return Finding(message, shift.evidence)
    # A few tokens with a huge ratio hardly show in the mean KL.
    if highest is not None and highest > limits.ratio_max:
        message = f"the largest ratio of a step is {highest:.3g}; {limits.ratio_max:g} is the limit"
        return Finding(message, run.level("update/ratio_max", limit=limits.ratio_max))
    return None


def clip(run: DetectorInput) -> Finding | None:
    """Detect that many more tokens are clipped than at the start."""
    # Only growth: methods differ a hundredfold, SSPO and GSPO on the demo for example.
    cut = run.shift("update/clip_share")
    limits = run.limits
    if cut is None or cut.now < max(limits.clip_min_share, limits.clip_growth * cut.start) or not cut.significant:
        return None
    return Finding(f"the clip cuts {percent(cut.now)} of the tokens; at the start {percent(cut.start)}", cut.evidence)


def sampler_mismatch(run: DetectorInput) -> Finding | None:
    """Detect a sampler whose log-probs differ from the trainer's."""
    metric = "sampler/mismatch_mean"
    limits = run.limits
    now, shift = run.now(metric), run.shift(metric)
    if now is not None and now > limits.mismatch_level:
        message = f"sampler and trainer differ by {now:.2g} nats per token; {limits.mismatch_level:g} is the limit"
        return Finding(message, run.level(metric, limit=limits.mismatch_level))
    if shift is None or shift.now < max(limits.mismatch_min, limits.mismatch_growth * shift.start):
        return None
    message = f"sampler and trainer differ by {shift.now:.2g} nats per token; at the start by {shift.start:.2g}"
    return Finding(message, shift.evidence)


Cause = tuple[str, str, tuple[str, ...]]  # its kind, in words, and the metrics that show it


def control(run: DetectorInput) -> Finding | None:
    """Detect entropy that stays below its band under trim: no leverage, a weight at its limit, a wrong prediction."""
    limits = run.limits
    names = (ENTROPY, "trim/target", "trim/drive")
    entropy, target, drive = (run.history.last(name, limits.control_steps) for name in names)
    level = run.now(ENTROPY)
    if not entropy or not target or not drive or level is None:
        return None
    low = [value < limits.control_below * goal for value, goal in zip(entropy, target, strict=True)]
    # Nearly all of them: single steps of a noisy entropy may touch the band.
    if fmean(low) < 0.9 or level >= limits.control_below * target[-1] or min(drive) <= 0:
        return None
    cause = _no_leverage(run) or _saturated(run) or _wrong_prediction(run)
    if cause is None:
        return None
    kind, words, metrics = cause
    where = f"entropy is {level:.3g}, below its target of {target[-1]:.3g} for {limits.control_steps} steps"
    evidence = {name: part for metric in (ENTROPY, *metrics) for name, part in run.level(metric).items()}
    return Finding(f"{where}, and {words}", {**evidence, "target": target[-1], "cause": kind}, CONTROL_ADVICE[kind])


def _no_leverage(run: DetectorInput) -> Cause | None:
    leverage = run.now("trim/leverage")
    mixed = run.now("groups/mixed_share")
    if mixed is not None and mixed < run.limits.control_mixed:
        words = f"trim has hardly any tokens to weigh: rewards differ in {percent(mixed)} of the groups"
        return "leverage", words, ("groups/mixed_share",)
    if leverage is not None and leverage < run.limits.control_leverage:
        return "leverage", f"trim has a leverage of {leverage:.2g}: no weights could steer it", ("trim/leverage",)
    return None


def _saturated(run: DetectorInput) -> Cause | None:
    share, weight = run.history.last("trim/saturated", run.limits.trend_steps), run.now("trim/weight")
    if not share or fmean(share) < 0.5 or weight is None:
        return None
    return "saturated", f"trim's weight is at its limit, {weight:.3g}", ("trim/saturated", "trim/weight")


def _wrong_prediction(run: DetectorInput) -> Cause | None:
    fit = run.now("trim/r2")
    gain = run.now("trim/gain")
    if fit is None or gain is None or (fit >= run.limits.control_r2 and gain > 0):
        return None
    words = f"its changes do not follow trim's prediction (R^2 {fit:.2g}, gain {gain:.2g})"
    return "theory", words, ("trim/r2", "trim/gain")
