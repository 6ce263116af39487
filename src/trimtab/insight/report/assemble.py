"""A run as the page wants it: curves, survey, responses, summary. Never more than one step's tokens are in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab.insight.replay.batches import recorded_objective
from trimtab.insight.report import summary_text
from trimtab.insight.report.curves import pack_curves, pack_groups, points_for
from trimtab.insight.report.embed import shortened
from trimtab.insight.report.measured import measure, open_step
from trimtab.insight.report.replay_panel import pack_replay
from trimtab.insight.report.response_selection import KINDS, MOST_RESPONSES, choose
from trimtab.insight.report.responses import Shelf, affordable_tokens, fill_shelf
from trimtab.insight.report.run_files import RunFiles, read_run
from trimtab.insight.report.survey import H_MOST, Survey, choose_steps
from trimtab.objectives import REASON_WORDS, EntropyGate, Objective, objective
from trimtab.record import RecordError
from trimtab.train import METRICS

BESIDE = ("grpo", "dapo", "gspo", "stapo", "stare", "sspo")
MICROSCOPE_BYTES = 8_000_000  # of all runs together
STARE_BAND = (0.22 / 0.3, 0.42 / 0.3)  # where STARE's paper reports the entropy to stay, beside its target

Say = Callable[[str], object]


@dataclass(frozen=True)
class ReportRequest:
    """What a report is to show: `beside` are the objectives to plan again, `steps` those that must be in it."""

    runs: tuple[Path, ...]
    beside: tuple[str, ...] = BESIDE
    steps: tuple[int, ...] = ()


def assemble(wanted: ReportRequest, say: Say = lambda text: None) -> tuple[str, dict[str, Any], list[str]]:
    """The page's title, its data, and the blocks of its responses."""
    runs = [read_run(path) for path in wanted.runs]
    with one_thread():
        return _assemble(runs, wanted, say)


@contextmanager
def one_thread() -> Iterator[None]:
    """Mini-batches are small here: several threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _assemble(runs: Sequence[RunFiles], wanted: ReportRequest, say: Say) -> tuple[str, dict[str, Any], list[str]]:
    points, blocks = points_for(len(runs)), list[str]()
    packed = []
    for run in runs:
        say(f"reading {run.name}")
        data, shelf = pack_run(run, wanted, MICROSCOPE_BYTES // len(runs), len(blocks))
        packed.append(data | {"curves": pack_curves(run.curves, points)})
        blocks += shelf.blocks
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return (
        title,
        {
            "title": title,
            "runs": packed,
            "groups": pack_groups(runs, points) if len(runs) > 1 else [],
            "meanings": METRICS,
            "reasons": [
                {"bit": int(r), "name": str(r.name).lower(), "words": text} for r, text in REASON_WORDS.items()
            ],
            "kinds": KINDS,
        },
        blocks,
    )


def pack_run(run: RunFiles, wanted: ReportRequest, budget: int, first_block: int) -> tuple[dict[str, Any], Shelf]:
    """One run without its curves, and its responses."""
    notes = list(run.notes)
    recorded = _recorded(run, notes)
    others = _others(run, wanted.beside)
    shelf, survey, replayed = Shelf(), None, None
    if run.records is not None and run.records.steps:
        survey = look_through(run, recorded, wanted.steps, notes)
        items = choose(
            survey.candidates, affordable_tokens(budget, len(others)), max(MOST_RESPONSES // len(wanted.runs), 1)
        )
        shelf = fill_shelf(run.records, items, recorded, others, budget, first_block)
        replayed = pack_replay(run.records, list(others), notes)
    data = {
        "name": run.name,
        "label": run.label,
        "title": summary_text.title_of(run),
        "seed": run.seed,
        "summary": summary_text.summary(run),
        "tiles": summary_text.tiles(run),
        "facts": summary_text.facts(run),
        "alarms": [asdict(alarm) for alarm in run.alarms],
        "notes": [*notes, *shelf.notes],
        "config": shortened(run.config_text),
        "target": _target(recorded),
        "spurious": _spurious(run, recorded),
        "others": list(others),
        "survey": survey.packed() if survey else None,
        "replay": replayed,
        "responses": shelf.entries,
        "recorded_steps": len(run.records.steps) if run.records else 0,
        "recorded": run.records.steps[:: max(1, len(run.records.steps) // 2000)] if run.records else [],
    }
    return data, shelf


def look_through(run: RunFiles, recorded: Objective | None, asked: Sequence[int], notes: list[str]) -> Survey:
    """Read the chosen steps, one at a time."""
    assert run.records is not None
    steps = run.records.steps
    chosen = choose_steps(run, asked)
    size = run.records.manifest.vocabulary
    survey = Survey(
        h_most=min(H_MOST, math.log(max(size, 2))),
        alarmed=frozenset(alarm.step for alarm in run.alarms),
        ends=frozenset({steps[0], steps[-1]}),
        asked=frozenset(asked),
    )
    even, bad = set(chosen.even), list[str]()
    for number in sorted({*chosen.even, *chosen.pointed}):
        try:
            measured = measure(open_step(run.records, number), recorded)
            take = survey.add if number in even else survey.look
            take(measured)
        except (RecordError, ValueError, LookupError) as error:
            bad.append(f"step {number} is left out: {shortened(str(error), 300)}")
    notes += bad[:5] + ([f"{len(bad) - 5} more steps are damaged and left out"] if len(bad) > 5 else [])
    missing = sorted(set(asked) - set(steps))
    notes += [f"step {number} is not recorded" for number in missing[:5]]
    return survey


def _recorded(run: RunFiles, notes: list[str]) -> Objective | None:
    if run.records is None:
        return None
    try:
        return recorded_objective(dict(run.records.manifest.objective))
    except (RecordError, ValueError, LookupError, TypeError) as error:
        notes.append(f"{error}: gradient norms and entropy changes are not known")
        return None


def _others(run: RunFiles, names: Sequence[str]) -> dict[str, Objective]:
    """The objectives to show beside the recorded one; its plain self would say nothing new."""
    mine = str(run.objective.get("name", ""))
    plain = len(run.objective) == 1
    return {name: objective(name) for name in names if not (plain and name == mine)}


def _target(recorded: Objective | None) -> dict[str, float] | None:
    """The entropy that a gate steers to, and the band that STARE's paper reports around it."""
    gates = [gate for gate in recorded.controllers.values() if isinstance(gate, EntropyGate)] if recorded else []
    if not gates:
        return None
    return {"value": gates[0].target, "low": gates[0].target * STARE_BAND[0], "high": gates[0].target * STARE_BAND[1]}


def _spurious(run: RunFiles, recorded: Objective | None) -> dict[str, float] | None:
    """Where tokens are silenced: below this probability and, in the middle of the run, below this entropy."""
    curve = run.curves.get("s2t/entropy_threshold")
    tau_p = run.objective.get("tau_p", 0.002)
    if recorded is None or not any(rule.name == "s2t" for rule in recorded.rules):
        return None
    if not isinstance(tau_p, int | float) or not tau_p > 0:
        return None
    values = sorted(curve.values.tolist()) if curve is not None and len(curve.values) else [math.nan]
    return {"tau_p": float(tau_p), "tau_h": values[len(values) // 2], "low": values[0], "high": values[-1]}
