"""A run in a few sentences, and the headline numbers of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from trimtab.insight.report.curve_store import MetricCurve
from trimtab.insight.report.embed import truncated
from trimtab.insight.report.run_files import RunFiles
from trimtab.own_parts import is_own
from trimtab.record import COLLAPSE_METRICS, find_fall, merge_curves
from trimtab.text import clock, number, percent
from trimtab.trainer.config import Config, parse_stored
from trimtab.trainer.train import (
    accuracy_change,
    describe_model,
    describe_task,
    silencing_advice,
    time_words,
    window_length,
)

_UNCHANGED = 0.02  # a smaller relative change counts as none
MOST_NAMED = 10  # alarms that the summary names


def title_of(run: RunFiles) -> str:
    """Return model, task and objective in one line."""
    config = config_of(run)
    table = run.config.get("task")
    name = table.get("name") if isinstance(table, dict) else None
    # A task of the user's own is not loaded to describe it.
    task = str(name) if is_own(name) else describe_task(config) if config else ""
    model_and_task = f"{describe_model(config)} on {task} with " if config else ""
    return truncated(f"{model_and_task}{run.label}", 300)


def config_of(run: RunFiles) -> Config | None:
    """Return the parsed configuration; None if it is not one of trimtab."""
    try:
        return parse_stored(run.config) if run.config else None
    except (ValueError, LookupError, TypeError):
        return None


def summary(run: RunFiles) -> list[str]:
    """Return the result of the run in sentences, for someone new to trimtab."""
    if not run.curves:
        return ["Nothing was measured in this run, so there is nothing to say about how it went."]
    topics = (_length, _accuracy, _score, _collapse, _reward, _tools, _entropy, _tokens, _problems)
    return [sentence for topic in topics for sentence in topic(run)]


def tiles(run: RunFiles) -> list[dict[str, str]]:
    """Return the headline numbers: a name, a value, and the value it started from."""
    # The last column is the window of `start_and_end`; -1 takes the mean over the run.
    rows: list[tuple[str, str, Callable[[float], str], int]] = [
        ("held-out accuracy", "eval/accuracy", percent, 1),
        ("held-out score", "eval/score", number, 1),
        ("reward", "reward/mean", number, 0),
        ("called a tool", "conversation/called_share", percent, 0),
        ("entropy, nats", "policy/entropy", number, 0),
        ("silenced", "tokens/silenced_share", percent, -1),
        ("boosted", "tokens/boosted_share", percent, -1),
        ("clipped", "update/clip_share", percent, -1),
        ("response length", "response/length_mean", lambda value: number(value, 1), 0),
    ]
    shown = []
    for name, metric, write, window in rows:
        if metric in run.curves and window == -1:
            mean = float(run.curves[metric].values.mean(dtype="f8"))
            shown.append({"name": name, "value": write(mean), "from": "of all tokens"})
        elif metric in run.curves:
            first, last = start_and_end(run.curves[metric], window)
            shown.append({"name": name, "value": write(last), "from": f"from {write(first)}"})
    return shown


def _length(run: RunFiles) -> Iterator[str]:
    config = config_of(run)
    wanted = f" of {config.run.steps:,}" if config else ""
    times = [run.curves[name].values for name in ("time/rollout", "time/update") if name in run.curves]
    seconds = sum(float(values.sum(dtype="f8")) for values in times)
    spent = f", {clock(seconds)} of sampling and updates" if seconds else ""
    tokens = run.curves.get("tokens/count")
    seen = f", {float(tokens.values.sum(dtype='f8')):,.0f} response tokens" if tokens else ""
    steps = max((int(curve.steps[-1]) for curve in run.curves.values()), default=0)
    yield f"The run took {steps:,}{wanted} steps{seen}{spent}."
    totals = {name: float(curve.values.sum(dtype="f8")) for name, curve in run.curves.items()}
    if divided := time_words([totals]):
        yield f"Its time: {divided}."


def _accuracy(run: RunFiles) -> Iterator[str]:
    curve = run.curves.get("eval/accuracy")
    if curve is None:
        yield "It was never tested on held-out problems."
    elif len(curve.values) == 1:
        yield f"Held-out accuracy was {percent(float(curve.values[0]))}; it was measured only once."
    else:
        first, last = start_and_end(curve, 1)
        yield _accuracy_change(run, first, last)


def _score(run: RunFiles) -> Iterator[str]:
    curve = run.curves.get("eval/score")
    if curve is not None and len(curve.values) > 1:
        first, last = map(number, start_and_end(curve, 1))
        yield f"The mean score on held-out problems went from {first} to {last}."


def _accuracy_change(run: RunFiles, first: float, last: float) -> str:
    problems = held_out_problems(run)
    went = f"from {percent(first)} to {percent(last)}"
    if problems is None or not (0 <= first <= 1 and 0 <= last <= 1):
        return f"Held-out accuracy {_moved(first, last)} {went}."
    change = accuracy_change(first, last, problems)
    if change.certain:
        return f"Held-out accuracy {_moved(first, last)} {went} of {problems:,} problems ({change.words})."
    return f"Held-out accuracy went {went} of {problems:,} problems: no more than chance may do ({change.words})."


def held_out_problems(run: RunFiles) -> int | None:
    """Return how many problems an evaluation of the run has; None if that is not known."""
    fewer = run.curves.get("eval/problems")
    config = config_of(run)
    if fewer is not None and fewer.values[-1] >= 1:
        return int(fewer.values[-1])
    return None if config is None else config.run.eval_problems


def _collapse(run: RunFiles) -> Iterator[str]:
    found = {name: run.curves[name] for name in COLLAPSE_METRICS if name in run.curves}
    pairs = {n: zip(c.steps.tolist(), c.values.tolist(), strict=True) for n, c in found.items()}
    fall = find_fall(merge_curves(pairs))
    if fall is not None:
        config = config_of(run)
        was = f" (it was {config.update.lr:g})" if config else ""
        yield f"It {fall.words}."
        yield f"Go back to a checkpoint before step {fall.step:,}, or train again, with a lower update.lr{was}."
    elif "eval/accuracy" in run.curves or "reward/accuracy" in run.curves:
        yield "It did not collapse."


def _reward(run: RunFiles) -> Iterator[str]:
    curve = run.curves.get("reward/mean")
    if curve is not None:
        first, last = start_and_end(curve)
        yield f"The mean reward {_moved(first, last, noise(curve))} from {number(first)} to {number(last)}."


def _tools(run: RunFiles) -> Iterator[str]:
    called = run.curves.get("conversation/called_share")
    if called is None:
        return
    first, last = map(percent, start_and_end(called))
    yield f"A successful call of a tool was in {first} of the conversations at the start and in {last} at the end."
    totals = [
        float(run.curves[name].values.sum(dtype="f8")) for name in ("tools/calls", "tools/ok") if name in run.curves
    ]
    if len(totals) == 2 and totals[0] > 0:
        yield f"Of all calls, {percent(max(1 - totals[1] / totals[0], 0.0))} failed."


def _entropy(run: RunFiles) -> Iterator[str]:
    curve = run.curves.get("policy/entropy")
    if curve is None:
        return
    first, last = start_and_end(curve)
    # Below 0.05 nats nearly every token has a probability above 0.99.
    low = " Near zero, the model hardly explores any more." if last < 0.05 else ""
    moved = _moved(first, last, noise(curve))
    yield f"The policy's entropy {moved} from {number(first)} to {number(last)} nats per token.{low}"


def _tokens(run: RunFiles) -> Iterator[str]:
    metrics = {name: f"tokens/{name}_share" for name in ("silenced", "boosted", "damped", "masked", "dropped")}
    metrics["clipped"] = "update/clip_share"
    shares = {
        name: float(run.curves[metric].values.mean(dtype="f8"))
        for name, metric in metrics.items()
        if metric in run.curves
    }
    clauses = [f"{_one_in(share) if share else 'none'} was {name}" for name, share in shares.items()]
    if clauses:
        yield f"Of the tokens, {', '.join(clauses)}."
    if "s2t/candidate_share" in run.curves:
        said, sweep = silencing_advice(shares.get("silenced"), run.objective, "RUN" if run.records is not None else "")
        yield from ([f"{said} `{sweep}`." if sweep else said] if said else [])


def _problems(run: RunFiles) -> Iterator[str]:
    if run.alarms:
        first = run.alarms[0]
        count = "One alarm was" if len(run.alarms) == 1 else f"{len(run.alarms)} alarms were"
        yield f"{count} raised, the first at step {first.step}: {first.alarm}."
        later = {alarm.alarm: alarm.step for alarm in reversed(run.alarms) if alarm.alarm != first.alarm}
        if later:
            named = [f"{name} (step {step})" for name, step in sorted(later.items(), key=lambda each: each[1])]
            yield f"Then rang {', '.join(named[:MOST_NAMED])}{' and others' if len(named) > MOST_NAMED else ''}."
    if run.skipped_updates:
        times = "Once an update was" if run.skipped_updates == 1 else f"{run.skipped_updates} updates were"
        yield f"{times} not taken because something was not finite."


def start_and_end(curve: MetricCurve, window: int = 0) -> tuple[float, float]:
    """Return the first value and the mean over the last `window`; 0 stands for a quarter of the run at most."""
    # The first is of the model before any update. A mean over the first steps would hide that a run broke in them.
    count = window or window_length(len(curve.values))
    return float(curve.values[0]), float(curve.values[-count:].mean(dtype="f8"))


def noise(curve: MetricCurve) -> float:
    """Return by how much a single step may be off by chance: two standard deviations, of the changes between steps."""
    values = curve.values.astype("f8")
    return 2 * 1.4826 / math.sqrt(2) * float(np.median(np.abs(np.diff(values)))) if len(values) > 1 else 0.0


def _moved(first: float, last: float, noise: float = 0.0) -> str:
    if abs(last - first) <= max(_UNCHANGED * max(abs(first), 1e-9), noise):
        return "hardly moved,"
    return "rose" if last > first else "fell"


def _one_in(share: float) -> str:
    # "One in 3" would hide the difference between 0.3 and 0.4.
    return percent(share) if share >= 0.1 else f"one in {round(1 / share):,}"


def facts(run: RunFiles) -> list[dict[str, Any]]:
    """Return names and values that describe a run, one per line."""
    steps = len(run.records.steps) if run.records else 0
    rows = [
        ("objective", run.label),
        ("seed", run.seed),
        ("last step", run.last_step or None),
        ("recorded steps", steps or None),
        ("versions", ", ".join(f"{k} {v}" for k, v in run.records.manifest.versions.items()) if run.records else None),
    ]
    return [{"name": name, "value": truncated(str(value), 300)} for name, value in rows if value not in (None, "")]
