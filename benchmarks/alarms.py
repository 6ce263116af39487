"""Measure the alarms on faulty and healthy runs of addition: detection, lead time and false alarms.

`alarms.py run --jobs 14 --out FOLDER` makes the runs and keeps the metrics and the configuration of each; `alarms.py
table FOLDER` replays the alarms over them. So thresholds can be tuned without running anything again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from alarm_suite import REPORTING, SCENARIOS, TUNING, Scenario

RESULTS = Path(__file__).parent / "results" / "alarms-demo"
KEPT = {"metrics.jsonl", "config.toml", "error.txt"}


def make_run(name: str, seed: int, folder: Path, steps: int | None, deadline: float) -> str:
    """Make one run, keep only its metrics and configuration, and return how it ended."""
    from trimtab.cli.display import PlainReporter
    from trimtab.trainer.train import Run, RunStoppedError
    from trimtab.trainer.train.loop import train
    from trimtab.trainer.train.run_folder import RunFolder

    if (folder / "done").exists():
        return "was there already"
    if time.time() > deadline:
        return "not run: the time is up"
    _disable_progress_bar()
    shutil.rmtree(folder, ignore_errors=True)
    scenario, began, outcome = SCENARIOS[name], time.monotonic(), "finished"
    config = scenario.config(seed)
    if steps is not None:
        config = config.model_copy(update={"run": config.run.model_copy(update={"steps": steps})})
    try:
        with scenario.sabotage():
            train(Run(config, RunFolder(folder), PlainReporter(lambda text: None)))
    except RunStoppedError as error:
        outcome = f"stopped: {error}"
    except Exception as error:  # one broken run must not cost the others
        outcome = f"failed: {error!r}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "error.txt").write_text(outcome)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in KEPT:
            path.unlink()
    if not outcome.startswith("failed"):
        (folder / "done").write_text(outcome)
    return f"{outcome:.80}, {time.monotonic() - began:.0f} s"


def _disable_progress_bar() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def warm_keys(scenarios: list[Scenario], seeds: list[int]) -> dict[str, tuple[str, int]]:
    """Return one run for every warm start that the suite needs, by key, so that no two processes make the same one."""
    import torch

    from trimtab.trainer.train.warm_start import cache_key

    torch.set_num_threads(1)
    return {cache_key(s.config(seed)): (s.name, seed) for seed in seeds for s in scenarios}


def run(args: argparse.Namespace) -> int:
    """Make the warm starts, then all runs, seed by seed."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    seeds = args.seeds or [*TUNING, *REPORTING]
    scenarios = [SCENARIOS[name] for name in args.only or SCENARIOS]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "suite.json").write_text(json.dumps(environment(args), indent=1) + "\n")
    deadline, began = time.time() + 60 * args.minutes, time.monotonic()
    warm = warm_keys(scenarios, seeds)
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        jobs = {
            pool.submit(make_run, name, seed, args.out / f".warm-{key}", 1, deadline): f"warm start {key}"
            for key, (name, seed) in warm.items()
        }
        failed = _wait(jobs, began)
        wanted = [(s.name, seed) for seed in seeds for s in scenarios]
        jobs = {
            pool.submit(make_run, name, seed, args.out / _folder(name, seed), args.steps, deadline): _folder(name, seed)
            for name, seed in wanted
        }
        failed += _wait(jobs, began)
    for path in args.out.glob(".warm-*" if args.keep_warm_starts else ".warm*"):
        shutil.rmtree(path)
    print(f"{len(jobs)} runs in {time.monotonic() - began:.0f} s, {failed} failed or not run")
    return int(failed > 0)


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """Return the machine, the date and the versions."""
    import torch
    import transformers

    import trimtab

    versions = {module.__name__: module.__version__ for module in (trimtab, torch, transformers)}
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()} CPU, {args.jobs} runs at a time with one thread each",
        "versions": {"python": platform.python_version(), **versions},
    }


def _folder(name: str, seed: int) -> str:
    return f"{name}-seed{seed}"


def _wait(jobs: dict[Future[str], str], began: float) -> int:
    failed = 0
    for number, future in enumerate(as_completed(jobs)):
        outcome = future.result()
        failed += outcome.startswith(("failed", "not run"))
        print(f"{time.monotonic() - began:5.0f} s  [{number + 1}/{len(jobs)}] {jobs[future]}: {outcome}", flush=True)
    return failed


def table(args: argparse.Namespace) -> int:
    """Print the tables; those of the seeds that thresholds were not tuned on are also written to results."""
    from alarm_figures import figures, markdown, read_run

    seeds = TUNING if args.tuning else REPORTING
    names = [(name, seed) for name in SCENARIOS for seed in seeds]
    runs = [read_run(args.folder / _folder(*each), *each) for each in names if (args.folder / _folder(*each)).exists()]
    if args.runs:
        for run in runs:
            print(f"{run.scenario}-seed{run.seed}: collapse {run.collapse} ({run.how})")
            print("".join(f"    {step} {alarm}: {message}\n" for step, alarm, message in run.rung), end="")
    result = {**json.loads((args.folder / "suite.json").read_text()), **figures(runs, seeds)}
    print(markdown(result))
    if not args.tuning:
        RESULTS.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(markdown(result))
    return 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("run", help="make the runs")
    making.add_argument("--out", type=Path, required=True)
    making.add_argument("--jobs", type=int, default=1)
    making.add_argument("--minutes", type=float, default=60, help="no run starts after so many")
    making.add_argument("--seeds", type=int, nargs="*")
    making.add_argument("--steps", type=int, help="fewer, for a look")
    making.add_argument("--keep-warm-starts", action="store_true", help="for the next call with the same folder")
    making.add_argument("--only", nargs="*", choices=sorted(SCENARIOS))
    making.set_defaults(do=run)
    showing = commands.add_parser("table", help="replay the alarms over runs that were made")
    showing.add_argument("folder", type=Path)
    showing.add_argument("--tuning", action="store_true", help="the seeds to tune on; nothing is written")
    showing.add_argument("--runs", action="store_true", help="print every alarm of every run too")
    showing.set_defaults(do=table)
    args = parser.parse_args()
    return int(args.do(args))


if __name__ == "__main__":
    sys.exit(main())
