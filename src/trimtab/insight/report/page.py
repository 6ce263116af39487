"""Write the report of run folders: one HTML file with template, style, scripts and data, and nothing to fetch.

The content security policy allows exactly the joined script, by its hash. The data of the microscope comes last in the
file, one block per response, and is parsed on demand, so that the curves are painted first.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from trimtab.files import write_atomically
from trimtab.insight.report.embed import safe_json, visible
from trimtab.insight.report.page_data import COMPARED_OBJECTIVES, ReportRequest, page_data

TITLE_END = "· trimtab report</title>".encode()  # by which a report is known
LONGEST_HEAD = 1 << 16
NAME = "report.html"
STRESS_TEST = "stress.json"  # in the folder of a stress test

# Joined in this order; the last one starts the page.
SCRIPTS = (
    "text.js", "data.js", "colors.js", "chart.js", "curves.js", "control_panel.js", "heat_maps.js", "replay_panel.js",
    "tokens.js", "turns.js", "filters.js", "token_pane.js", "microscope.js", "stress.js", "main.js",
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
        from trimtab.insight.report.stress_page import stress_page_data  # here: `train` starts without it

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
    except Exception as error:  # whatever it is, it must not fail the run
        warn(f"warning: no report of {runs[0]} could be written: {error!r:.300}")
        return None


def page(title: str, data: Mapping[str, Any], blocks: Iterable[str]) -> Iterator[str]:
    """Yield the page in pieces; `blocks` are the responses of the microscope as `safe_json`, in the order of `data`."""
    script = joined_script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    values = {
        "title": html.escape(visible(title)),
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        "style": asset("page.css"),
    }
    template, after = asset("page.html").split("{{scripts}}")
    # In one pass, since a value may contain {{...}} itself.
    yield re.sub(r"\{\{(\w+)\}\}", lambda mark: values[mark[1]], template)
    yield _block("data", safe_json(data))
    yield f"<script>{script}</script>\n"
    for number, block in enumerate(blocks):
        yield _block(f"response-{number}", block)
    yield after


@cache
def joined_script() -> str:
    """Return all scripts as one, inside a function so that nothing is global."""
    scripts = "\n".join(asset(name) for name in SCRIPTS)
    return f'(function () {{\n"use strict";\n{scripts}}})();\n'


@cache
def asset(name: str) -> str:
    """Return the text of one of the page's source files."""
    return (resources.files("trimtab.insight.report") / "page" / name).read_text(encoding="utf-8")


def _block(name: str, text: str) -> str:
    return f'<script type="application/json" id="{name}">{text}</script>\n'
