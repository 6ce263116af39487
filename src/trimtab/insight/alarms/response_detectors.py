"""Detectors of what responses and rewards do: signal, truncation, repetition, length, hacking, and plain decline."""

from __future__ import annotations

from statistics import median

from trimtab.insight.alarms.detector_input import Finding, View, percent


def no_signal(view: View) -> Finding | None:
    """Too few groups whose rewards differ, or far fewer than at the start for no gain."""
    metric, limits = "groups/mixed_share", view.limits
    mixed, shift, right = view.now(metric), view.shift(metric), view.now(view.accuracy)
    how = "" if right is None else f" (mean {view.accuracy.partition('/')[2]} {right:.2f})"
    if mixed is not None and mixed < limits.signal_least:
        return Finding(
            f"only {percent(mixed)} of the groups have any spread in reward{how}",
            view.level(metric, limit=limits.signal_least),
        )
    if shift is None or shift.now > limits.signal_fall * shift.start or not shift.sure(limits.sure) or view.gain() > 0:
        return None
    return Finding(
        f"{percent(shift.now)} of the groups have spread in reward{how}; at the start {percent(shift.start)}",
        shift.evidence,
    )


def truncation(view: View) -> Finding | None:
    """Many responses cut off, or many more than at the start."""
    metric, limits = "response/truncated_share", view.limits
    now, shift = view.now(metric), view.shift(metric)
    if now is not None and now > limits.truncated_level:
        return Finding(f"{percent(now)} of the responses are cut off", view.level(metric, limit=limits.truncated_level))
    if shift is None or shift.now - shift.start < limits.truncated_growth or not shift.sure(limits.sure):
        return None
    return Finding(
        f"{percent(shift.now)} of the responses are cut off; at the start {percent(shift.start)}", shift.evidence
    )


def repetition(view: View) -> Finding | None:
    """Responses that repeat themselves more than at the start."""
    repeats, limits = view.shift("response/repetition_share"), view.limits
    if repeats is None or repeats.now - repeats.start < limits.repetition_growth or not repeats.sure(limits.sure):
        return None
    return Finding(
        f"{percent(repeats.now)} of all 4-grams repeat the same response; at the start {percent(repeats.start)}",
        repeats.evidence,
    )


def length_drift(view: View) -> Finding | None:
    """Responses of another length than at the start, without more of them being right."""
    length, limits = view.shift("response/length_mean"), view.limits
    if length is None or length.start <= 0:
        return None
    factor = length.now / length.start
    if 1 / limits.length_factor < factor < limits.length_factor or not length.sure(limits.sure):
        return None
    if view.gain() >= limits.length_gain:
        return None
    return Finding(
        f"responses have {length.now:.3g} tokens, {factor:.2g} times the {length.start:.3g} at the start, for no gain",
        {**length.evidence, "gain": view.gain()},
    )


def reward_hacking(view: View) -> Finding | None:
    """A reward that rises while held-out accuracy does not, or that jumps while responses change their nature."""
    return _left_behind(view, "reward/accuracy") or _left_behind(view, "reward/mean") or _jumped(view)


def _left_behind(view: View, metric: str) -> Finding | None:
    reward, held_out, limits = view.shift(metric), view.held_out(), view.limits
    if reward is None or held_out is None:
        return None
    now, start = reward.now, reward.start
    if metric == "reward/mean":
        now, start = view.scaled(now), view.scaled(start)
    rise, followed = now - start, held_out[1] - held_out[0]
    if rise < limits.hacking_rise or followed > limits.hacking_follow * rise or now < held_out[1]:
        return None
    return Finding(
        f"{metric} rose from {reward.start:.2f} to {reward.now:.2f} while held-out accuracy went from "
        f"{held_out[0]:.2f} to {held_out[1]:.2f}",
        {**reward.evidence, "eval/accuracy": {"now": held_out[1], "start": held_out[0]}},
    )


def _jumped(view: View) -> Finding | None:
    """The reward jumps within a window, and length or entropy jumps with it."""
    limits = view.limits
    names = (view.accuracy, "response/length_mean", "policy/entropy")
    windows = [view.history.last(name, limits.trend) for name in names]
    if not all(windows):
        return None
    (reward, reward_before), (length, length_before), (entropy, entropy_before) = (
        (median(window[-limits.recent :]), median(window[: limits.recent])) for window in windows
    )
    if reward - reward_before < limits.jump_rise:
        return None
    longer = abs(length / max(length_before, 1e-9) - 1)
    fallen = 1 - entropy / max(entropy_before, 1e-9)
    if longer < limits.jump_length and fallen < limits.jump_entropy:
        return None
    return Finding(
        f"within {limits.trend} steps {view.accuracy} jumped from {reward_before:.2f} to {reward:.2f}, length from "
        f"{length_before:.3g} to {length:.3g} and entropy from {entropy_before:.3g} to {entropy:.3g}",
        {
            name: {"now": now, "before": before}
            for name, now, before in zip(
                names, (reward, length, entropy), (reward_before, length_before, entropy_before), strict=True
            )
        },
    )


def reward_drop(view: View) -> Finding | None:
    """Accuracy, by the verifier or held out, well below the best it has been."""
    limits = view.limits
    now, best = view.now(view.accuracy), view.history.best(view.accuracy, limits.start)
    if now is not None and _dropped(view, view.accuracy, now, best):
        return Finding(
            f"{view.accuracy} is {now:.2f}; its best was {best:.2f}", {view.accuracy: {"now": now, "best": best}}
        )
    metric = "eval/accuracy"
    held_out = view.held_out()
    if held_out is None:
        return None
    best = max(held_out[0], view.history.best(metric, 2))
    if not _dropped(view, metric, held_out[1], best):
        return None
    return Finding(
        f"held-out accuracy is {held_out[1]:.2f}; its best was {best:.2f}",
        {metric: {"now": held_out[1], "best": best}},
    )


def _dropped(view: View, metric: str, now: float, best: float) -> bool:
    limits, noise = view.limits, view.history.noise(metric)
    return now < limits.drop_share * best and best - now > max(limits.drop_least, limits.drop_sure * noise)
