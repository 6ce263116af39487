"""SmolLM2-135M learns sums from nothing (recipe `smollm2-zero`) in TRL's trainer with our objective, on a GPU.

Sampling is by transformers or by vLLM in the same process (`--sampler`). Every step's mean reward and entropy are
written at once. Rewards of the same recipe in trimtab's own trainer are in `results/runs-zero.tar.xz`. One difference
remains: TRL shuffles a rollout batch, so the responses of a group are spread over the step's updates.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from result_file import about, save
from step import Measurements, Steps, grader, peer_model, peer_options, problems_of
from trimtab.trainer.config import Config, load
from trimtab.trainer.model import pick_device
from trimtab.trainer.train.trainer import learning_rate_scale
from trl_vllm import bf16_copy, set_kv_cache, vllm_options

OURS = ("loss_type", "beta")  # options of TRL's own loss: the objective has them
SMALL = ["run.device=cpu", "rollout.prompts=4", "rollout.samples=4", "rollout.max_new_tokens=8"]
KEYS = ("reward", "entropy", "tokens/silenced_share", "grad_norm", "completions/mean_length", "frac_reward_zero_std")


def learn(config: Config, args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Train some steps, and save the result after each."""
    from datasets import Dataset
    from transformers import TrainerCallback

    from trimtab.engines.trl import TrimtabConfig, TrimtabTrainer

    steps = Steps(0, args.steps, 0, fixed=False)
    problems = problems_of(config, args.steps)
    model, tokenizer = peer_model(config)
    chat = config.model.chat and tokenizer.chat_template
    prompts = [list(p.prompt) if chat else "\n".join(message["content"] for message in p.prompt) for p in problems]
    start = time.perf_counter()

    class Log(TrainerCallback):
        """Sets the learning rate of trimtab's schedule, and saves what TRL logs of a step."""

        def on_step_begin(self, *where: Any, **known: Any) -> None:
            """Set the learning rate of an update: transformers' own warm-up starts at 0 and is behind in every step."""
            scale = learning_rate_scale(config, where[1].global_step // config.update.per_step)
            for group in known["optimizer"].param_groups:
                group["lr"] = config.update.lr * scale

        def on_log(self, *where: Any, **known: Any) -> None:
            """Store the figures of the step."""
            state, logs = where[1], known["logs"]
            row = {key: round(float(logs[key]), 5) for key in KEYS if key in logs}
            if row:
                row |= {
                    "step": state.global_step // config.update.per_step,
                    "seconds": round(time.perf_counter() - start, 1),
                }
                result["steps"].append(row)
                print(row, flush=True)
                save(result, args.out)

    with tempfile.TemporaryDirectory() as folder:
        options = {key: value for key, value in peer_options(config, steps, args.rows).items() if key not in OURS}
        passes, updates = options["gradient_accumulation_steps"], config.update.per_step
        options |= {
            "max_steps": args.steps * updates,
            "steps_per_generation": passes,
            "gradient_accumulation_steps": passes // updates,
            "logging_strategy": "steps",
            "logging_steps": updates,
        }
        if args.sampler == "vllm":
            options |= vllm_options(config.rollout, False, args.vllm_memory, args.sleep)
            del options["vllm_importance_sampling_correction"]  # the objective corrects, if it does
            set_kv_cache(int(args.kv_cache * 1e9))
            bf16_copy(model, tokenizer, Path(folder) / "bf16")
        trainer = TrimtabTrainer(
            model=model,
            args=TrimtabConfig(objective=args.objective or config.objective, output_dir=folder, **options),
            processing_class=tokenizer,
            reward_funcs=grader(config, problems, Measurements(steps)),
            train_dataset=Dataset.from_dict({"prompt": prompts, "number": list(range(len(prompts)))}),
            callbacks=[Log()],
        )
        trainer.train()


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sampler", choices=["transformers", "vllm"], default="vllm")
    parser.add_argument("--objective", help="instead of the recipe's")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", type=int, default=128, help="completions per forward pass")
    parser.add_argument("--vllm-memory", type=float, default=0.1, help="free share of the GPU's memory that vLLM wants")
    parser.add_argument("--kv-cache", type=float, default=8.0, help="vLLM's KV cache in GB; all responses need 5")
    parser.add_argument(
        "--sleep", action=argparse.BooleanOptionalAction, default=False, help="vLLM sleeps during updates"
    )
    parser.add_argument("--small", action="store_true", help="the demo model on a CPU, to try the script")
    parser.add_argument("--set", action="append", default=[], help="overrides of recipe keys")
    args = parser.parse_args(arguments)
    config = load("addition" if args.small else "smollm2-zero", [*(SMALL if args.small else []), *args.set])
    result = about("SmolLM2 learns from nothing in TRL", pick_device(config.run.device), "trl", "vllm")
    result |= {"sampler": args.sampler, "objective": args.objective or config.objective, "steps": []}
    learn(config, args, result)
    print(json.dumps(result)[-500:])


if __name__ == "__main__":
    main()
