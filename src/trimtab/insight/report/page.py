"""Write the report of run folders: one HTML file with template, style, scripts and data, and nothing to fetch.

The content security policy allows exactly the joined script, by its hash. The data of the microscope comes last in the
file, one block per response, and is parsed on demand, so that the curves are painted first.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, reduce
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from trimtab.experiments.grid import AxisTable, RunFigures, held_out_end, read_stress
from trimtab.files import write_atomically
from trimtab.insight.report.curve_store import MetricCurve
from trimtab.insight.report.curves import curve_json, mean_and_std, points_per_curve
from trimtab.insight.report.embed import safe_json, truncated, visible
from trimtab.insight.report.page_data import COMPARED_OBJECTIVES, ReportRequest, page_data
from trimtab.record import COLLAPSE_DEFINITION
from trimtab.text import number, percent
from trimtab.trainer.config import Config

TITLE_END = "· trimtab report</title>".encode()  # by which a report is known
LONGEST_HEAD = 1 << 16
NAME = "report.html"
STRESS_TEST = "stress.json"  # in the folder of a stress test

# Joined in this order; the last one starts the page.
SCRIPTS = (
    "text.js", "data.js", "colors.js", "chart.js", "pointer.js", "curves.js", "alarms.js", "control_panel.js",
    "heat_maps.js", "replay_panel.js", "tokens.js", "turns.js", "filters.js", "token_pane.js", "microscope.js",
    "stress.js", "main.js",
)  # fmt: skip


def write_report(
    runs: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    compared: Sequence[str] = COMPARED_OBJECTIVES,
    steps: Sequence[int] = (),
    progress: Callable[[str], object] = lambda text: None,
) -> Path:
    """Write the report of one run or several, or of a stress test; without `out` into the only folder.

    `compared` names the objectives that are planned over the recorded mini-batches besides the run's own; `steps`
    must be in the microscope. What is missing in a run is named on the page.
    """
    if not runs:
        raise ValueError("a report needs a run: trimtab report RUN")
    if out is None and len(runs) > 1:
        raise ValueError("a report of several runs needs a place: add --out FILE")
    path = Path(runs[0]) / NAME if out is None else Path(out)
    if path.is_dir():
        raise ValueError(f"--out {path} is a folder; name a file, for example {path / NAME}")
    check_overwritten(path)
    folders = tuple(Path(run) for run in runs)
    tests = [folder for folder in folders if (folder / STRESS_TEST).is_file()]
    if tests:
        if len(folders) > 1 or tuple(compared) != COMPARED_OBJECTIVES or steps:
            raise ValueError(f"{tests[0]} holds a stress test, whose report has no other runs, objectives or steps")
        (title, data), blocks = stress_page_data(tests[0]), list[str]()
    else:
        title, data, blocks = page_data(ReportRequest(folders, tuple(compared), tuple(steps)), progress)
    # Atomically: a reader that has the old report open never sees half of the new one.
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page(title, data, blocks), named=out is not None)
    return path


def check_overwritten(path: Path) -> None:
    """Raise if there is a file in the place of a report that is not a report."""
    if path.is_file():
        with path.open("rb") as file:
            if TITLE_END not in file.read(LONGEST_HEAD):
                raise ValueError(f"{path} is not a report of trimtab and is not overwritten: choose another --out FILE")


def try_report(runs: Sequence[Path], warn: Callable[[str], object], out: Path | None = None) -> Path | None:
    """Write the report of runs that have just ended; an error becomes a warning, since the runs are fine."""
    try:
        return write_report(runs, out)
    except Exception as error:  # of any kind: it must not fail the run
        warn(f"warning: no report of {runs[0]} could be written: {error!r:.300}")
        return None


def page(
    title: str, data: Mapping[str, Any], blocks: Iterable[str] = (), live: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield the page in pieces; `blocks` are the responses of the microscope as `safe_json`, in the order of `data`.

    `live` has the scripts and styles by which `trimtab watch` adds what is new; such a page may ask its own server.
    """
    files = live or {}
    script = joined_script(tuple(text for name, text in files.items() if name.endswith(".js")))
    values = {
        "title": html.escape(visible(title)),
        "kind": "report" if live is None else "watch",
        "policy": policy(script, live is not None),
        "style": "\n".join([asset("page.css"), *(text for name, text in files.items() if name.endswith(".css"))]),
    }
    template, after = asset("page.html").split("{{scripts}}")
    # In one pass, since a value may contain {{...}} itself.
    yield re.sub(r"\{\{(\w+)\}\}", lambda mark: values[mark[1]], template)
    yield _block("data", safe_json(data))
    yield f"<script>{script}</script>\n"
    for index, block in enumerate(blocks):
        yield _block(f"response-{index}", block)
    yield after


def policy(script: str, live: bool) -> str:
    """Return the content security policy: this script by its hash, no requests, of a live page to its own server."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        + "connect-src 'self'; " * live
        + "base-uri 'none'; form-action 'none'"
    )


@cache
def joined_script(more: tuple[str, ...] = ()) -> str:
    """Return all scripts as one, inside a function so that nothing is global; `more` comes before the last one."""
    *parts, main = (asset(name) for name in SCRIPTS)
    return '(function () {\n"use strict";\n' + "\n".join([*parts, *more, main]) + "})();\n"


@cache
def asset(name: str) -> str:
    """Return the text of one of the page's source files."""
    return (resources.files("trimtab.insight.report") / "page" / name).read_text(encoding="utf-8")


def _block(name: str, text: str) -> str:
    return f'<script type="application/json" id="{name}">{text}</script>\n'


# The data of a stress test's page: who survives what, curves side by side, margins in words.
#
# All of it comes from stress.json. The runs are not read: there may be hundreds of them, without records.

LONGEST_NAME = 200  # characters of an objective, a key, a value
MOST_VALUE = 1e30  # curves are float32 on the page
CHARTS = (
    ("eval/accuracy", "Held-out accuracy", "Share of problems that were never trained on and are answered right"),
    ("eval/score", "Held-out score", "Mean number of the task's rule on problems that were never trained on"),
    ("policy/entropy", "Entropy", "Token-mean entropy of the policy, in nats: near 0 it hardly explores any more"),
)
HEADS = (
    "objective", "holds up to [95 % interval]", "times the first objective's", "accuracy", "collapse at step",
    "entropy in band", "tokens touched", "seconds",
)  # fmt: skip
WORDS = (
    (
        "survives",
        "The run reached its last step, not below half of its best accuracy, and neither collapsed nor failed to learn "
        "from a start near 0 %.",
    ),
    ("collapsed", COLLAPSE_DEFINITION),
    (
        "holds, margin",
        "A setting holds if at least two of three seeds survive it (with two seeds both, with one seed that one). The "
        "margin is the strongest that does.",
    ),
)


def stress_page_data(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the title and the data of a stress test's page."""
    test = read_stress(folder)
    tables = [table for table in test.tables if table.runs]
    runs = [run for table in tables for run in table.runs]
    title = truncated(f"Stress test of {Path(test.recipe).stem}", LONGEST_NAME)
    data = {
        "title": title,
        "objectives": [truncated(name, LONGEST_NAME) for name in test.objectives],
        "summary": [truncated(table.headline(), 2_000) for table in tables],
        "axes": [_axis_json(table, points_per_curve(len(runs))) for table in tables],
        "runs": [_run_json(run) for run in runs],
        "missing": [truncated(f"{run.folder}: {run.end}", 500) for run in runs if run.survived is None],
        "words": WORDS,
        "command": truncated(shlex.join(test.command)),
    }
    return title, {"title": title, "stress": data}


def _axis_json(table: AxisTable, points: int) -> dict[str, Any]:
    return {
        "key": truncated(table.axis.key, LONGEST_NAME),
        "meaning": _key_description(table.axis.key),
        "headline": truncated(table.headline(), 2_000),
        "values": [truncated(value, LONGEST_NAME) for value in table.values],
        "cells": [[_cell_json(table, name, value) for value in table.values] for name in table.objectives],
        "metrics": [_metric_json(table, points, *chart) for chart in CHARTS],
        "sentences": [truncated(table.describe(name), 2_000) for name in table.objectives],
        "heads": HEADS,
        "rows": [[truncated(text, LONGEST_NAME) for text in row] for row in table.rows()],
        "legend": truncated(table.legend(), 2_000),
    }


def _key_description(key: str) -> str:
    section, _, name = key.partition(".")
    field = Config.model_fields.get(section)
    fields = getattr(field.annotation, "model_fields", {}) if field else {}
    return str(fields[name].description or "") if name in fields else ""


def _cell_json(table: AxisTable, objective: str, value: str) -> dict[str, Any]:
    """Return one cell of the heat map: how many seeds survived, in a figure, a word and a colour class."""
    runs, planned = table.cell(objective, value), table.runs_at(objective, value)
    accuracy = [run.accuracy_end for run in runs if run.accuracy_end is not None]
    score = [run.score_end for run in runs if run.score_end is not None]
    kind, word = _verdict(runs, table.survived(objective).get(value, False), bool(planned))
    return {
        "survived": sum(bool(run.survived) for run in runs),
        "runs": len(runs),
        "accuracy": percent(fmean(accuracy)) if accuracy else "",
        "score": number(fmean(score)) if score else "",
        "kind": kind,
        "word": word,
        "margin": table.margins[objective].value == value,
        "seeds": [truncated(f"seed {run.seed}: {run.end}", 300) for run in planned],
    }


def _verdict(runs: Sequence[RunFigures], holds: bool, planned: bool) -> tuple[str, str]:
    if not runs:
        return "missing", "not finished" if planned else "not run"
    if holds:
        return ("all", "survives") if all(run.survived for run in runs) else ("most", "most survive")
    if any(run.survived for run in runs):
        return "few", "too few survive"
    collapsed = any(run.collapse_step is not None for run in runs)
    return "none", "collapsed" if collapsed else "never learned"


def _metric_json(table: AxisTable, points: int, name: str, title: str, meaning: str) -> dict[str, Any]:
    """Return a metric's curves by value and objective, with the range of all of them: the charts share their scales."""
    curves = {id(run): curve for run in table.runs if (curve := _curve(run, name)) is not None}
    drawn = list(curves.values())
    return {
        "name": name,
        "title": title,
        "meaning": meaning,
        "range": [float(min(c.values.min() for c in drawn)), float(max(c.values.max() for c in drawn))]
        if drawn
        else [],
        "steps": [int(min(c.steps[0] for c in drawn)), int(max(c.steps[-1] for c in drawn))] if drawn else [],
        "charts": [
            [
                _line_json([(run, curves[id(run)]) for run in table.runs_at(each, value) if id(run) in curves], points)
                for each in table.objectives
            ]
            for value in table.values
        ],
    }


def _curve(run: RunFigures, name: str) -> MetricCurve | None:
    # A file of another program may have its steps in any order.
    by_step = {step: value for step, value in run.curves.get(name, ()) if abs(value) < MOST_VALUE}
    if not by_step:
        return None
    steps = sorted(by_step)
    return MetricCurve(np.array(steps, dtype=np.int32), np.array([by_step[step] for step in steps], dtype=np.float32))


def _line_json(runs: Sequence[tuple[RunFigures, MetricCurve]], points: int) -> dict[str, Any] | None:
    """Return the mean over the seeds and every seed's curve, None without runs."""
    if not runs:
        return None
    curves = [curve for _, curve in runs]
    steps, mean, _ = mean_and_std(curves)
    # The mean ends with the first of its runs: it would jump up where a collapsed run was ended early.
    shared = reduce(np.intersect1d, [curve.steps for curve in curves])
    kept = np.isin(steps, shared) if len(shared) else np.ones(len(steps), dtype=bool)
    return {
        "mean": curve_json(points, steps[kept], mean[kept]),
        "seeds": [
            {"seed": run.seed, "collapse": run.collapse_step, "end": truncated(run.end, 300)}
            | curve_json(points, curve.steps, curve.values)
            for run, curve in runs
        ],
    }


def _run_json(run: RunFigures) -> list[str]:
    """Return the row of a run: how it ended, accuracy before and after, its folder."""
    start, end = percent(run.accuracy_start), held_out_end([run])
    row = [run.objective, f"{run.axis} = {run.value}", str(run.seed), run.end, f"{start} → {end}", f"{run.steps:,}"]
    return [truncated(text, 500) for text in [*row, run.folder]]
