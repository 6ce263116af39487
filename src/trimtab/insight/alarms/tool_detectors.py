"""Detectors over conversations with tools: calls that fail or vanish, void turns, and time spent waiting for tools."""

from __future__ import annotations

from trimtab.insight.alarms.detector_input import DetectorInput, Finding, percent


def failing_calls(run: DetectorInput) -> Finding | None:
    """Detect that most calls fail and the failures do not become fewer, or that many more fail than at the start."""
    found = _level_or_rise(run, "tools/failed_share", run.limits.failing_level, run.limits.failing_growth)
    return found and Finding(f"{found[0]} of the calls of tools fail{found[1]}", found[2])


def void_turns(run: DetectorInput) -> Finding | None:
    """Detect many conversations with a message without a call or an answer, or many more than at the start."""
    found = _level_or_rise(run, "conversation/void_share", run.limits.void_level, run.limits.void_growth)
    message = "of the conversations have a message with neither a call nor an answer"
    return found and Finding(f"{found[0]} {message}{found[1]}", found[2])


def _level_or_rise(
    run: DetectorInput, metric: str, level: float, growth: float
) -> tuple[str, str, dict[str, object]] | None:
    """Return the share now, the comparison in words and the evidence, where it is high or has risen."""
    shift = run.shift(metric)
    if shift is None:
        return None
    # A policy that has just been given tools learns within some steps how to call them.
    if shift.now > level and shift.now > shift.start - growth:
        return percent(shift.now), "", run.level(metric, limit=level)
    if shift.now - shift.start < growth or not shift.significant:
        return None
    return percent(shift.now), f"; at the start {percent(shift.start)}", shift.evidence


def calls_vanish(run: DetectorInput) -> Finding | None:
    """Detect a policy that stops using its tools: far fewer successful calls, without a gain in accuracy."""
    metric, limits = "conversation/called_share", run.limits
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
    metric, limit = "time/tools_wait_share", run.limits.tool_wait_share
    now = run.now(metric)
    if now is None or now <= limit:
        return None
    message = f"for {percent(now)} of the sampling time every conversation waits for a tool"
    return Finding(message, run.level(metric, limit=limit))
