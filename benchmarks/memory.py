"""Peak memory as it was foretold (`trimtab train --dry-run`) and as it was, phase by phase.

Every setting is a process of its own: a model with random weights trains for two steps, and the second is measured,
for the first has neither gradients nor an optimizer's state at its start. Random weights hardly ever end a response, so
all are as long as they may be, which is what a forecast reckons with. On a GPU the measure is torch's own count of
allocated bytes; with `--small`, on a CPU, the bytes of all tensors that were alive.
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

import trimtab.policy.models
from stopwatch import about, save
from trimtab.config import Config, parse
from trimtab.memory.estimate import forecast
from trimtab.memory.model_shape import SMOLLM2
from trimtab.memory.tracker import Ledger
from trimtab.policy.demo_model import demo_tokenizer
from trimtab.train import experience, loop
from trimtab.train.loop import build_trainer
from trimtab.train.progress import Progress

PHASES = ("sampling", "scoring", "update", "step")
AT_ONCE = 3  # processes: bytes are counted for each by itself
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
    """A model's shape and what of the recipe is special about it."""

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
    Setting("Qwen3 1.7B, one part", QWEN, 4, 8192),
    Setting("Qwen3 1.7B, gradient checkpointing", QWEN, 32, 32_768, model={"gradient_checkpointing": True}),
    Setting("Qwen3 1.7B, LoRA", QWEN, 32, 8192, model={"lora_rank": 16}),
]
SMALL = [
    Setting("tiny Llama", LLAMA | TINY, 8, 512, new=24),
    Setting("tiny Qwen3, gradient checkpointing", QWEN | TINY, 8, 512, new=24, model={"gradient_checkpointing": True}),
]


@dataclass
class Meter:
    """The most bytes that were alive in each phase; a phase within another is no part of the outer one."""

    alive_at_most: Callable[[], int]
    reset: Callable[[], None]
    peaks: dict[str, int] = field(default_factory=dict)
    on: bool = False
    _open: list[str] = field(default_factory=list)

    def around(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The function as a phase."""

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
            self.peaks[self._open[-1]] = max(self.peaks.get(self._open[-1], 0), self.alive_at_most())
        self.reset()


def config_of(setting: Setting, folder: str, device: str) -> Config:
    """The recipe of a setting."""
    return parse(
        {
            "objective": {"name": "grpo"},
            "model": {"path": folder, "precision": "bf16" if device == "cuda" else "fp32", **setting.model},
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
    """The model's folder, with its config and no weights."""
    from transformers import AutoConfig

    AutoConfig.for_model(**setting.shape, eos_token_id=1).save_pretrained(folder)


def measure(setting: Setting, device: str) -> dict[str, Any]:
    """Two steps of real training: the peaks of the second."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        save_shape(setting, folder)
        stack.enter_context(patch.object(trimtab.policy.models, "_pretrained", random_weights(device)))
        trainer = build_trainer(config_of(setting, folder, device))
        meter, progress = stack.enter_context(metering(trainer)), Progress()
        start = time.perf_counter()
        for number in range(2):
            meter.on = number == 1
            metrics = trainer.step(progress)
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
    """In place of a checkpoint: fresh weights made where they will be, a tokenizer that knows some of the tokens."""

    def made(path: str, attention: str | None) -> tuple[Any, Any]:
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device(device):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
        return model, demo_tokenizer()

    return made


@contextmanager
def metering(trainer: Any) -> Iterator[Meter]:
    """A meter at the four phases of a step."""
    with ExitStack() as stack:
        if trainer.policy.device.type == "cuda":
            meter = Meter(torch.cuda.max_memory_allocated, torch.cuda.reset_peak_memory_stats)
        else:
            meter = _counting(stack.enter_context(Ledger(trainer.policy.model.parameters())), trainer)
        places: list[tuple[Any, str, str]] = [
            (trainer.sampler, "sample", "sampling"),
            (experience, "score_answers", "scoring"),
            (loop, "update", "update"),
            (import_module("trimtab.policy.update"), "_step", "step"),
        ]
        for owner, name, phase in places:
            stack.enter_context(patch.object(owner, name, meter.around(getattr(owner, name), phase)))
        yield meter


def _counting(ledger: Ledger, trainer: Any) -> Meter:
    weights = sum(p.numel() * p.element_size() for p in trainer.policy.model.parameters())

    def reset() -> None:
        ledger.peak = ledger.alive.total()

    return Meter(lambda: ledger.peak + weights, reset)


def foretell(setting: Setting, device: str) -> dict[str, Any]:
    """The forecast, as the dry run makes it."""
    with tempfile.TemporaryDirectory() as folder:
        save_shape(setting, folder)
        memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None
        start = time.perf_counter()
        made = forecast(config_of(setting, folder, device), "cuda" if device == "cuda" else "cpu", memory)
        return asdict(made) | {"peak": made.peak, "worst": made.worst, "seconds": time.perf_counter() - start}


def in_a_process(name: str, small: bool) -> dict[str, Any]:
    """A setting measured in a process of its own."""
    command = [sys.executable, __file__, "--one", name, *(["--small"] if small else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode:
        return {"error": done.stderr[-3000:]}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def compared(setting: Setting, foretold: dict[str, Any], seen: dict[str, Any]) -> dict[str, Any]:
    """Both, and foretold over measured for every phase and for the whole."""
    if "error" in seen:
        return {"setting": asdict(setting), "foretold": foretold, "measured": seen}
    peaks = seen["peaks"]
    ratios = {phase: round(foretold[phase] / peaks[phase], 3) for phase in PHASES}
    ratios["peak"] = round(foretold["peak"] / max(peaks.values()), 3)
    return {"setting": asdict(setting), "foretold": foretold, "measured": seen, "ratios": ratios}


def table(row: dict[str, Any]) -> str:
    """A line for people."""
    name = row["setting"]["name"]
    if "ratios" not in row:
        return f"{name}: failed\n{row['measured']['error']}"
    peaks = row["measured"]["peaks"]
    each = "  ".join(
        f"{phase} {row['foretold'][phase] / 1e9:.2f}/{peaks[phase] / 1e9:.2f} ({row['ratios'][phase]:.2f})"
        for phase in PHASES
    )
    return f"{name:<38} {row['ratios']['peak']:.3f}   {each}   [{row['measured']['sampler']}]"


def main() -> None:
    """Foretell and measure, and write what came out."""
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
    result = about("peak memory, foretold and measured", torch.device(device)) | {"settings": list[Any]()}
    print("foretold/measured in GB (ratio); first the ratio of the peaks")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        measured = [pool.submit(in_a_process, setting.name, given.small) for setting in settings]
        forecasts = [foretell(setting, device) for setting in settings]  # while the others run
        for setting, foretold, seen in zip(settings, forecasts, measured, strict=True):
            row = compared(setting, foretold, seen.result())
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
