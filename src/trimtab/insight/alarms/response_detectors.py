"""Detectors over responses, rewards, and conversations with tools."""

from __future__ import annotations

from statistics import median

from trimtab.insight.alarms.detector_input import DetectorInput, Finding, percent


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
    if not newest or newest[0] <= limit:
        return None
    message = f"rules failed on {percent(newest[0])} of the responses, which are not graded"
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


def tool_wait(run: DetectorInput) -> Finding | None:
    """Detect that sampling is idle much of the time, because every conversation waits for a tool."""
    metric = "time/tools_wait_share"
    limit = run.limits.tool_wait_share
    now = run.now(metric)
    if now is None or now <= limit:
        return None
    message = f"for {percent(now)} of the sampling time every conversation waits for a tool"
    return Finding(message, run.level(metric, limit=limit))
