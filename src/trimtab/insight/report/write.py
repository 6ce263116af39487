"""From run folders to a file on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trimtab.insight.report.assemble import BESIDE, ReportRequest, Say, assemble
from trimtab.insight.report.page import page

NAME = "report.html"


def write_report(
    runs: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    beside: Sequence[str] = BESIDE,
    steps: Sequence[int] = (),
    say: Say = lambda text: None,
) -> Path:
    """Write the report of one run or several; without `out` into the folder of the only one.

    `beside` names the objectives whose treatment of the tokens is shown next to the recorded one; `steps` must be among
    those of the microscope. Whatever is missing in a run is named on the page.
    """
    if not runs:
        raise ValueError("a report needs a run: trimtab report RUN")
    if out is None and len(runs) > 1:
        raise ValueError("a report of several runs needs a place: add --out FILE")
    path = Path(runs[0]) / NAME if out is None else Path(out)
    if path.is_dir():
        raise ValueError(f"--out {path} is a folder; name a file, for example {path / NAME}")
    wanted = ReportRequest(tuple(Path(run) for run in runs), tuple(beside), tuple(steps))
    title, data, blocks = assemble(wanted, say)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(page(title, data, blocks))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def try_report(runs: Sequence[Path], complain: Say, out: Path | None = None) -> Path | None:
    """The report of runs that have just ended; what goes wrong is said, for a report must never spoil a run."""
    try:
        return write_report(runs, out)
    except Exception as error:  # whatever it is, a run is worth more than its report
        complain(f"warning: no report of {runs[0]} could be written: {error!r:.300}")
        return None
