"""Detection, lead time and false alarms over the runs of the suite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from alarm_suite import MEANT, SCENARIOS, TUNING
from trimtab.insight.alarms import ALARM_KINDS, read_metrics, replay_run
from trimtab.record import find_collapse


@dataclass(frozen=True)
class RunOutcome:
    """A run: when and how it collapsed, and which alarms rang."""

    scenario: str
    seed: int
    steps: int
    collapse: int | None
    how: str
    rung: list[tuple[int, str, str]]

    def first(self, alarm: str | None = None) -> int | None:
        """Return the step at which an alarm (None: any) rang first."""
        return min((step for step, name, _ in self.rung if alarm in (None, name)), default=None)

    def lead(self, alarm: str | None = None) -> int | None:
        """Return the steps from the first ring to the collapse; None without both, or if the ring came later."""
        first = self.first(alarm)
        if first is None or self.collapse is None or first >= self.collapse:
            return None
        return self.collapse - first


def read_run(folder: Path, scenario: str, seed: int) -> RunOutcome:
    """Read a run of the suite and replay its alarms."""
    records = read_metrics(folder / "metrics.jsonl")
    collapse = find_collapse(records)
    rung = [(alarm.step, alarm.alarm, alarm.message) for alarm in replay_run(folder)]
    at, how = (collapse.step, collapse.kind) if collapse else (None, "")
    return RunOutcome(scenario, seed, int(records[-1]["step"]), at, how, rung)


def figures(runs: Sequence[RunOutcome], seeds: Sequence[int]) -> dict[str, Any]:
    """Return the tables as plain data."""
    faulty = [run for run in runs if not SCENARIOS[run.scenario].healthy]
    healthy = [run for run in runs if SCENARIOS[run.scenario].healthy]
    steps = sum(run.steps for run in healthy)
    return {
        "seeds": list(seeds),
        "tuned_on": list(TUNING),
        "healthy_runs": len(healthy),
        "healthy_collapsed": sum(run.collapse is not None for run in healthy),
        "healthy_steps": steps,
        "false_alarms": sum(len(run.rung) for run in healthy),
        "healthy_runs_with_alarms": sum(bool(run.rung) for run in healthy),
        "faults": [fault_row(name, [run for run in faulty if run.scenario == name]) for name in _names(faulty)],
        "alarms": [alarm_row(name, faulty, healthy, steps) for name in ALARM_KINDS],
    }


def fault_row(name: str, runs: Sequence[RunOutcome]) -> dict[str, Any]:
    """Return the row of one fault."""
    collapses = [run for run in runs if run.collapse is not None]
    firsts = [min(run.rung)[1] for run in runs if run.rung]
    return {
        "fault": name,
        "description": SCENARIOS[name].description,
        "runs": len(runs),
        "collapsed": len(collapses),
        "collapse_step": _median([run.collapse for run in collapses if run.collapse is not None]),
        "detected": sum(bool(run.rung) for run in runs),
        "detected_before": sum(run.lead() is not None for run in collapses),
        "first_alarms": sorted(set(firsts), key=lambda alarm: (-firsts.count(alarm), alarm)),
        "leads": sorted(lead for run in collapses if (lead := run.lead()) is not None),
    }


def alarm_row(name: str, faulty: Sequence[RunOutcome], healthy: Sequence[RunOutcome], steps: int) -> dict[str, Any]:
    """Return the row of one alarm."""
    meant = [run for run in faulty if run.scenario in MEANT[name]]
    collapses = [run for run in faulty if run.collapse is not None]
    wrong = sum(alarm == name for run in healthy for _, alarm, _ in run.rung)
    return {
        "alarm": name,
        "meant_for": list(MEANT[name]),
        "meant_runs": len(meant),
        "meant_detected": sum(run.first(name) is not None for run in meant),
        "faulty_runs": len(faulty),
        "rang_in": sum(run.first(name) is not None for run in faulty),
        "rang_before": sum(run.lead(name) is not None for run in collapses),
        "collapsed": len(collapses),
        "leads": sorted(lead for run in collapses if (lead := run.lead(name)) is not None),
        "false_alarms": wrong,
        "false_per_1000_steps": 1000 * wrong / max(steps, 1),
    }


def markdown(result: dict[str, Any]) -> str:
    """Return the tables in Markdown."""
    faults, alarms = result["faults"], result["alarms"]
    runs, detected = sum(row["runs"] for row in faults), sum(row["detected"] for row in faults)
    collapsed_, before = sum(row["collapsed"] for row in faults), sum(row["detected_before"] for row in faults)
    leads = [lead for row in faults for lead in row["leads"]]
    rate = 1000 * result["false_alarms"] / max(result["healthy_steps"], 1)
    odd = result["healthy_collapsed"]
    summary = [
        f"An alarm rang in {detected} of {runs} faulty runs. {collapsed_} of the {runs} collapsed; in {before} of "
        f"these an alarm rang before, by {_number(_median(leads))} steps at the median. In {result['healthy_runs']} "
        f"healthy runs with together {result['healthy_steps']:,} steps the number of alarms was "
        f"{result['false_alarms']}: {rate:.2f} per 1,000 steps.",
        *([f"Healthy runs that meet our own definition of a collapse: {odd}."] if odd else []),
        f"Seeds {_list(result['seeds'])}; thresholds were tuned on seeds {_list(result['tuned_on'])}, which are not in "
        f"these tables. {result['machine']}, torch {result['versions']['torch']}, {result['date']}.",
    ]
    rows = [
        f"| {row['description']} | {row['detected']}/{row['runs']} | {row['collapsed']}/{row['runs']} "
        f"| {_number(row['collapse_step'])} | {row['detected_before']}/{row['collapsed']} | {_leads(row['leads'])} "
        f"| {', '.join(f'`{alarm}`' for alarm in row['first_alarms'])} |"
        for row in faults
    ]
    per_alarm = [
        f"| `{row['alarm']}` | {row['meant_detected']}/{row['meant_runs']} | {row['rang_in']}/{row['faulty_runs']} "
        f"| {row['rang_before']}/{row['collapsed']} | {_leads(row['leads'])} | {row['false_per_1000_steps']:.2f} |"
        for row in alarms
        if row["meant_runs"] or row["rang_in"] or row["false_per_1000_steps"]  # no fault here is of a tool or a rule
    ]
    return "\n".join([
        *summary,
        "",
        "| what goes wrong | rang | collapsed | at step | rang before | lead (steps) | first to ring |",
        "|---" * 7 + "|",
        *rows,
        "",
        "| alarm | rang where meant to | in faulty runs | before a collapse | lead (steps) | false per 1,000 steps |",
        "|---" * 6 + "|",
        *per_alarm,
        "",
    ])  # fmt: skip


def _names(runs: Sequence[RunOutcome]) -> list[str]:
    return list(dict.fromkeys(run.scenario for run in runs))


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _leads(leads: Sequence[int]) -> str:
    """The median, and the range."""
    return f"{median(leads):g} ({leads[0]} to {leads[-1]})" if leads else "-"


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
