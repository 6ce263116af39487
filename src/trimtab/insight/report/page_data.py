"""All data of the page: curves, token statistics, responses, summary. At most one step's tokens are in memory."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trimtab.agents import ENDED, OUTCOMES
from trimtab.insight.replay import (
    LEGEND,
    RECORDED,
    CriticalWeights,
    Replay,
    Replayer,
    make_variants,
    objective_rows,
    overlap_row,
    recorded_objective,
    torch_threads,
)
from trimtab.insight.report import summary_text
from trimtab.insight.report.curves import axes_json, control_json, curves_json, groups_json, points_per_curve
from trimtab.insight.report.embed import truncated
from trimtab.insight.report.microscope import (
    MOST_RESPONSES,
    SELECTION_REASONS,
    CandidatePool,
    MicroscopeData,
    affordable_tokens,
    microscope_data,
    select_responses,
)
from trimtab.insight.report.run_files import RunFiles, read_run, select_steps, unrecorded_steps
from trimtab.insight.report.tokens import H_MAX, TokenStatistics, token_table
from trimtab.objectives import REASON_WORDS, EntropyGate, Objective, objective
from trimtab.record import RecordError, RecordWarning
from trimtab.trainer.train import END_WINDOW, describe_metric

COMPARED_OBJECTIVES = ("grpo", "dapo", "gspo", "stapo", "stare", "sspo")
MICROSCOPE_BYTES = 8_000_000  # of all runs together
REPLAYED_STEPS = 60  # at most, evenly spaced; `trimtab replay` goes through all of them
STARE_BAND = (0.22 / 0.3, 0.42 / 0.3)  # the entropy range that STARE's paper reports, relative to its target


@dataclass(frozen=True)
class ReportRequest:
    """The runs of a report, the objectives to compare with, and steps that must be in the microscope."""

    runs: tuple[Path, ...]
    compared: tuple[str, ...] = COMPARED_OBJECTIVES
    steps: tuple[int, ...] = ()


def page_data(
    request: ReportRequest, progress: Callable[[str], object] = lambda text: None
) -> tuple[str, dict[str, Any], list[str]]:
    """Return the page's title, its data, and the JSON blocks of its responses."""
    runs = [read_run(path) for path in request.runs]
    points = points_per_curve(len(runs))
    blocks = list[str]()
    runs_data = []
    # Single updates are so small that more threads would only wait for each other.
    with torch_threads(1):
        for run in runs:
            progress(f"reading {run.name}")
            for note in unrecorded_steps(run, request.steps):
                progress(f"warning: {run.name}: {note}")
            # Blocks are numbered over all runs, since they are elements of one page.
            data, responses = run_json(run, request, MICROSCOPE_BYTES // len(runs), len(blocks))
            curves = {"curves": curves_json(run.curves, points), "axes": axes_json([run.curves], points)}
            runs_data.append(data | curves)
            blocks += responses
    data = shared_json(runs, runs_data, points)
    return data["title"], data, blocks


def shared_json(runs: Sequence[RunFiles], runs_data: Sequence[Mapping[str, Any]], points: int) -> dict[str, Any]:
    """Return the data of a page, with that of its runs."""
    return {
        "title": runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        "runs": runs_data,
        "groups": groups_json(runs, points) if len(runs) > 1 else [],
        "end_window": END_WINDOW,
        "metric_descriptions": {name: text for run in runs for name in run.curves if (text := describe_metric(name))},
        "reasons": [{"bit": int(r), "name": str(r.name).lower(), "text": text} for r, text in REASON_WORDS.items()],
        "selection_reasons": SELECTION_REASONS,
        "call_outcomes": OUTCOMES,
        "conversation_ends": ENDED,
    }


def run_json(
    run: RunFiles, request: ReportRequest, byte_budget: int, first_block: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the data of one run without its curves, and the JSON blocks of its responses."""
    notes = list(run.notes)
    compared = compared_objectives(run, request.compared)  # first: what the user names may be run
    recorded = objective_of(run, notes)
    microscope = MicroscopeData()
    found = None
    if run.records is not None and run.records.steps:
        found = read_tokens(run, recorded, list(compared), request.steps, notes)
        tokens = affordable_tokens(byte_budget, len(compared))
        most = max(MOST_RESPONSES // len(request.runs), 1)
        excerpts = select_responses(found.pool.candidates, tokens, most)
        microscope = microscope_data(
            run.records, excerpts, recorded, compared, byte_budget=byte_budget, first_block=first_block
        )
    data = {
        **metrics_json(run, recorded, points_per_curve(len(request.runs))),
        **microscope_words(recorded, compared),
        **tokens_json(run, recorded, found, points_per_curve(len(request.runs))),
        "notes": [*notes, *microscope.notes],
        "responses": microscope.entries,
    }
    return data, microscope.blocks


def metrics_json(run: RunFiles, recorded: Objective | None, points: int) -> dict[str, Any]:
    """Return what a page says about a run without reading its tokens; without its curves."""
    steps = run.records.steps if run.records else []
    return {
        "name": run.name,
        "label": run.label,
        "title": summary_text.title_of(run),
        "seed": run.seed,
        "summary": summary_text.summary(run),
        "tiles": summary_text.tiles(run),
        "facts": summary_text.facts(run),
        "alarms": [asdict(alarm) for alarm in run.alarms],
        "config": truncated(run.config_text),
        "entropy_target": _entropy_band(recorded),
        "spurious_region": _spurious_region(run, recorded),
        "control": control_json(run, recorded, CriticalWeights(), points),
        "recorded_steps": len(steps),
        "last_recorded_step": steps[-1] if steps else 0,
    }


def microscope_words(recorded: Objective | None, compared: Mapping[str, Objective]) -> dict[str, Any]:
    """Return the objectives that the microscope can compare with, and what reasons mean under each."""
    return {
        "compared_objectives": list(compared),
        "reason_text": [_reason_text(each) for each in (recorded, *compared.values())],
    }


def tokens_json(run: RunFiles, recorded: Objective | None, found: StepsRead | None, points: int) -> dict[str, Any]:
    """Return what a page says about the tokens of the steps that were read; None for what they do not give."""
    if found is None:
        return {"token_statistics": None, "replay": None}
    assert run.records is not None
    return {
        "token_statistics": found.statistics.to_json(),
        "replay": replay_json(found.replay, len(run.records.steps)) if found.replay else None,
        "control": control_json(run, recorded, found.weights, points),
    }


def _reason_text(objective: Objective | None) -> dict[str, str]:
    """Return the reasons that mean something else under this objective than by default: text by bit."""
    if objective is None:
        return {}
    return {str(int(r)): text for r, text in objective.reason_words.items() if text != REASON_WORDS[r]}


@dataclass
class StepsRead:
    """What the tokens of the steps that were read gave, all from one reading."""

    statistics: TokenStatistics
    pool: CandidatePool
    weights: CriticalWeights = field(default_factory=CriticalWeights)
    replay: Replay | None = None


def read_tokens(
    run: RunFiles, recorded: Objective | None, compared: Sequence[str], requested: Sequence[int], notes: list[str]
) -> StepsRead:
    """Read the selected steps one at a time: statistics, candidates for the microscope, and a replay."""
    assert run.records is not None
    steps = run.records.steps
    selection = select_steps(run, requested)
    # A small vocabulary has no entropies up to 6 nats: its heat map covers what is possible.
    statistics = TokenStatistics(h_max=min(H_MAX, math.log(max(run.records.manifest.vocabulary, 2))))
    pool = CandidatePool(
        alarm_steps=frozenset(alarm.step for alarm in run.alarms),
        end_steps=frozenset({steps[0], steps[-1]}),
        requested_steps=frozenset(requested),
    )
    found = StepsRead(statistics, pool)
    damaged = list[str]()
    evenly_spaced = set(selection.evenly_spaced)
    replayed = set(steps[:: -(-len(steps) // REPLAYED_STEPS)])
    replayer = None
    problems = list[str]()
    with _noted(problems):
        replayer = Replayer(run.records, make_variants(run.records, [RECORDED, *compared], {}))
    for number in sorted({*evenly_spaced, *selection.highlighted, *replayed}):
        try:
            step = run.records.step(number)
            if number in evenly_spaced or number in selection.highlighted:
                table = token_table(step, recorded)
                # Highlighted steps would bias the statistics towards unusual ones.
                if number in evenly_spaced:
                    statistics.add(table)
                    found.weights.add(step, recorded, table.batches)
                pool.add(table, sample=number in evenly_spaced)
        except (RecordError, ValueError, LookupError) as error:
            damaged.append(f"step {number} is left out: {truncated(str(error), 300)}")
            continue
        if replayer and number in replayed and not problems:
            with _noted(problems):
                replayer.add(step)
    if replayer and not problems:
        with _noted(problems):
            found.replay = replayer.result(str(run.records.folder.parent))
    # A few examples are enough: a broken disk may damage thousands of steps.
    notes += damaged[:5] + ([f"{len(damaged) - 5} more steps are damaged and left out"] if len(damaged) > 5 else [])
    notes += [*unrecorded_steps(run, requested), *problems]
    return found


@contextmanager
def _noted(problems: list[str]) -> Iterator[None]:
    """Turn an error of the replay into a note, since the rest of the page can be made without it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordWarning)  # damaged steps are already among the notes of the page
        try:
            yield
        except (RecordError, ValueError, LookupError, TypeError) as error:
            problems.append(f"no replay: {error}")


def objective_of(run: RunFiles, notes: list[str]) -> Objective | None:
    """Return the objective that the records were made under; None, with a note, if it cannot be made."""
    if run.records is None:
        return None
    try:
        return recorded_objective(dict(run.records.manifest.objective))
    except RecordError as error:
        notes.append(f"{error}: gradient norms and entropy changes are not known")
        return None


def compared_objectives(run: RunFiles, names: Sequence[str]) -> dict[str, Objective]:
    """Build the objectives to compare with, without the recorded one if it has its default options."""
    return {name: objective(name) for name in names if run.objective != {"name": name}}


def _entropy_band(recorded: Objective | None) -> dict[str, float] | None:
    """Return the target of an entropy gate, and the range that STARE's paper reports around it."""
    controllers = recorded.controllers.values() if recorded else ()
    target = next((gate.target for gate in controllers if isinstance(gate, EntropyGate)), None)
    if target is None:
        return None
    return {"value": target, "low": target * STARE_BAND[0], "high": target * STARE_BAND[1]}


def _spurious_region(run: RunFiles, recorded: Objective | None) -> dict[str, float] | None:
    """Return the probability and the median entropy below which S2T silences rewarded tokens."""
    curve = run.curves.get("s2t/entropy_threshold")
    tau_p = run.objective.get("tau_p", 0.002)
    if recorded is None or not any(rule.name == "s2t" for rule in recorded.rules):
        return None
    # A configuration is read as it is, and may hold anything.
    if not isinstance(tau_p, int | float) or not tau_p > 0:
        return None
    values = sorted(curve.values.tolist()) if curve is not None and len(curve.values) else [math.nan]
    return {"tau_p": float(tau_p), "tau_h": values[len(values) // 2], "low": values[0], "high": values[-1]}


def replay_json(result: Replay, recorded_steps: int) -> dict[str, Any]:
    """Return the tables of `trimtab replay` as text."""
    reasons, rows = objective_rows(result)
    # Pairs with the run's own objective; `trimtab replay` prints all.
    pairs = [overlap_row(result, overlap) for overlap in result.overlaps if overlap.first == 0]
    return {
        "steps": len(result.steps),
        "recorded_steps": recorded_steps,
        "reasons": reasons,
        "rows": [{"name": label, "cells": cells, "entropy": entropy} for label, *cells, entropy in rows],
        "pairs": [{"names": names, "jaccard": value, "agreement": share} for *names, value, share in pairs],
        "legend": LEGEND,
        "notes": list(result.notes),
    }
