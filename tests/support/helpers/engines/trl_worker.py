"""One process of a run whose rollouts are known: they depend on prompt, sample and step, not on the process.

Run by the tests as a program: `trl_worker.py ORDER.json`, alone or under torchrun.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from helpers.engines import trl_runs
from trimtab.trainer.model.loading import demo_model, demo_tokenizer


def known_rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A rollout function for TRL: an answer, right every other time, of one to four characters."""
    tokenizer, samples = demo_tokenizer(), trainer.num_generations
    first = trainer.accelerator.process_index * len(prompts)
    completions, logps = [], []
    for row, prompt in enumerate(prompts, start=first):
        rng = random.Random(f"{prompt} {row % samples} {trainer.state.global_step}")
        left, right = prompt.removesuffix("=").split("+")
        answer = str(int(left) + int(right)) if rng.random() < 0.5 else str(rng.randrange(10 ** rng.randint(1, 3)))
        ids = [*tokenizer.encode(answer), tokenizer.eos_token_id]
        completions.append(ids)
        logps.append([-rng.random() * 3 for _ in ids])
    return {"prompt_ids": [tokenizer.encode(p) for p in prompts], "completion_ids": completions, "logprobs": logps}


def die_at(step: int) -> Any:
    """The reward function of a run that is killed while its `step`th rollout is graded."""

    def is_right(completions: list[str], answer: list[str], trainer_state: Any, **_: Any) -> list[float]:
        if trainer_state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return trl_runs.is_right(completions, answer)

    return is_right


def run(order: dict[str, Any]) -> Any:
    """A run by its order: `start` (weights), `out` (where they go), `folder`, and options of the configuration."""
    model = demo_model(0)
    model.load_state_dict(load_file(order["start"]), strict=False)
    model.tie_weights()
    args = trl_runs.config(Path(order["folder"]), **order["options"])
    reward = die_at(order["die_at"]) if "die_at" in order else trl_runs.is_right
    trainer = trl_runs.trainer(model, args, rollout_func=known_rollout, reward_funcs=reward)
    trainer.train(resume_from_checkpoint=order.get("resume"))
    if trainer.accelerator.is_main_process:
        save_file(trl_runs.weights(model), order["out"])
        Path(order["out"]).with_suffix(".json").write_text(json.dumps(trl_runs.logged(trainer, "loss")))
    return trainer


def save_start(path: Path, model: Any) -> None:
    """Weights for runs to start from."""
    save_file(trl_runs.weights(model), path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for order in json.loads(Path(sys.argv[1]).read_text()):
        run(order)
