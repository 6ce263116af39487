"""The runs of the gallery: trains them, keeps what their reports need, and makes the reports for the site.

`python tools/gallery.py` writes docs/gallery/runs.tar.xz, in about ten minutes of one core.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from trimtab.insight.report import write_report

ARCHIVE = Path(__file__).parent.parent / "docs/gallery/runs.tar.xz"
KEPT = ("config.toml", "metrics.jsonl", "alarms.jsonl", "ended.json", "tokens")  # what a report reads

# The recipe and its settings. Few steps are recorded: the pages are for looking at, and should load quickly.
RUNS: dict[str, list[str]] = {
    "healthy": ["addition", "record.every=50"],
    "collapse": [
        "addition", "objective.name=grpo", "update.lr=3e-3", "run.steps=60", "run.eval_every=5", "record.every=5",
    ],
    "tools": ["tools", "run.steps=40", "run.eval_every=5", "record.every=5"],
}  # fmt: skip


def train(name: str, folder: Path) -> None:
    """Train one run in a folder of its own; it may end early, as a collapse does."""
    recipe, *settings = RUNS[name]
    trimtab = [str(Path(sys.executable).parent / "trimtab"), "train", recipe, "--quiet", "--out", str(folder / name)]
    chosen = [word for setting in [*settings, "run.report=false"] for word in ("--set", setting)]
    done = subprocess.run([*trimtab, *chosen], check=False)
    if done.returncode not in (0, 3):
        raise SystemExit(f"{name} ended with exit code {done.returncode}")


def pack(folder: Path) -> None:
    """Put what the reports need of all runs into the archive."""
    ARCHIVE.parent.mkdir(exist_ok=True)
    with tarfile.open(ARCHIVE, "w:xz") as archive:
        for name in RUNS:
            for part in KEPT:
                if (folder / name / part).exists():
                    archive.add(folder / name / part, f"{name}/{part}")


def pages() -> dict[str, bytes]:
    """Return the report of each run, as `trimtab report` writes it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(folder, filter="data")
        return {name: write_report([folder / name]).read_bytes() for name in RUNS}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as runs:
        for each in RUNS:
            train(each, Path(runs))
        pack(Path(runs))
    sys.stdout.write(f"{ARCHIVE}: {ARCHIVE.stat().st_size / 1000:.0f} kB\n")
