"""The stability study: its stress tests, and one result for each.

`study.py zero --folder RUNS --jobs 5 --minutes 9` runs what is missing of a test, stops after so many minutes, and
writes `results/stress-zero.json`; the same command goes on with it, also on another machine: the metrics of all runs
that have ended are in `results/runs-zero.tar.xz`, and such runs need no weights. Tests of one regime share their runs.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from result_file import about
from trimtab.experiments.grid import Grid, ended_before, parse_axis, run_figures
from trimtab.experiments.grid.stress import as_json, axis_tables
from trimtab.files import mark_folder, write_atomically
from trimtab.objectives import METHODS

RESULTS = Path(__file__).parent / "results"
ABOUT = "about.json"  # in a test's folder: the machine that made its runs, and the versions
KEPT = ("config.toml", "metrics.jsonl", "alarms.jsonl", "nonfinite.jsonl", "ended.json")  # of a run
WIDE_SSPO = "sspo(clip_low=0.2, clip_high=0.28)"  # a token's clip range on subsentences: the first reading of the paper
RIVALS = ("grpo", "dapo", "gspo", "dppo", "sspo", WIDE_SSPO, "stapo", "stare", "stapo + stare")
SSPO_READINGS = (
    WIDE_SSPO,
    "sspo",
    "sspo(clip_low=0.002, clip_high=0.0028)",
    "sspo(clip_low=0.2, clip_high=0.28, clip_scale=sqrt_length)",
)
COMBINATIONS = ("stapo", "gspo", "dppo", "gspo + s2t", "dppo + s2t", "gspo + s2t + stare")
# Micro-batches of this size let eight runs share a GPU.
ON_GPU = ("run.steps=60", "run.eval_every=5", "update.token_budget=8192")
LONG = ("run.steps=120", "run.eval_every=10", "update.token_budget=8192", "rollout.prompts=32")
HALF_BATCH = ("run.steps=40", "run.eval_every=4", "update.token_budget=8192", "rollout.prompts=32")


@dataclass(frozen=True)
class Study:
    """One stress test of the study; `regime` names the archive of its runs."""

    what: str
    regime: str
    recipe: str
    objectives: tuple[str, ...]
    axes: tuple[str, ...]
    settings: tuple[str, ...]
    seeds: int = 3
    search: bool = True

    def test(self, folder: Path, jobs: int = 1) -> Grid:
        """Return the stress test in a folder."""
        axes = tuple(parse_axis(axis) for axis in self.axes)
        return Grid(self.objectives, folder, self.recipe, self.seeds, self.settings, jobs, axes, self.search)


STUDIES = {
    "zero": Study(
        "SmolLM2-135M by RL from nothing, pushed by the learning rate",
        "zero",
        "smollm2-zero",
        RIVALS,
        ("update.lr=3e-5,6e-5,1e-4,2e-4",),
        ON_GPU,
    ),
    "warm": Study(
        "SmolLM2-135M by RL after a warm start, pushed by the learning rate",
        "warm",
        "smollm2",
        RIVALS,
        ("update.lr=2e-5,3e-5,5e-5,1e-4",),
        HALF_BATCH,
    ),
    "sspo": Study(
        "readings of SSPO's clip range, pushed by the learning rate",
        "warm",
        "smollm2",
        SSPO_READINGS,
        ("update.lr=2e-5,3e-5,5e-5,1e-4",),
        HALF_BATCH,
    ),
    "combinations": Study(
        "combinations and their parts, pushed by the learning rate",
        "warm",
        "smollm2",
        COMBINATIONS,
        ("update.lr=2e-5,3e-5,5e-5,1e-4",),
        HALF_BATCH,
    ),
    "further": Study(
        "wrong verdicts, one seed",
        "further",
        "smollm2",
        RIVALS,
        ("reward.noise=0.2,0.4",),
        (*HALF_BATCH, "update.lr=2e-5"),
        seeds=1,
        search=False,
    ),
    "off-policy": Study(
        "eight updates per step, so that later ones are further off-policy",
        "further",
        "smollm2",
        ("grpo", "dapo", "gspo", "dppo", "sspo", "stapo", "stare"),
        ("update.per_step=8",),
        (*HALF_BATCH, "update.lr=2e-5"),
        search=False,
    ),
    "entropy": Study(
        "whether the entropy is held, and pays, where easy and hard problems are mixed and there is time to learn both",
        "entropy",
        "smollm2-zero",
        ("grpo", "dapo", "stare", "stapo + stare", "stapo"),
        ("update.lr=3e-5",),
        (*LONG, "task.min_terms=2", "task.terms=4"),
        search=False,
    ),
    "demo": Study(
        "a tiny model on addition under every method, pushed by the learning rate",
        "demo",
        "addition",
        (*METHODS, WIDE_SSPO),
        ("update.lr=3e-4,6e-4,1.2e-3,2.4e-3",),
        ("run.steps=60", "run.eval_every=5", "run.eval_problems=256", "run.threads=1", "run.device=cpu"),
    ),
}


def run(study: Study, folder: Path, jobs: int, minutes: float) -> int:
    """Run the test for so many minutes at most; return its exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() and study.recipe != "addition" else "cpu")
    mark_folder(folder, "stress", [path.name for path in folder.iterdir()])  # what an archive has restored
    write_atomically(folder / ABOUT, json.dumps(about(study.what, device)))
    command = [sys.executable, "-P", "-m", *study.test(folder, jobs).command()]
    with subprocess.Popen(command) as process:
        end = time.monotonic() + 60 * minutes
        while process.poll() is None and time.monotonic() < end:
            time.sleep(1)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # runs under way end with a checkpoint
        return process.wait()


def save_result(study: Study, name: str, folder: Path) -> None:
    """Write the figures of all runs that have ended, also of those that a search did not ask for."""
    test = study.test(folder)
    ended = [outcome for run in test.runs(test.cells()) if (outcome := ended_before(run))]
    tables = axis_tables(test, [run_figures(outcome) for outcome in ended])
    # Studies of one regime share a folder, and so its head: what was run differs.
    head = json.loads((folder / ABOUT).read_text()) | {"what": study.what}
    # The head goes before the first key, so that the file keeps its one line per run.
    text = as_json(replace(test, out=Path("runs") / name), [table for table in tables if table.runs])
    head_text = json.dumps(head, indent=1).removesuffix("\n}")
    write_atomically(RESULTS / f"stress-{name}.json", head_text + "," + text.removeprefix("{"))


def pack(folder: Path, archive: Path) -> None:
    """Keep the small files of all runs that have ended."""
    with tarfile.open(archive, "w:xz") as packed:
        packed.add(folder / ABOUT, ABOUT)
        for ended in sorted(folder.glob("*/ended.json")):
            for path in (ended.parent / name for name in KEPT):
                if path.exists():
                    packed.add(path, path.relative_to(folder))


def unpack(archive: Path, folder: Path) -> None:
    """Restore the runs of an archive that are not there."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as packed:
        for member in packed.getmembers():
            if not (folder / member.name).exists():
                packed.extract(member, folder, filter="data")


def main() -> int:
    """Run one test of the study as far as the time goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e6, help="0: only write the result")
    args = parser.parse_args()
    study = STUDIES[args.study]
    archive = RESULTS / f"runs-{study.regime}.tar.xz"
    if archive.exists():
        unpack(archive, args.folder)
    code = run(study, args.folder, args.jobs, args.minutes) if args.minutes else 0
    pack(args.folder, archive)
    save_result(study, args.study, args.folder)
    return code


if __name__ == "__main__":
    sys.exit(main())
