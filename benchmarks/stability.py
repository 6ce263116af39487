"""SmolLM2-135M by RL without a warm start, pushed by the learning rate: one run per objective, learning rate and seed.

Finished runs are in the result and are not run again; `--minutes` ends the work after the run under way, so the grid
can be filled over several calls. Sums of two 1-digit numbers in words: the base model starts at 0 % and entropy 2.2.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch

from stopwatch import about, save
from trimtab.files import read_json_lines

TASK = ("warm_start.steps=0", "task.digits=1", "task.terms=2")
# Nothing but metrics is kept of a run, so nothing else is written.
LEAN = ("run.report=false", "run.checkpoint_every=0", "record.enabled=false", "run.eval_every=5")
CURVES = (
    "eval/accuracy",
    "reward/accuracy",
    "policy/entropy",
    "update/grad_norm",
    "update/clip_share",
    "update/ratio_max",
    "update/approx_kl",
    "update/skipped",
    "tokens/silenced_share",
    "tokens/boosted_share",
    "tokens/top_gradient_share",
    "groups/mixed_share",
    "response/length_mean",
    "response/truncated_share",
    "response/repetition_share",
    "sampler/mismatch_max",
)


def train(objective: str, lr: float, seed: int, steps: int, settings: list[str]) -> dict[str, Any]:
    """Run one cell of the grid and return its curves and its seconds."""
    cell = (f"objective.name={objective}", f"update.lr={lr}", f"run.seed={seed}", f"run.steps={steps}")
    with tempfile.TemporaryDirectory() as folder:
        flags = [flag for setting in (*TASK, *LEAN, *cell, *settings) for flag in ("--set", setting)]
        command = [sys.executable, "-m", "trimtab", "train", "smollm2", "--quiet", "--out", f"{folder}/run", *flags]
        start = time.monotonic()
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        seconds = time.monotonic() - start
        rows = read_json_lines(Path(folder) / "run" / "metrics.jsonl")
        if not rows:  # it never started: kept as a result, it would not be run again
            raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        alarms = read_json_lines(Path(folder) / "run" / "alarms.jsonl")
    return {
        "objective": objective,
        "lr": lr,
        "seed": seed,
        "settings": [*TASK, *cell, *settings],
        "exit_code": done.returncode,
        "last_message": done.stderr.strip()[-500:],
        "seconds": round(seconds, 1),
        "alarms": [[alarm["step"], alarm["alarm"]] for alarm in alarms],
        "curves": {name: [[r["step"], round(r[name], 6)] for r in rows if name in r] for name in CURVES},
    }


def main() -> None:
    """Fill the grid as far as the time goes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("objectives", nargs="+")
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-5, 1e-4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--set", action="append", default=[], help="passed on to trimtab train")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runs = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    end = time.monotonic() + 60 * args.minutes
    for seed, lr, objective in product(args.seeds, args.lr, args.objectives):
        finished = any((r["objective"], r["lr"], r["seed"]) == (objective, lr, seed) for r in runs)
        if finished or time.monotonic() > end:
            continue
        runs.append(train(objective, lr, seed, args.steps, args.set))
        accuracy = runs[-1]["curves"]["eval/accuracy"]
        print(objective, lr, seed, runs[-1]["seconds"], "s", [value for _, value in accuracy], flush=True)
        save(
            {
                **about("RL from nothing under raised learning rates", device),
                "command": " ".join(sys.argv),
                "runs": runs,
            },
            args.out,
        )


if __name__ == "__main__":
    main()
