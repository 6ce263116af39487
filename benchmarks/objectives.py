"""How much the methods cost: plan + loss + backward, as ratios to GRPO in one run, and how the time grows.

Run it on a CPU or on a GPU (`--device cuda`); the result is JSON with the machine, the versions and the date. Absolute
times on shared machines wander, so each method's rounds alternate with GRPO's and the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import trimtab as tt
from result_file import about, save
from trimtab.objectives import METHODS

RESPONSE = 1000  # tokens of a response
SEGMENT = 12  # tokens of a subsentence
# glibc hands memory back after every update and faults it in again: up to two thirds of the time, and all of the noise.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
HEADLINE = ("stapo", "stare", "sspo")


def make_batch(tokens: int, device: str) -> tuple[tt.TokenBatch, torch.Tensor]:
    """A batch that looks like training: most tokens near-certain, a few surprising, advantages per response."""
    rng = torch.Generator(device).manual_seed(0)

    def rand() -> torch.Tensor:
        return torch.rand(tokens, generator=rng, device=device)

    position = torch.arange(tokens, device=device)
    responses = -(-tokens // RESPONSE)
    advantage = torch.randn(responses, generator=rng, device=device)
    old = -(rand() ** 6) * 9
    sequence = position // RESPONSE
    batch = tt.TokenBatch(
        old_logp=old,
        advantage=advantage[sequence],
        sequence=sequence,
        entropy=rand() ** 3,
        segment=position // SEGMENT,
        sampler_logp=old,
        ref_logp=old,
        responses=responses,
    )
    _ = batch.lengths, batch.offsets, batch.spans  # found once per batch, whatever the method
    return batch, old + 0.1 * torch.randn(tokens, generator=rng, device=device)


def update(objective: tt.Objective, batch: tt.TokenBatch, new: torch.Tensor, responses: int | None = None) -> None:
    """What an update costs beside the model: plan, then loss and gradient, in micro-batches of `responses` if given."""
    plan = objective.plan(batch)
    for micro_batch in [plan] if responses is None else plan.split(responses):
        leaf = new[micro_batch.slice].detach().requires_grad_()
        out = objective.loss(leaf, micro_batch)
        out.loss.backward()
        _ = out.metrics  # computed on first access


def clock(*update_arguments: Any) -> float:
    """Seconds of one update, the device's work included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    update(*update_arguments)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def ratios(tokens: int, device: str, rounds: int) -> dict[str, Any]:
    """Every method's time over GRPO's, rounds interleaved."""
    batch, new = make_batch(tokens, device)
    grpo = tt.objective("grpo")
    result: dict[str, Any] = {}
    for name in METHODS:
        method = tt.objective(name)
        for warm in (grpo, method, grpo, method):
            update(warm, batch, new)
        pairs = [(clock(grpo, batch, new), clock(method, batch, new)) for _ in range(rounds)]
        base, mine = (median(times) for times in zip(*pairs, strict=True))
        result[name] = {"ms": round(mine * 1e3, 3), "grpo_ms": round(base * 1e3, 3), "ratio": round(mine / base, 3)}
    return result


def growth(device: str, rounds: int) -> dict[str, Any]:
    """Nanoseconds per token from 100 thousand to 10 million tokens, the loss in micro-batches of 100 responses."""
    result: dict[str, Any] = {}
    for tokens in (100_000, 1_000_000, 10_000_000):
        batch, new = make_batch(tokens, device)
        for name in ("grpo", *HEADLINE):
            arguments = (tt.objective(name), batch, new, 100)
            update(*arguments)
            seconds = median([clock(*arguments) for _ in range(rounds)])
            result.setdefault(name, {})[str(tokens)] = round(seconds / tokens * 1e9, 3)
    return result


def host_waits(tokens: int) -> dict[str, Any]:
    """How often plan and loss make the host wait for the GPU, by torch's own account."""
    batch, new = make_batch(tokens, "cuda")
    result: dict[str, Any] = {}
    for name in METHODS:
        method = tt.objective(name)
        plan = method.plan(batch)
        result[name] = {"plan": waits(partial(method.plan, batch)), "loss": waits(partial(method.loss, new, plan))}
    return result


def waits(run: Callable[[], object]) -> int:
    """Synchronising calls in `run`."""
    torch.cuda.set_sync_debug_mode("warn")  # outside of what is recorded: torch warns that this mode is a prototype
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in seen)


def import_seconds() -> dict[str, float]:
    """What `import trimtab.objectives` costs beyond `import torch`, in fresh interpreters."""

    def spent(statement: str) -> float:
        code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
        runs = [
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)
        ]
        return min(float(run.stdout) for run in runs)

    base = spent("import torch")
    return {
        "torch": round(base, 3),
        "trimtab.objectives beyond it": round(spent("import trimtab.objectives") - base, 3),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.device == "cpu" and not os.environ.keys() >= KEEP_MEMORY.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_MEMORY)
    what = f"plan + loss + backward, {args.tokens} tokens; ratio to GRPO in the same run"
    result = about(what, torch.device(args.device)) | {
        "allocator": KEEP_MEMORY if args.device == "cpu" else "torch's",
        "ratios": ratios(args.tokens, args.device, args.rounds),
        "nanoseconds_per_token": growth(args.device, max(3, args.rounds // 4)),
        "import_seconds": import_seconds(),
    }
    if args.device == "cuda":
        result["host_waits"] = host_waits(args.tokens)
    print(json.dumps(result, indent=1))
    if args.out:
        save(result, args.out)


if __name__ == "__main__":
    main()
