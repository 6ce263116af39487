"""What the server of `trimtab watch` sends: the JSON that a report embeds, and what has grown since a page has it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any

from trimtab.insight.replay import torch_threads
from trimtab.insight.report import summary_text
from trimtab.insight.report.curves import axes_json, curves_json, groups_json, points_per_curve
from trimtab.insight.report.embed import safe_json
from trimtab.insight.report.microscope import (
    ResponseExcerpt,
    affordable_tokens,
    microscope_data,
)
from trimtab.insight.report.page_data import (
    COMPARED_OBJECTIVES,
    compared_objectives,
    metrics_json,
    microscope_words,
    objective_of,
    read_tokens,
    shared_json,
    tokens_json,
)
from trimtab.insight.watch.responses import open_step
from trimtab.insight.watch.status import status_json
from trimtab.insight.watch.watched_run import WatchedRun
from trimtab.trainer.train import METRICS

STEP_BYTES = 8_000_000  # of the responses of a step that are sent at once; others come when they are opened
MOST_BYTES = 64_000_000  # of an answer: one whose tokens have long texts is larger than estimated
LONGEST_RESPONSE = 20_000  # tokens of one response
ZOOM_POINTS = 4_000  # of a curve; a part of a run with fewer values is exact

Position = tuple[int, int, int]  # generation, lines of metrics, alarms


def page_json(runs: Sequence[WatchedRun]) -> dict[str, Any]:
    """Return the data of the page: of every run what its metrics say, and no tokens, which are read when opened."""
    points = points_per_curve(len(runs))
    found = []
    for run in runs:
        with run.lock:
            found.append(run_json(run, points))
    with _locked(runs):
        data = shared_json([run.files() for run in runs], found, points)
    # Of all metrics: some come later than the page.
    return {**data, "metric_descriptions": {**METRICS, **data["metric_descriptions"]}}


@contextmanager
def _locked(runs: Sequence[WatchedRun]) -> Iterator[None]:
    with ExitStack() as stack:
        for run in runs:
            stack.enter_context(run.lock)
        yield


def run_json(run: WatchedRun, points: int) -> dict[str, Any]:
    """Return the data of a run as the page has it before any tokens are read."""
    return {
        **overview_json(run, points),
        "curves": curves_json(run.curves, points),
        "axes": axes_json([run.curves], points),
        "token_statistics": None,
        "replay": None,
        "responses": [],
        "live": growth_json(run) | {"position": position(run)},
    }


def overview_json(run: WatchedRun, points: int) -> dict[str, Any]:
    """Return what is said about a run in words, from all of its metrics."""
    with run.lock:
        files = run.files()
        notes = list(files.notes)
        recorded = objective_of(files, notes)
        return {
            **metrics_json(files, recorded, points),
            **microscope_words(recorded, compared_objectives(files, COMPARED_OBJECTIVES)),
            **recorded_json(run),
            "notes": notes,
        }


def position(run: WatchedRun) -> Position:
    """Return how far a page is that has all of a run."""
    return run.generation, run.lines, len(run.alarms)


def growth_json(run: WatchedRun) -> dict[str, Any]:
    """Return what a page always has anew: the status, the headline numbers, and how many steps are recorded."""
    with run.lock:
        return {
            "status": status_json(run),
            "tiles": summary_text.tiles(run.files()),
            **recorded_json(run),
        }


def recorded_json(run: WatchedRun) -> dict[str, int]:
    """Return how many steps are recorded: those that are also read, or a page would not learn of the others."""
    return {"recorded_steps": len(run.steps), "last_recorded_step": run.steps[-1] if run.steps else 0}


def growth_since(run: WatchedRun, known: Position, said: str) -> tuple[dict[str, Any] | None, str]:
    """Return what a page lacks that knows a run up to a position, None if nothing; and the growth as text, `said`.

    A page that is too far behind, or whose run was written anew, is told to load the run again (`reset`).
    """
    with run.lock:
        now = growth_json(run)
        text = json.dumps(now, sort_keys=True)
        behind = run.lines - known[1]
        if known[0] != run.generation or not 0 <= behind <= len(run.recent) or known[2] > len(run.alarms):
            return {"reset": True, "position": position(run), **now}, text
        if text == said and not behind and known[2] == len(run.alarms):
            return None, text
        grown: dict[str, Any] = {**now, "position": position(run)}
        if behind:
            grown["lines"] = list(run.recent)[-behind:]
        if known[2] != len(run.alarms):
            grown["alarms"] = [asdict(alarm) for alarm in run.alarms]
        return grown, text


def zoom_json(run: WatchedRun, first: int, last: int) -> dict[str, Any]:
    """Return a part of the curves, exact if it has few enough values."""
    return {"curves": curves_json(run.cut(first, last), ZOOM_POINTS)}


def groups_zoom_json(runs: Sequence[WatchedRun], limits: tuple[int, int] | None) -> dict[str, Any]:
    """Return the lines of the comparison, of all steps or of a part."""
    with _locked(runs):
        files = [run.files() for run in runs]
        if limits is None:
            return {"groups": groups_json(files, points_per_curve(len(runs)))}
        parts = [replace(each, curves=run.cut(*limits)) for each, run in zip(files, runs, strict=True)]
        return {"groups": groups_json(parts, ZOOM_POINTS)}


def step_json(run: WatchedRun, number: int, key: str, only: int | None = None) -> str:
    """Return the responses of the recorded step that is nearest, as the microscope takes them; `only` one of them.

    `key` begins the names of their blocks.
    """
    number = run.nearest_step(number)
    with run.lock:
        files = run.files()
        notes: list[str] = []
        recorded = objective_of(files, notes)
        compared = compared_objectives(files, COMPARED_OBJECTIVES)
    step = open_step(run, number)
    left = affordable_tokens(STEP_BYTES, len(compared))
    excerpts = []
    for response, length in enumerate(step.responses["tokens"].tolist()):
        if only is not None and response != only:
            continue
        tokens = min(length, LONGEST_RESPONSE)
        if tokens <= left or only is not None:
            excerpts.append(ResponseExcerpt(number, response, 0, tokens, ["requested"]))
            left -= tokens
    if only is not None and not excerpts:
        raise ValueError(f"step {number} has no response {only}: it has {step.info.responses}")
    if only is None and len(excerpts) < step.info.responses:
        notes.append(
            f"{step.info.responses - len(excerpts)} of the step's {step.info.responses} responses are long, and come "
            "when they are opened from the table of responses"
        )
    with torch_threads(1):
        data = microscope_data(run.open_records(), excerpts, recorded, compared, byte_budget=MOST_BYTES)
    names = [f"{key}-{number}-{entry['response']}" for entry in data.entries]
    entries = [entry | {"block": name} for entry, name in zip(data.entries, names, strict=True)]
    head = safe_json({"step": number, "entries": entries, "notes": [*notes, *data.notes], "of": step.info.responses})
    # The blocks are JSON already.
    blocks = ",".join(f"{safe_json(name)}:{block}" for name, block in zip(names, data.blocks, strict=True))
    return f'{head[:-1]},"blocks":{{{blocks}}}}}'


def token_statistics_json(run: WatchedRun) -> dict[str, Any]:
    """Return heat maps, replay and critical weights, from evenly spaced recorded steps."""
    with run.lock:
        files = run.files()
        curves = {name: run.curves[name] for name in run.curves}
        steps = run.steps
    files = replace(files, curves=curves)  # those of the run go on growing meanwhile
    for number in steps:
        run.check_step(number)
    notes: list[str] = []
    recorded = objective_of(files, notes)
    compared = compared_objectives(files, COMPARED_OBJECTIVES)
    found = None
    if files.records is not None and files.records.steps:
        with torch_threads(1):
            found = read_tokens(files, recorded, list(compared), (), notes)
    return {**tokens_json(files, recorded, found, ZOOM_POINTS), "notes": notes}
