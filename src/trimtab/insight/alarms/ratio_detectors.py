"""Detectors over ratios of probabilities: how far updates move the policy, and how far the sampler is from it."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean, median

from trimtab.insight.alarms.detector_input import LARGEST_LOG, DetectorInput, Finding, percent, slope, spread


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
    """Detect a sampler whose log-probs differ from the trainer's, or soon will by the trend of their difference."""
    metric = "sampler/mismatch_mean"
    limits = run.limits
    now, shift = run.now(metric), run.shift(metric)
    if now is not None and now > limits.mismatch_level:
        message = f"sampler and trainer differ by {now:.2g} nats per token; {limits.mismatch_level:g} is the limit"
        return Finding(message, run.level(metric, limit=limits.mismatch_level))
    if shift is None:
        return None
    if shift.now >= max(limits.mismatch_min, limits.mismatch_growth * shift.start):
        message = f"sampler and trainer differ by {shift.now:.2g} nats per token; at the start by {shift.start:.2g}"
        return Finding(message, shift.evidence)
    ahead = _rising_to(run, run.history.values(metric), limits.mismatch_rising_min, limits.mismatch_rising)
    if ahead is None or ahead < limits.mismatch_level or not shift.significant:
        return None
    return Finding(
        f"the difference of sampler and trainer grows: {shift.now:.2g} nats per token now, {shift.start:.2g} at the "
        f"start; going on like this it is {ahead:.2g} in {limits.forecast_steps} steps",
        {**shift.evidence, "forecast": {"steps": limits.forecast_steps, metric: ahead}},
    )


def effective_samples(run: DetectorInput) -> Finding | None:
    """Detect ratios of which a few hold most of the weight, or soon will, by their effective sample size."""
    return _few_samples(run, "sampler/effective_sample_share", "trainer / sampler") or _few_samples(
        run, "update/effective_sample_share_min", "new / old"
    )


def _few_samples(run: DetectorInput, metric: str, ratios: str) -> Finding | None:
    limits = run.limits
    now, shift = run.now(metric), run.shift(metric)
    words = f"the ratios {ratios} are worth {percent(now or 0.0)} of their tokens"
    if now is not None and now < limits.samples_level:
        return Finding(f"{words}; {percent(limits.samples_level)} is the limit", run.level(metric))
    if shift is None:
        return None
    fallen = 1 - shift.now >= max(limits.samples_min_loss, limits.samples_growth * (1 - shift.start))
    if fallen and shift.significant:
        return Finding(f"{words}; at the start {percent(shift.start)}", shift.evidence)
    lost = [1 - value for value in run.history.values(metric)]
    ahead = _rising_to(run, lost, limits.samples_rising_min, limits.samples_rising)
    if ahead is None or ahead < 1 - limits.samples_level or not shift.significant:
        return None
    return Finding(
        f"{words}; at the start {percent(shift.start)}, and going on like this less than "
        f"{percent(limits.samples_level)} in {limits.forecast_steps} steps",
        {**shift.evidence, "forecast": {"steps": limits.forecast_steps, metric: max(0.0, 1 - ahead)}},
    )


def _rising_to(run: DetectorInput, values: list[float], least: float, growth: float) -> float | None:
    """Extrapolate a rising series by its log-linear trend; None if it does not rise, or is below `least` or `growth`.

    `growth` is a factor compared with the start of the run.
    """
    limits = run.limits
    start, window = values[: limits.start_steps], values[-limits.trend_steps :]
    if len(values) < limits.start_steps + limits.trend_steps or min(window) <= 0:
        return None
    if median(window[-limits.recent_steps :]) < max(least, growth * median(start)):
        return None
    logs = [math.log(value) for value in window]
    rise = slope(logs)
    noise = spread([later - earlier for earlier, later in pairwise(logs)]) / math.sqrt(2)
    # Of noise the slope over 20 steps comes to 0.8 spreads.
    if rise * len(logs) <= limits.min_spreads / 2 * noise:
        return None
    ahead = fmean(logs[-limits.recent_steps :]) + rise * limits.forecast_steps
    return math.exp(min(ahead, LARGEST_LOG))
