"""Small runs of TRL's trainer on a CPU: a tiny Qwen3 that reads characters, sums of two numbers, a Python reward."""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRACKIO_DISABLED", "1")

import torch
from datasets import Dataset

from trimtab.engines.trl import TrimtabConfig, TrimtabTrainer
from trimtab.trainer.model import Policy, Transcript
from trimtab.trainer.model.loading import demo_model, demo_tokenizer
from trimtab.trainer.model.score import log_probs

LARGEST = 10  # numbers below this are added

torch.set_num_threads(1)  # these tensors are too small to share


def sums(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Questions and answers."""
    rng = random.Random(seed)
    pairs = [(rng.randrange(LARGEST), rng.randrange(LARGEST)) for _ in range(count)]
    return [(f"{a}+{b}=", str(a + b)) for a, b in pairs]


def dataset(count: int = 512, seed: int = 0) -> Dataset:
    """The same as TRL wants it."""
    pairs = sums(count, seed)
    return Dataset.from_dict({"prompt": [q for q, _ in pairs], "answer": [a for _, a in pairs]})


def is_right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The reward function: 1 for the right number."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


def warm_model(steps: int = 120, seed: int = 0) -> Any:
    """A model that gets some of the sums right, after a few seconds of worked examples."""
    model, tokenizer = demo_model(seed), demo_tokenizer()
    policy = Policy(model, tokenizer, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    end = tokenizer.eos_token_id
    for step in range(steps):
        batch = [
            Transcript(tokenizer.encode(q), [*tokenizer.encode(a), end]) for q, a in sums(64, seed=1000 * seed + step)
        ]
        loss = -log_probs(policy, batch, 1.0, 4096).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def config(folder: Path, **options: Any) -> TrimtabConfig:
    """A configuration of a run on a CPU in fp32."""
    settings: dict[str, Any] = {
        "objective": "stapo",
        "output_dir": str(folder),
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": 4,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": 1,
        "dataloader_pin_memory": False,
    }
    return TrimtabConfig(**{**settings, **options})


def trainer(model: Any, args: TrimtabConfig, kind: type[TrimtabTrainer] = TrimtabTrainer, **options: Any) -> Any:
    """A trainer on the sums."""
    given: dict[str, Any] = {
        "reward_funcs": is_right,
        "train_dataset": dataset(),
        "processing_class": demo_tokenizer(),
        **options,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(model=model, args=args, **given)


def logged(done: Any, name: str) -> list[float]:
    """A metric of every step that was logged."""
    return [line[name] for line in done.state.log_history if name in line]


def weights(model: Any) -> dict[str, torch.Tensor]:
    """The trained weights by name."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}
