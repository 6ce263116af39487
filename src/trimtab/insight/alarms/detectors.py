"""Detectors over the policy and its updates, over responses and rewards, and over conversations with tools."""

from __future__ import annotations

import math
from statistics import fmean, median

from trimtab.insight.alarms.detector_input import LARGEST_LOG, DetectorInput, Finding, percent, slope
from trimtab.trainer.train import TOP_GRADIENT_SHARE, TOP_GRADIENT_TOKENS

ENTROPY = "policy/entropy"
AGENT_FAILURES = ("agent/failed_share", "agent/timeout_share")
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


def no_signal(run: DetectorInput) -> Finding | None:
    """Detect that rewards differ in too few groups, or in far fewer than at the start, without a gain in accuracy."""
    metric = "groups/mixed_share"
    limits = run.limits
    shift = run.shift(metric)
    right = run.now(run.accuracy)
    # Before there is a start to compare with, few such groups are the usual start of a hard task.
    if shift is None:
        return None
    how = "" if right is None else f" (mean {run.accuracy.partition('/')[2]} {right:.2f})"
    if shift.now < limits.signal_min_share and not _learned(run, right):
        message = f"only {percent(shift.now)} of the groups have any spread in reward{how}"
        return Finding(message, run.level(metric, limit=limits.signal_min_share))
    # Fewer mixed groups are welcome if more problems are solved.
    if shift.now > limits.signal_fall * shift.start or not shift.significant or run.gain() > 0:
        return None
    message = f"{percent(shift.now)} of the groups have spread in reward{how}; at the start {percent(shift.start)}"
    return Finding(message, shift.evidence)


def _learned(run: DetectorInput, right: float | None) -> bool:
    """Return whether most responses are right, and more than at the start."""
    if right is None:
        return False
    share = right if run.accuracy == "reward/accuracy" else run.scaled(right)
    return share >= run.limits.signal_right and run.gain() > 0


def rule_errors(run: DetectorInput) -> Finding | None:
    """Detect rules that fail: an exception, an invalid result, or a service that does not answer."""
    metric = "reward/crashed_share"
    limit = run.limits.crashed_share
    # Only the newest step: this figure is not noisy, and every step with errors teaches less.
    newest = run.history.last(metric, 1)
    if not newest:
        return None
    failed = newest[0] - _lost_rollouts(run)  # an agent has an alarm of its own
    if failed <= limit:
        return None
    message = f"rules failed on {percent(failed)} of the responses, which are not graded"
    return Finding(message, {metric: {"now": newest[0], "limit": limit}})


def truncation(run: DetectorInput) -> Finding | None:
    """Detect many truncated responses that do not become fewer, or many more than at the start."""
    limits = run.limits
    # An untrained model learns to end its responses within some steps.
    words = "of the responses are cut off"
    return _high_or_risen(run, "response/truncated_share", words, limits.truncated_level, limits.truncated_growth)


def repetition(run: DetectorInput) -> Finding | None:
    """Detect responses that repeat themselves more than at the start."""
    repeats = run.shift("response/repetition_share")
    limits = run.limits
    if repeats is None or repeats.now - repeats.start < limits.repetition_growth or not repeats.significant:
        return None
    message = f"{percent(repeats.now)} of all 4-grams repeat the same response; at the start {percent(repeats.start)}"
    return Finding(message, repeats.evidence)


def length_drift(run: DetectorInput) -> Finding | None:
    """Detect responses that are much longer or shorter than at the start, without a gain in accuracy."""
    length = run.shift("response/length_mean")
    limits = run.limits
    if length is None or length.start <= 0:
        return None
    factor = length.now / length.start
    if 1 / limits.length_factor < factor < limits.length_factor or not length.significant:
        return None
    # Longer reasoning that is more often right is what training is for.
    if run.gain() >= limits.length_gain:
        return None
    return Finding(
        f"responses have {length.now:.3g} tokens, {factor:.2g} times the {length.start:.3g} at the start, for no gain",
        {**length.evidence, "gain": run.gain()},
    )


def reward_hacking(run: DetectorInput) -> Finding | None:
    """Detect a reward that rises while held-out accuracy does not, or that jumps together with length or entropy."""
    # The sum of several rewards rises with any of them, a format that is learnt for example.
    several = bool(run.history.values("rewards/task"))
    by_sum = None if several else _held_out_lags(run, "reward/mean")
    return _held_out_lags(run, "reward/score") or _held_out_lags(run, "reward/accuracy") or by_sum or _jumps(run)


def _held_out_lags(run: DetectorInput, metric: str) -> Finding | None:
    reward = run.shift(metric)
    held_out = run.held_out()
    limits = run.limits
    # A share of right answers and a mean of a rule's numbers are not on one scale.
    if reward is None or held_out is None or (metric == "reward/accuracy" and run.held_out_metric == "eval/score"):
        return None
    now, start = reward.now, reward.start
    if metric != "reward/accuracy":
        now, start = run.scaled(now), run.scaled(start)
    # A reward below held-out accuracy is not hacking: sampled accuracy catches up with greedy accuracy.
    rise, followed = now - start, held_out[1] - held_out[0]
    if rise < limits.hacking_rise or followed > limits.hacking_follow * rise or now < held_out[1]:
        return None
    return Finding(
        f"{metric} rose from {reward.start:.2f} to {reward.now:.2f} while held-out {run.held_out_word} went from "
        f"{held_out[0]:.2f} to {held_out[1]:.2f}",
        {**reward.evidence, run.held_out_metric: {"now": held_out[1], "start": held_out[0]}},
    )


def _jumps(run: DetectorInput) -> Finding | None:
    """Detect a reward that jumps within the trend window, with length or entropy."""
    # For runs that are evaluated seldom: an exploit is found within a few steps and changes the style of responses.
    limits = run.limits
    names = (run.accuracy, "response/length_mean", "policy/entropy")
    windows = [run.history.last(name, limits.trend_steps) for name in names]
    if not all(windows):
        return None
    reward, length, entropy = now = [median(window[-limits.recent_steps :]) for window in windows]
    reward_before, length_before, entropy_before = before = [
        median(window[: limits.recent_steps]) for window in windows
    ]
    rise = reward - reward_before
    began = run.start(run.accuracy)
    # A reward that comes back after a fall is not hacked.
    if began and reward <= median(began):
        return None
    if rise < limits.jump_rise or run.held_out_rise(limits.trend_steps) >= limits.hacking_follow * rise:
        return None
    longer = abs(length / max(length_before, 1e-9) - 1)
    fallen = 1 - entropy / max(entropy_before, 1e-9)
    if longer < limits.jump_length and fallen < limits.jump_entropy:
        return None
    return Finding(
        f"within {limits.trend_steps} steps {run.accuracy} jumped from {reward_before:.2f} to {reward:.2f}, length "
        f"from {length_before:.3g} to {length:.3g} and entropy from {entropy_before:.3g} to {entropy:.3g}",
        {name: {"now": a, "before": b} for name, a, b in zip(names, now, before, strict=True)},
    )


def reward_drop(run: DetectorInput) -> Finding | None:
    """Detect sampled or held-out accuracy that is far below its best value."""
    limits = run.limits
    # The best is a median over the longer window, so that a lucky streak is not the yardstick.
    now, best = run.now(run.accuracy), run.history.best(run.accuracy, limits.start_steps)
    began = run.start(run.accuracy)
    best = max(best, median(began)) if began else best
    if now is not None and _is_drop(run, run.accuracy, now, best):
        message = f"{run.accuracy} is {now:.2f}; its best was {best:.2f}"
        return Finding(message, {run.accuracy: {"now": now, "best": best}})
    held_out = run.held_out()
    if held_out is None:
        return None
    start, now = held_out
    metric = run.held_out_metric
    best = max(start, run.history.best(metric, 2))
    if not _is_drop(run, metric, now, best):
        return None
    message = f"held-out {run.held_out_word} is {now:.2f}; its best was {best:.2f}"
    return Finding(message, {metric: {"now": now, "best": best}})


def _is_drop(run: DetectorInput, metric: str, now: float, best: float) -> bool:
    # Relative, absolute and against the noise: accuracies near 0 or on 30 problems vary by themselves.
    limits = run.limits
    noise = run.history.noise(metric)
    return now < limits.drop_share * best and best - now > max(limits.drop_min, limits.drop_noise * noise)


def collapse(run: DetectorInput) -> Finding | None:
    """Detect a run that has collapsed, by the definition in `trimtab.record`: lost, stuck, emptied or not finite."""
    found = run.collapse.found
    if found is None:
        return None
    return Finding(found.words, {"criterion": found.kind, "step": found.step})


def failing_calls(run: DetectorInput) -> Finding | None:
    """Detect that most calls fail and the failures do not become fewer, or that many more fail than at the start."""
    # A policy that has just been given tools learns within some steps how to call them.
    words = "of the calls of tools fail"
    return _high_or_risen(run, "tools/failed_share", words, run.limits.failing_level, run.limits.failing_growth)


def void_turns(run: DetectorInput) -> Finding | None:
    """Detect many conversations with a message without a call or an answer, or many more than at the start."""
    words = "of the conversations have a message with neither a call nor an answer"
    return _high_or_risen(run, "conversation/void_share", words, run.limits.void_level, run.limits.void_growth)


def _high_or_risen(run: DetectorInput, metric: str, words: str, level: float, growth: float) -> Finding | None:
    """Detect a share above `level` that does not fall by `growth`, or one that has risen by `growth`."""
    shift = run.shift(metric)
    if shift is None:
        return None
    if shift.now > level and shift.now > shift.start - growth:
        return Finding(f"{percent(shift.now)} {words}", run.level(metric, limit=level))
    if shift.now - shift.start < growth or not shift.significant:
        return None
    return Finding(f"{percent(shift.now)} {words}; at the start {percent(shift.start)}", shift.evidence)


def calls_vanish(run: DetectorInput) -> Finding | None:
    """Detect a policy that stops using its tools: far fewer successful calls, without a gain in accuracy."""
    metric = "conversation/called_share"
    limits = run.limits
    shift = run.shift(metric)
    if shift is None or shift.start < limits.vanish_min_start or not shift.significant:
        return None
    # One that has learned to do without them is what some tasks are for.
    if shift.now > limits.vanish_level * shift.start or run.has_learned():
        return None
    message = f"{percent(shift.now)} of the conversations have a successful call; at the start {percent(shift.start)}"
    return Finding(message, shift.evidence)


def agent(run: DetectorInput) -> Finding | None:
    """Detect an agent that goes on failing, or taking too long."""
    limit = run.limits.agent_failed_share
    lost = _lost_rollouts(run)
    if lost <= limit:
        return None
    found = {metric: {"now": run.history.last(metric, 1)[0], "limit": limit} for metric in AGENT_FAILURES}
    failed, late = (found[metric]["now"] for metric in AGENT_FAILURES)
    return Finding(f"the agent failed in {percent(failed)} of the rollouts, and {percent(late)} took too long", found)


def _lost_rollouts(run: DetectorInput) -> float:
    """Return the share of the newest step's rollouts in which an agent failed or took too long."""
    return sum(sum(run.history.last(metric, 1)) for metric in AGENT_FAILURES)


def tool_wait(run: DetectorInput) -> Finding | None:
    """Detect that sampling is idle much of the time, because every conversation waits for a tool."""
    metric = "time/tools_wait_share"
    limit = run.limits.tool_wait_share
    now = run.now(metric)
    if now is None or now <= limit:
        return None
    message = f"for {percent(now)} of the sampling time every conversation waits for a tool"
    return Finding(message, run.level(metric, limit=limit))
