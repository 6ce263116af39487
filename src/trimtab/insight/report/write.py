"""Write the report of run folders to a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from trimtab.files import write_atomically
from trimtab.insight.report.page import page
from trimtab.insight.report.page_data import COMPARED_OBJECTIVES, ReportRequest, page_data

TITLE_END = "· trimtab report</title>".encode()  # by which a report is known
LONGEST_HEAD = 1 << 16
NAME = "report.html"
STRESS_TEST = "stress.json"  # in the folder of a stress test


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
    must be in the microscope. Whatever is missing in a run is named on the page.
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
