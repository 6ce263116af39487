"""How a run is doing, in a line of words: is it learning, what is wrong, how long it will take, how fast it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.insight.report import summary_text
from trimtab.insight.report.run_files import RunFiles
from trimtab.insight.watch.watched_run import WatchedRun
from trimtab.text import clock, command, number, percent
from trimtab.trainer.train import TIMES, accuracy_change, nothing_to_learn

LATELY = 20  # steps that the words about the present are of
IDLE_STEPS = 10  # in a row without differing rewards: no signal
SATURATED = 0.5  # share of the late steps in which trim's weight was at its limit, as the alarm has it
SLOW = 0.5  # share of the time that something besides sampling and updates takes
ASIDE = ("time/tools", "time/agents", "time/grading", "time/evaluation", "time/checkpoint")
WHOLE_STEP = ("time/rollout", "time/update", "time/evaluation", "time/checkpoint")
GPU_MEMORY = "memory/gpu_peak_gb"
PHASES = {"sampling": "time/sampling", "scoring": "time/scoring", "updates": "time/update"}
STATES = {
    "loading": "No step yet: the model is being loaded, or warmed up",
    "running": "Running",
    "finished": "Finished",
    "stopped": "Stopped, with its last step saved",
    "failed": "Ended without saving its last step",
    "quiet": "No new line has come lately; whether the run goes on is not known",
}


@dataclass(frozen=True)
class Status:
    """`kind` is good, bad, warn or plain; `words` say how it is doing, `figures` are names and values."""

    state: str
    headline: str
    kind: str
    words: str
    ended: bool
    step: int
    steps: int | None
    figures: list[dict[str, str]]


def status_json(run: WatchedRun) -> dict[str, Any]:
    """Return the status for the page."""
    return asdict(status(run))


def status(run: WatchedRun) -> Status:
    """Return how a run is doing now."""
    with run.lock:
        state = run.state()
        planned = run.planned_steps()
        late = [record for record in run.recent if record["step"] > 0][-LATELY:]
        kind, words = _judged(run, late)
        headline = STATES[state]
        if run.lines:
            headline += f": step {run.last_step:,}{f' of {planned:,}' if planned else ''}"
        left = _seconds_left(late, run.last_step, planned) if state == "running" else None
        headline += f", about {clock(left)} left" if left is not None else ""
        if state in ("stopped", "failed") and planned and run.lines:
            words += f" Go on with `{command('train', '--resume', run.path)}`."
        ended = state in ("finished", "stopped", "failed")
        return Status(state, headline, kind, words.strip(), ended, run.last_step, planned, _figures(late))


def _judged(run: WatchedRun, late: Sequence[dict[str, float]]) -> tuple[str, str]:
    """Return the judgement, which is made once for each new line: it is asked for twice a second."""
    now = (run.generation, run.lines)
    if run.judged is None or run.judged[0] != now:
        run.judged = (now, _judgement(run, late))
    return run.judged[1]


def _judgement(run: WatchedRun, late: Sequence[dict[str, float]]) -> tuple[str, str]:
    """Return the most important thing to say, from what is certain to what is a hint, and what the run waits for."""
    if not run.lines:
        return "plain", "Nothing has been measured yet."
    slow = _slow(late)
    found = run.collapse.found
    if found is not None:
        return "bad", f"It {found.words}. {slow}"
    if late and all("update/skipped" in each and "update/loss" not in each for each in late[-3:]):
        return "bad", f"No update is finite: lower update.lr. {slow}"
    if run.idle_steps >= IDLE_STEPS:
        advice = "" if run.had_mixed else nothing_to_learn([{"groups/mixed_share": 0.0}])
        since = f"No signal: rewards have not differed within any group for {run.idle_steps:,} steps."
        return "bad", f"{since} {advice} {slow}"
    saturated = [each["trim/saturated"] for each in late if "trim/saturated" in each]
    if saturated and sum(saturated) / len(saturated) >= SATURATED:
        weight = late[-1].get("trim/weight")
        return "warn", f"The entropy control is saturated: trim's weight is at its limit, {number(weight)}. {slow}"
    kind, words = _learning(run.files())
    return ("warn" if slow and kind == "plain" else kind), f"{words} {slow}"


def _learning(files: RunFiles) -> tuple[str, str]:
    """Return whether held-out accuracy or, without two evaluations, the reward has risen by more than chance."""
    curve = files.curves.get("eval/accuracy")
    problems = summary_text.held_out_problems(files)
    if curve is not None and len(curve.values) > 1 and problems:
        first, last = float(curve.values[0]), float(curve.values[-1])
        if 0 <= first <= 1 and 0 <= last <= 1:
            change = accuracy_change(first, last, problems)
            went = f"from {percent(first)} to {percent(last)} of {problems:,} problems ({change.words})"
            if change.certain:
                rose = change.difference > 0
                words = f"Learning: held-out accuracy rose {went}." if rose else f"Held-out accuracy fell {went}."
                return ("good" if rose else "bad"), words
    reward = files.curves.get("reward/mean")
    if reward is None or len(reward.values) < 2:
        return "plain", "It is too early to say whether it learns."
    first, last = summary_text.start_and_end(reward)
    if abs(last - first) <= summary_text.noise(reward):
        return "plain", f"Not learning visibly yet: the mean reward is {number(last)}, at the start {number(first)}."
    if last > first:
        return "good", f"Learning: the mean reward rose from {number(first)} to {number(last)}."
    return "warn", f"The mean reward fell from {number(first)} to {number(last)}."


def _slow(late: Sequence[dict[str, float]]) -> str:
    """Say what the run waits for if that takes most of its time, besides sampling and updates."""
    totals = {name: sum(record.get(name, 0.0) for record in late) for name in TIMES}
    whole = sum(totals.values())
    for name in ASIDE:
        if whole > 0 and totals[name] > SLOW * whole:
            return f"Slow because of {TIMES[name]}, which takes {percent(totals[name] / whole)} of the time."
    return ""


def _seconds_left(late: Sequence[dict[str, float]], step: int, planned: int | None) -> float | None:
    seconds = [sum(record.get(name, 0.0) for name in WHOLE_STEP) for record in late]
    if planned is None or planned <= step or not seconds or not sum(seconds):
        return None
    return sum(seconds) / len(seconds) * (planned - step)


def _figures(late: Sequence[dict[str, float]]) -> list[dict[str, str]]:
    """Return seconds of a step, tokens per second of each phase, and the GPU's memory, over the late steps."""
    rows = []
    tokens = sum(record.get("tokens/count", 0.0) for record in late)
    spent = {word: sum(record.get(name, 0.0) for record in late) for word, name in PHASES.items()}
    whole = sum(record.get(name, 0.0) for record in late for name in WHOLE_STEP)
    if late and whole > 0:
        rows.append({"name": "seconds of a step", "value": f"{whole / len(late):.3g}"})
        if tokens:
            rows.append({"name": "tokens/s", "value": f"{tokens / whole:,.0f}"})
    for word, seconds in spent.items():
        if tokens and seconds > 0:
            rows.append({"name": f"tokens/s, {word}", "value": f"{tokens / seconds:,.0f}"})
    if late and GPU_MEMORY in late[-1]:
        rows.append({"name": "GPU memory, most so far", "value": f"{late[-1][GPU_MEMORY]:.1f} GB"})
    return rows
