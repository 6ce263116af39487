"""Peak memory as estimated by `trimtab train --dry-run` and as measured, phase by phase.

Each setting runs in its own process: a model with random weights trains for two steps, and the second is measured,
since the first starts without gradients and optimizer state. A model with random weights hardly ever ends a response,
so all reach their maximal length, as the estimate assumes. On a GPU the measure is torch's count of allocated bytes;
with `--small`, on a CPU, the bytes of all living tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import trimtab.trainer.model.loading
from result_file import about, save
from trimtab.trainer.config import Config, parse
from trimtab.trainer.memory.estimate import SMOLLM2, estimate_memory
from trimtab.trainer.memory.fake_model import MemoryTracker
from trimtab.trainer.model.loading import demo_tokenizer
from trimtab.trainer.train import loop, scoring
from trimtab.trainer.train.loop import train_step
from trimtab.trainer.train.trainer import RunProgress, build_trainer

PHASES = ("sampling", "scoring", "update", "optimizer_step")
AT_ONCE = 3  # processes on one GPU; each counts its own bytes
PROMPT = 8

LLAMA = {"model_type": "llama", **SMOLLM2}
QWEN = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


@dataclass(frozen=True)
class Setting:
    """A model's shape, and what the recipe sets for it."""

    name: str
    shape: dict[str, Any]
    prompts: int
    budget: int
    batch: int = 1024
    new: int = 248
    model: dict[str, Any] = field(default_factory=dict)


FULL = [
    Setting("Llama 135M", LLAMA, 64, 16_384),
    Setting("Llama 135M, twice the token budget", LLAMA, 64, 32_768),
    Setting("Llama 135M, half the sampling batch", LLAMA, 64, 16_384, 256),
    Setting("Llama 135M, gradient checkpointing", LLAMA, 64, 32_768, model={"gradient_checkpointing": True}),
    Setting("Qwen3 1.7B", QWEN, 32, 8192),
    Setting("Qwen3 1.7B, one micro-batch", QWEN, 4, 8192),
    Setting("Qwen3 1.7B, gradient checkpointing", QWEN, 32, 32_768, model={"gradient_checkpointing": True}),
    Setting("Qwen3 1.7B, LoRA", QWEN, 32, 8192, model={"lora_rank": 16}),
]
SMALL = [
    Setting("tiny Llama", LLAMA | TINY, 8, 512, new=24),
    Setting("tiny Qwen3, gradient checkpointing", QWEN | TINY, 8, 512, new=24, model={"gradient_checkpointing": True}),
]


@dataclass
class Meter:
    """Measures the peak of each phase; a phase inside another does not count for the outer one."""

    peak: Callable[[], int]
    reset: Callable[[], None]
    peaks: dict[str, int] = field(default_factory=dict)
    on: bool = False
    _open: list[str] = field(default_factory=list)

    def around(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return the function, measured as a phase."""

        def metered(*args: Any, **options: Any) -> Any:
            self._count()
            self._open.append(name)
            try:
                return function(*args, **options)
            finally:
                self._count()
                self._open.pop()

        return metered

    def _count(self) -> None:
        if self._open and self.on:
            self.peaks[self._open[-1]] = max(self.peaks.get(self._open[-1], 0), self.peak())
        self.reset()


def config_of(setting: Setting, folder: str, device: str) -> Config:
    """Return the recipe of a setting."""
    return parse(
        {
            "objective": {"name": "grpo"},
            "model": {"path": folder, "precision": "bf16" if device.startswith("cuda") else "fp32", **setting.model},
            "rollout": {
                "prompts": setting.prompts,
                "samples": 8,
                "max_prompt_tokens": PROMPT,
                "max_new_tokens": setting.new,
                "batch_size": setting.batch,
            },
            "update": {"token_budget": setting.budget},
            "run": {"device": device, "eval_every": 0},
        }
    )


def save_shape(setting: Setting, folder: str) -> None:
    """Write a model's folder with its config and without weights."""
    from transformers import AutoConfig

    AutoConfig.for_model(**setting.shape, eos_token_id=1).save_pretrained(folder)


def measure(setting: Setting, device: str) -> dict[str, Any]:
    """Train for two steps; return the peaks of the second."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        save_shape(setting, folder)
        stack.enter_context(patch.object(trimtab.trainer.model.loading, "read_pretrained", random_weights(device)))
        trainer = build_trainer(config_of(setting, folder, device))
        meter, progress = stack.enter_context(metering(trainer)), RunProgress()
        start = time.perf_counter()
        for number in range(2):
            meter.on = number == 1
            metrics = train_step(trainer, progress).metrics
        length = metrics["tokens/count"] / (setting.prompts * 8)
        seconds = time.perf_counter() - start
    return {
        "peaks": meter.peaks,
        "reserved": torch.cuda.max_memory_reserved() if device == "cuda" else None,
        "sampler": type(trainer.sampler).__name__,
        "mean_length": round(length, 1),
        "two_steps_seconds": round(seconds, 2),
    }


def random_weights(device: str) -> Callable[..., tuple[Any, Any]]:
    """Return a loader that makes random weights on the device, with the demo's tokenizer."""

    def made(path: str, attention: str | None) -> tuple[Any, Any]:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        return model, demo_tokenizer()

    return made


@contextmanager
def metering(trainer: Any) -> Iterator[Meter]:
    """Measure the four phases of a step."""
    with ExitStack() as stack:
        if trainer.policy.device.type == "cuda":
            meter = Meter(torch.cuda.max_memory_allocated, torch.cuda.reset_peak_memory_stats)
        else:
            meter = _counting(stack.enter_context(MemoryTracker(trainer.policy.model.parameters())), trainer)
        places: list[tuple[Any, str, str]] = [
            (trainer.sampler, "sample", "sampling"),
            (scoring, "score_responses", "scoring"),
            (loop, "update", "update"),
            (import_module("trimtab.trainer.model.update"), "_step", "optimizer_step"),
        ]
        for owner, name, phase in places:
            stack.enter_context(patch.object(owner, name, meter.around(getattr(owner, name), phase)))
        yield meter


def _counting(tracker: MemoryTracker, trainer: Any) -> Meter:
    weights = sum(p.numel() * p.element_size() for p in trainer.policy.model.parameters())

    def reset() -> None:
        tracker.peak = tracker.alive.total()

    return Meter(lambda: tracker.peak + weights, reset)


def estimate(setting: Setting, device: str) -> dict[str, Any]:
    """Return the estimate, as the dry run makes it."""
    with tempfile.TemporaryDirectory() as folder:
        save_shape(setting, folder)
        memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None
        start = time.perf_counter()
        found = estimate_memory(config_of(setting, folder, device), "cuda" if device == "cuda" else "cpu", memory)
        seconds = time.perf_counter() - start
        return asdict(found) | {"peak": found.peak, "worst_phase": found.worst_phase, "seconds": seconds}


def in_a_process(name: str, small: bool) -> dict[str, Any]:
    """Measure a setting in a process of its own."""
    command = [sys.executable, __file__, "--one", name, *(["--small"] if small else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode:
        return {"error": done.stderr[-3000:]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compared(setting: Setting, estimated: dict[str, Any], seen: dict[str, Any]) -> dict[str, Any]:
    """Return both, and the ratio of estimated to measured for every phase and for the peak."""
    if "error" in seen:
        return {"setting": asdict(setting), "estimated": estimated, "measured": seen}
    peaks = seen["peaks"]
    ratios = {phase: round(estimated[phase] / peaks[phase], 3) for phase in PHASES}
    ratios["peak"] = round(estimated["peak"] / max(peaks.values()), 3)
    return {"setting": asdict(setting), "estimated": estimated, "measured": seen, "ratios": ratios}


def table(row: dict[str, Any]) -> str:
    """Return a line to print."""
    name = row["setting"]["name"]
    if "ratios" not in row:
        return f"{name}: failed\n{row['measured']['error']}"
    peaks = row["measured"]["peaks"]
    each = "  ".join(
        f"{phase} {row['estimated'][phase] / 1e9:.2f}/{peaks[phase] / 1e9:.2f} ({row['ratios'][phase]:.2f})"
        for phase in PHASES
    )
    return f"{name:<38} {row['ratios']['peak']:.3f}   {each}   [{row['measured']['sampler']}]"


def main() -> None:
    """Estimate and measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--only", nargs="+", help="settings by their place in the list, from 0")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    device, settings = ("cpu", SMALL) if given.small else ("cuda", FULL)
    if given.one is not None:
        print(json.dumps(measure(next(s for s in settings if s.name == given.one), device)))
        return
    if given.only is not None:
        settings = [settings[int(place)] for place in given.only]
    result = about("peak memory, estimated and measured", torch.device(device)) | {"settings": list[Any]()}
    print("estimated/measured in GB (ratio); first the ratio of the peaks")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        measured = [pool.submit(in_a_process, setting.name, given.small) for setting in settings]
        estimates = [estimate(setting, device) for setting in settings]  # while the processes run
        for setting, estimated, seen in zip(settings, estimates, measured, strict=True):
            row = compared(setting, estimated, seen.result())
            result["settings"].append(row)
            print(table(row), flush=True)
            if given.out is not None:
                save(result, given.out)
    ratios = [row["ratios"]["peak"] for row in result["settings"] if "ratios" in row]
    result["worst_error"] = max((abs(ratio - 1) for ratio in ratios), default=None)
    result["failed"] = len(settings) - len(ratios)
    print(f"worst error of a peak: {result['worst_error']}; settings that failed: {result['failed']}")
    if given.out is not None:
        save(result, given.out)


if __name__ == "__main__":
    main()
