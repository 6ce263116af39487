"""Several processes on one GPU: what the parallel path costs, and whether two ranks agree with one and their forecast.

- `overhead`: steps of a trainer of one process, and of one whose only process goes through the parallel path (process
  group, sharded optimizer), in turns. Their ratio is the price of the parallel path.
- `ranks`: the same steps by one rank and by two ranks that share this GPU (gloo, since NCCL refuses that): sampled
  tokens, metrics and weights are compared.
- `memory`: each rank's peak of memory beside the forecast of `--dry-run`, with whole and with split layers, for a model
  with random weights whose responses all have their full length.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

import trimtab.trainer.model.loading
from memory import LLAMA, Setting, config_of, random_weights, save_shape
from result_file import about, added_to, save
from stopwatch import seconds_of
from trimtab.trainer.config import Config, load
from trimtab.trainer.memory.estimate import estimate_memory
from trimtab.trainer.parallel import World, join_world, whole_tensor
from trimtab.trainer.train.loop import train_step
from trimtab.trainer.train.rollouts import collect_rollouts
from trimtab.trainer.train.trainer import RunProgress, Trainer, build_trainer

DEVICE = "cuda:0"  # of all ranks: they share it
COMPARED = ("reward/mean", "policy/entropy", "update/loss", "update/grad_norm", "tokens/count", "sampler/mismatch_mean")


def one_process() -> World:
    """Join a world of one process."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    return join_world("auto")


def overhead(config: Config, rounds: int) -> dict[str, Any]:
    """Time steps with and without the parallel path, in turns."""
    world = one_process()
    trainers = {"alone": build_trainer(config), "parallel": build_trainer(config, world=world)}
    progress = {name: RunProgress() for name in trainers}
    times: dict[str, list[float]] = {name: [] for name in trainers}
    device = trainers["alone"].policy.device
    for number in range(rounds + 2):
        for name, trainer in trainers.items():

            def step(trainer: Trainer = trainer, progress: RunProgress = progress[name]) -> None:
                train_step(trainer, progress)

            seconds = seconds_of(step, device)
            if number >= 2:  # the first steps compile kernels and capture graphs
                times[name].append(seconds)
    ratios = [b / a for a, b in zip(times["alone"], times["parallel"], strict=True)]
    world.leave()
    return {
        "steps": rounds,
        "seconds": {name: round(median(values), 4) for name, values in times.items()},
        "ratio": round(median(times["parallel"]) / median(times["alone"]), 4),
        "ratio_of_pairs": [round(ratio, 4) for ratio in sorted(ratios)],
    }


def work(config: Config, steps: int, out: Path) -> None:
    """Take steps as one of the ranks; rank 0 writes what there is to compare."""
    world = join_world(config.run.device)
    trainer, progress = build_trainer(config, world=world), RunProgress()
    rollouts = collect_rollouts(trainer, RunProgress())
    tokens = {(r.group, r.response.sample): list(r.response.tokens) for r in rollouts.responses}
    metrics = [train_step(trainer, progress).metrics for _ in range(steps)]
    named = trainer.policy.model.named_parameters()
    weights = {name: whole_tensor(p).detach().cpu() for name, p in named}
    if world.leads:
        torch.save({"tokens": tokens, "weights": weights, "metrics": metrics}, out)
    world.leave()


def measure_memory(shard: bool, out: Path) -> None:
    """Take two steps as one of the ranks; rank 0 writes the peaks of the second and the forecast."""
    setting = Setting("Llama 135M", LLAMA, prompts=64, budget=16_384, model={"shard": shard})
    with tempfile.TemporaryDirectory() as folder:
        save_shape(setting, folder)
        config = config_of(setting, folder, DEVICE)
        world = join_world(DEVICE)
        with patch.object(trimtab.trainer.model.loading, "read_pretrained", random_weights(DEVICE)):
            trainer, progress = build_trainer(config, world=world), RunProgress()
        train_step(trainer, progress)
        torch.cuda.reset_peak_memory_stats()
        metrics = train_step(trainer, progress).metrics
        peaks = world.gather(torch.cuda.max_memory_allocated())
        total = torch.cuda.get_device_properties(trainer.policy.device).total_memory
        forecast = estimate_memory(config, "cuda", total, world.size if world.parallel else None)
    if world.leads:
        found = {
            "ranks": len(peaks),
            "shard": shard,
            "mean_length": round(metrics["response/length_mean"], 1),
            "peak_gb": [round(peak / 1e9, 3) for peak in peaks],
            "forecast_gb": round(forecast.peak / 1e9, 3),
            "phase": forecast.worst_phase,
            "forecast_of_peak": [round(forecast.peak / peak, 4) for peak in peaks],
        }
        torch.save(found, out)
    world.leave()


def run_ranks(arguments: Sequence[str], ranks: int, out: Path) -> dict[str, Any]:
    """Run this script as so many ranks; one rank goes without the parallel path."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [__file__, *arguments, "--work", str(out)]
    if ranks == 1:  # which has all layers
        command += ["--set", "model.shard=false"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    subprocess.run([sys.executable, *launcher, *command], check=True, env=environment)
    found: dict[str, Any] = torch.load(out, weights_only=False)
    return found


def compare(one: dict[str, Any], several: dict[str, Any]) -> dict[str, Any]:
    """Compare the steps of one rank with those of several."""
    equal = [several["tokens"][key] == tokens for key, tokens in one["tokens"].items()]
    change = {name: (several["weights"][name] - weight).abs().max().item() for name, weight in one["weights"].items()}
    scale = max(weight.abs().max().item() for weight in one["weights"].values())
    return {
        "equal_responses_of_step_1": sum(equal) / len(equal),
        "largest_difference_of_weights": max(change.values()),
        "largest_weight": scale,
        "metrics": [
            {name: [row[name], other[name]] for name in COMPARED if name in row}
            for row, other in zip(one["metrics"], several["metrics"], strict=True)
        ],
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["overhead", "ranks", "memory"])
    parser.add_argument("--recipe", default="smollm2-zero")
    parser.add_argument("--set", action="append", default=[], help="of the recipe")
    parser.add_argument("--rounds", type=int, default=8, help="pairs of steps of `overhead`")
    parser.add_argument("--steps", type=int, default=3, help="of `ranks`")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shard", action="store_true", help="split layers; used by `memory` itself")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="take part as a rank; used by the script itself")
    args = parser.parse_args()
    config = load(args.recipe, [*args.set, "warm_start.steps=0", "record.enabled=false"])
    if args.work:
        if "memory" in args.what:
            measure_memory(args.shard, args.work)
        else:
            work(config, args.steps, args.work)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = added_to(args.out, about("several processes on one GPU", device))
    if "ranks" in args.what:
        with tempfile.TemporaryDirectory() as folder:
            arguments = ["ranks", *(part for each in args.set for part in ("--set", each)), "--recipe", args.recipe]
            arguments += ["--steps", str(args.steps), "--out", str(args.out), "--set", f"run.device={DEVICE}"]
            one, several = (run_ranks(arguments, n, Path(folder) / f"{n}.pt") for n in (1, args.ranks))
        result["ranks"] = compare(one, several)
        save(result, args.out)
    if "memory" in args.what:
        result["memory"] = []
        for ranks, shard in ((1, False), (args.ranks, False), (args.ranks, True)):
            arguments = ["memory", "--out", str(args.out), *["--shard"] * shard]
            with tempfile.TemporaryDirectory() as folder:
                result["memory"].append(run_ranks(arguments, ranks, Path(folder) / "found.pt"))
            save(result, args.out)
    if "overhead" in args.what:
        result["overhead"] = overhead(config, args.rounds)
        save(result, args.out)
    print(result)


if __name__ == "__main__":
    main()
