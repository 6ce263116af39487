"""SmolLM2-135M learns by RL on one GPU: runs the recipe `smollm2`, or another of its own, and keeps figures and curves.

The exact command is in the result. `--minutes` ends RL by what Ctrl-C does: finish the step, save, stop; a second call
with the same folder goes on.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from result_file import about, save
from trimtab.trainer.config import load
from trimtab.trainer.train import describe_task

CURVES = (
    "eval/accuracy",
    "reward/accuracy",
    "policy/entropy",
    "tokens/silenced_share",
    "update/clip_share",
    "update/grad_norm",
    "response/length_mean",
    "groups/mixed_share",
    "sampler/mismatch_mean",
    "sampler/mismatch_max",
    "time/rollout",
    "time/update",
    "time/tokens_per_second",
    "eval/called_share",
    "conversation/turns_mean",
    "conversation/called_share",
    "conversation/void_share",
    "conversation/observed_tokens_mean",
    "tools/calls",
    "tools/ok",
    "time/tool_call",
    "time/tools_wait_share",
)


def run(command: list[str], minutes: float) -> float:
    """Seconds that the command took; interrupted politely when its time is up."""
    start = time.monotonic()
    with subprocess.Popen(command) as process:
        try:
            process.wait(minutes * 60)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait(120)
    return time.monotonic() - start


def summary(folder: Path, command: list[str], seconds: float) -> dict[str, Any]:
    """Figures and curves of a run, from its metrics."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracy = [(r["step"], r["eval/accuracy"]) for r in records if "eval/accuracy" in r]
    what = "SmolLM2-135M-Instruct, warm-started, then RL on generated problems; held-out accuracy, greedy"
    return {
        **about(what, torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "task": describe_task(load(folder / "config.toml")),
        "command": " ".join(command[3:]),  # from "trimtab" on
        "accuracy_before_rl": accuracy[0][1],
        "accuracy_after_rl": accuracy[-1][1],
        "best_accuracy": max(value for _, value in accuracy),
        "rl_steps": records[-1]["step"],
        "rl_seconds": round(sum(r.get("time/rollout", 0) + r.get("time/update", 0) for r in records), 1),
        "seconds_of_this_call": round(seconds, 1),
        "curves": {
            name: [[r["step"], round(r[name], 6)] for r in records if name in r]
            for name in CURVES
            if any(name in r for r in records)
        },
    }


def main() -> None:
    """Train, then write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="smollm2", help="smollm2, smollm2-zero or smollm2-tools")
    parser.add_argument("--folder", type=Path, default=Path("runs/smollm2-benchmark"))
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], help="passed on to trimtab train")
    args = parser.parse_args()
    settings = [part for setting in args.set for part in ("--set", setting)]
    command = [sys.executable, "-P", "-m", "trimtab", "train"]
    if (args.folder / "config.toml").exists():
        command += ["--resume", str(args.folder), "--quiet"]
    else:
        command += [args.recipe, "--out", str(args.folder), "--quiet", *settings]
    seconds = run(command, args.minutes)
    save(summary(args.folder, command, seconds), args.out)


if __name__ == "__main__":
    main()
