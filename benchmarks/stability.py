"""SmolLM2-135M by RL without a warm start, pushed by the learning rate: one run per objective, learning rate and seed.

Finished runs are in the result and are not run again; `--minutes` ends the work after the runs under way, so the grid
can be filled over several calls. `--jobs` runs share the GPU: a run of a small model alone leaves most of it idle.
The recipe is smollm2-zero: stories with 1-digit numbers, on which the base model starts at 0 % and entropy 2.2.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

import torch

from stopwatch import about
from trimtab.files import read_json_lines, write_atomically

RECIPE = "smollm2-zero"
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
    "tokens/spurious_share",
    "tokens/count",
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
        flags = [flag for setting in (*LEAN, *cell, *settings) for flag in ("--set", setting)]
        command = [
            sys.executable,
            "-P",
            "-m",
            "trimtab",
            "train",
            RECIPE,
            "--quiet",
            "--out",
            f"{folder}/run",
            *flags,
        ]
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
        "recipe": RECIPE,
        "settings": [*cell, *settings],
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
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], help="passed on to trimtab train")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    before = json.loads(args.out.read_text()) if args.out.exists() else {"commands": [], "runs": []}
    runs, commands = before["runs"], [*before["commands"], shlex.join(sys.argv)]
    known = {(r["objective"], r["lr"], r["seed"]) for r in runs}
    end = time.monotonic() + 60 * args.minutes

    def train_in_time(objective: str, lr: float, seed: int) -> dict[str, Any] | None:
        return train(objective, lr, seed, args.steps, args.set) if time.monotonic() < end else None

    with ThreadPoolExecutor(args.jobs) as pool:
        grid = [(o, lr, seed) for seed, lr, o in product(args.seeds, args.lr, args.objectives)]
        for future in as_completed([pool.submit(train_in_time, *cell) for cell in grid if cell not in known]):
            if (run := future.result()) is None:
                continue
            runs.append(run)
            accuracy = [value for _, value in run["curves"]["eval/accuracy"]]
            print(run["objective"], run["lr"], run["seed"], run["seconds"], "s", accuracy, flush=True)
            head = about("RL from nothing under raised learning rates", device)
            # One line per run: with one line per number the file had 120,000 lines.
            lines = ",\n".join(json.dumps(run) for run in runs)
            text = json.dumps({**head, "commands": commands, "runs": "RUNS"}, indent=1)
            write_atomically(args.out, text.replace('"RUNS"', f"[\n{lines}\n]") + "\n")


if __name__ == "__main__":
    main()
