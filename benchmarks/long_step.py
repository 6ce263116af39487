"""One whole step with long responses: Qwen3-1.7B's shape, 64 responses of up to 15,360 tokens, on one GPU.

The recipe sets sizes only; everything else has its default. Weights are random. A share of the vocabulary ends a
response, so lengths are ragged with a given mean; with `--full` all responses reach the limit, as the dry run
assumes. A first step with short responses makes the optimizer's state; the second is measured: seconds by phase,
peak memory by phase beside the estimate, and the share of what bandwidth (sampling) and arithmetic (the rest) allow.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch

import mfu
import trimtab.trainer.model.loading
from memory import PROMPT, QWEN, TINY, Setting, config_of, estimate, metering, random_weights, save_shape
from result_file import about, save
from sampler import PEAK, active_rows, copy_speed
from step import PHASES, watching
from stopwatch import Stopwatch, forget, settle, shares
from trimtab.data import Response
from trimtab.trainer.train.build import build_sampler
from trimtab.trainer.train.loop import train_step
from trimtab.trainer.train.trainer import RunProgress, Trainer, build_trainer
from turns import failure

RESPONSES, LONGEST, MEAN = 64, 15_360, 5120
SHORT = 32  # mean length in the step that is not measured


def end_after(trainer: Trainer, mean: float | None) -> None:
    """Let as many tokens end a response as give this mean length; None: no token does."""
    size = int(trainer.policy.causal_lm.config.vocab_size)
    ends = frozenset(range(max(1, round(size / mean)))) if mean else frozenset({size})
    vars(trainer.policy)["eos_token_ids"] = ends  # a cached property keeps its value there
    trainer.sampler = build_sampler(trainer.policy, trainer.config.rollout)


def measure(setting: Setting, device: str, mean: float | None) -> dict[str, Any]:
    """Take a short step and a long one; return the figures of the long one."""
    lengths, watch = list[int](), Stopwatch(torch.device(device))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        save_shape(setting, folder)
        stack.enter_context(patch.object(trimtab.trainer.model.loading, "read_pretrained", random_weights(device)))
        trainer, progress = build_trainer(config_of(setting, folder, device)), RunProgress()
        end_after(trainer, min(SHORT, setting.new / 2))
        train_step(trainer, progress)
        end_after(trainer, mean)
        forget(trainer.policy.device)
        original = trainer.sampler.sample

        def sample(*args: Any) -> list[list[Response]]:
            groups: list[list[Response]] = original(*args)
            lengths.extend(len(response.tokens) for group in groups for response in group)
            return groups

        stack.enter_context(patch.object(trainer.sampler, "sample", sample))
        meter = stack.enter_context(metering(trainer))
        meter.on = True
        start = time.perf_counter()
        with watching(trainer, watch):
            metrics = train_step(trainer, progress).metrics
        settle(trainer.policy.device)
        seconds = time.perf_counter() - start
    return {
        "seconds": round(seconds, 2),
        "tokens": int(metrics["tokens/count"]),
        "tokens_per_second": round(metrics["tokens/count"] / seconds),
        "lengths": {
            "mean": round(fmean(lengths), 1),
            "longest": max(lengths),
            "reached_the_limit": _cut(lengths, setting),
        },
        "where": shares(watch.seconds, 1, PHASES),
        "peaks": meter.peaks,
        "reserved": torch.cuda.max_memory_reserved() if device == "cuda" else None,
        "preemptions": metrics.get("rollout/preemptions"),
        "all_lengths": " ".join(map(str, lengths)),
    }


def _cut(lengths: Sequence[int], setting: Setting) -> int:
    return sum(length == setting.new for length in lengths)


def limits(setting: Setting, seen: dict[str, Any], speed: float) -> dict[str, Any]:
    """Return the least seconds of sampling, scoring and update, and the share of the measured time that they are."""
    shape = setting.shape
    model = mfu.Shape(
        shape["num_hidden_layers"], shape["hidden_size"], shape["num_attention_heads"], shape["num_key_value_heads"],
        shape["head_dim"], shape["intermediate_size"], shape["vocab_size"], (), (), 0,
    )  # fmt: skip
    lengths = [int(length) for length in seen["all_lengths"].split()]
    weights = 2.0 * (model.weights + model.vocabulary * model.width)
    read = sum(length * PROMPT + length * (length - 1) // 2 for length in lengths)
    cache = 2.0 * model.layers * 2 * model.kv_heads * model.head_size * read
    update = sum(mfu.flops(model, [PROMPT] * len(lengths), lengths).values()) / PEAK
    sampling = sum(max(weights / speed, weights * rows / PEAK) for rows in active_rows(lengths)) + cache / speed
    least = {"sample": sampling, "score": update / 3, "forward and backward": update}
    return {
        phase: {"seconds": round(s, 3), "share": round(s / max(1e-9, seen["where"][phase]["ms"] / 1e3), 3)}
        for phase, s in least.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Estimate, measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mean", type=float, default=MEAN, help="mean length of a response without the limit")
    parser.add_argument("--longest", type=int, default=LONGEST)
    parser.add_argument("--full", action="store_true", help="every response reaches the limit")
    parser.add_argument("--small", action="store_true", help="a tiny model on a CPU, to try the script")
    given = parser.parse_args(arguments)
    device = "cpu" if given.small else "cuda"
    setting = Setting("Qwen3 1.7B, long responses", QWEN, RESPONSES // 8, 16_384, RESPONSES, given.longest)
    if given.small:
        setting = replace(setting, shape=QWEN | TINY, budget=512, new=min(given.longest, 120))
    result = about("one step with long responses, beside estimate and limits", torch.device(device))
    result["setting"] = {"responses": RESPONSES, "new_tokens": setting.new, "token_budget": setting.budget}
    result["copy_bytes_per_second"] = speed = copy_speed(torch.device(device), 2**24 if given.small else 2**32)
    forget(torch.device(device))
    try:
        result["estimated"] = estimate(setting, device)
        result["measured"] = seen = measure(setting, device, None if given.full else min(given.mean, setting.new / 3))
        result["limits"] = limits(setting, seen, speed)
        peaks, estimated = seen["peaks"], result["estimated"]
        result["ratios"] = {phase: round(estimated[phase] / peak, 3) for phase, peak in peaks.items() if peak}
        result["ratios"]["peak"] = round(estimated["peak"] / max(peaks.values()), 3)
    except Exception as error:  # out of memory is a result too
        traceback.print_exc()
        result |= failure(error)
    save(result, given.out)
    print({key: result.get(key) for key in ("error", "limits", "ratios")})
    print({key: value for key, value in result.get("measured", {}).items() if key != "all_lengths"})


if __name__ == "__main__":
    main()
