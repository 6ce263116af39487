"""What the recipe `agent` learns: held-out accuracy before RL and during it, and what a run takes, for several seeds.

`agent_recipe.py --out FILE` runs `trimtab train agent` once for each seed, one after another, as anybody does. The
seeds of several calls are put together in FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from result_file import CPU, about, added_to, save


def main() -> None:
    """Run every seed and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the recipe; repeatable")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    head = about("the recipe agent, one run for each seed", CPU, "openai") | {"machine": f"CPU, {os.cpu_count()} cores"}
    made = []
    for seed in args.seeds:
        made.append({"seed": seed, **run(seed, args.set)})
        print(json.dumps(made[-1]))
    result = added_to(args.out, head)  # only now: another call may have written it meanwhile
    result["runs"] = sorted([*result.get("runs", []), *made], key=lambda each: each["seed"])
    save(result, args.out)


def run(seed: int, settings: list[str]) -> dict[str, Any]:
    """Train with a seed; the warm start is made anew, since its seconds count too."""
    folder = Path(tempfile.mkdtemp())
    command = [sys.executable, "-m", "trimtab", "train", "agent", "--quiet", "--out", str(folder / "run")]
    for setting in [f"run.seed={seed}", *settings]:
        command += ["--set", setting]
    environment = os.environ | {"TRIMTAB_WARM_START": str(folder / "warm_start")}
    before, begun = _cpu_seconds(), time.perf_counter()
    try:
        subprocess.run(command, check=True, env=environment, cwd=folder)
        seconds, cpu_seconds = time.perf_counter() - begun, _cpu_seconds() - before
        lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    finally:
        shutil.rmtree(folder)
    steps = [json.loads(line) for line in lines]
    return {
        "held_out": [[step["step"], step["eval/accuracy"]] for step in steps if "eval/accuracy" in step],
        "sampled": [[step["step"], step["reward/accuracy"]] for step in steps if "reward/accuracy" in step],
        "requests": [[step["step"], step["agent/requests_mean"]] for step in steps if "agent/requests_mean" in step],
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
    }


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
