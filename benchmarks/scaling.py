"""What a step of the papers' recipes moves between 8 GPUs of one machine, and the time to expect, by counting.

Nothing here is measured on 8 GPUs. Bytes follow from the code: what is gathered, reduced and pickled. Times follow from
figures measured on one H200 (`sampler-h200.json`, `mfu-h200.json`) and from the assumptions below; those of sampling
also from the recipes' own settings, by `sampling_schedule.py`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from result_file import about, save
from sampling_schedule import Gpu, Load, Outcome, simulate
from trimtab.trainer.config import Config, load

RESULTS = Path(__file__).parent / "results"
GPUS = 8
RESPONSES, UPDATES = 2048, 4  # of a step: 256 prompts x 8 samples, 512 responses per update
TOKENS, PROMPT = 4096, 256  # assumed: mean tokens of a response, and of a prompt
MEMORY = 141e9  # of an H200
LINK = 350e9  # bytes per second and GPU that collectives reach on NVLink 4 (900e9 in both directions on the data sheet)
PEAK = 989e12  # bf16 products per second, data sheet
# Pickled ids and log-probabilities of 512 responses of 4,096 tokens, between two processes with gloo; the best of 16
# exchanges. As arrays of int32 and float64 they take 0.18e-6: Python's numbers are what costs, and not their pickles.
PICKLED_BYTES, PICKLED_SECONDS = 13.2, 0.26e-6  # per token, all of them on every rank


@dataclass(frozen=True)
class Shape:
    """A Qwen3: layers, width, heads, width of the MLP, and whether the head is the embedding."""

    layers: int
    width: int
    heads: int
    mlp: int
    tied: bool
    recipe: str
    shard: bool = False

    @property
    def layer(self) -> int:
        """Weights of one layer."""
        return self.width * 128 * (2 * self.heads + 2 * 8) + 3 * self.width * self.mlp + 2 * self.width

    @property
    def embedding(self) -> int:
        """Weights of embedding and head."""
        return 151_936 * self.width * (1 if self.tied else 2)

    @property
    def weights(self) -> int:
        """All weights."""
        return self.layers * self.layer + self.embedding


def shapes() -> dict[str, Shape]:
    """The models."""
    return {
        "1.7B": Shape(28, 2048, 16, 6144, True, "stapo-qwen3-1.7b"),
        "8B": Shape(36, 4096, 32, 12_288, False, "stapo-qwen3-8b", shard=True),
        "14B": Shape(40, 5120, 40, 17_408, False, "stapo-qwen3-14b", shard=True),
    }


def sampled(shape: Shape, config: Config, gpus: int) -> Outcome:
    """Sample a GPU's share of the responses of a step with the recipe's slots and KV cache."""
    rollout = config.rollout
    token = shape.layers * 2 * 8 * 128 * 2  # bytes of its keys and values
    gpu = Gpu(shape.weights, token, rollout.kv_cache_memory * MEMORY, rollout.batch_size)
    lengths = {"mean": TOKENS, "longest": rollout.max_new_tokens}
    prompts = {"prompt": PROMPT, "longest_prompt": rollout.max_prompt_tokens}
    return simulate(Load(RESPONSES // gpus, rollout.samples, **lengths, **prompts), gpu)


def products(shape: Shape, length: int) -> float:
    """Floating-point operations of a forward pass over one sequence: weights, and attention to the tokens before."""
    dense = shape.weights - (0 if shape.tied else shape.embedding // 2)  # an embedding is looked up
    return 2.0 * dense * length + 2.0 * shape.layers * shape.heads * 128 * length**2


def count(shape: Shape) -> dict[str, Any]:
    """Bytes and seconds of one step on 8 GPUs, per GPU."""
    config = load(shape.recipe)
    budget = config.update.token_budget
    sampling, sampling_alone = sampled(shape, config, GPUS), sampled(shape, config, 1)
    shares = json.loads((RESULTS / "mfu-h200.json").read_text())["share_of_peak"][-1]
    tokens = RESPONSES * (TOKENS + PROMPT)
    others = (GPUS - 1) / GPUS
    passes = -(-tokens // UPDATES // GPUS // budget)  # micro-batches of a GPU in an update
    whole, layers = 4 * shape.weights, 4 * shape.layers * shape.layer
    moved = {"gradients and weights": UPDATES * 2 * whole * others}
    if shape.shard:
        rest = UPDATES * 2 * 4 * shape.embedding * others
        # Every pass gathers each layer in bf16: once to score, twice in an update (forward and backward), which also
        # sums its gradients in fp32.
        per_pass = UPDATES * passes * layers * others
        moved = {
            "embedding and head": rest,
            "layers gathered to score": per_pass / 2,
            "layers gathered in updates": per_pass,
            "gradients of layers": per_pass,
            "layers gathered to sample": layers / 2 * others,
        }
    moved["scores"] = 16 * RESPONSES * TOKENS * others
    pickled = PICKLED_BYTES * RESPONSES * TOKENS
    forward = RESPONSES * products(shape, TOKENS + PROMPT) / GPUS
    seconds = {
        "sampling": RESPONSES * TOKENS / GPUS / sampling.rate,
        "scoring": forward / (PEAK * shares["score_share_of_peak"]),
        "updates": 3 * forward / (PEAK * shares["update_share_of_peak"]),
        "collectives": sum(moved.values()) / LINK,
        "responses, pickled": PICKLED_SECONDS * RESPONSES * TOKENS,
    }
    total = sum(seconds.values())
    alone = RESPONSES * TOKENS / sampling_alone.rate + GPUS * (seconds["scoring"] + seconds["updates"])
    return {
        "weights": shape.weights,
        "sharded": shape.shard,
        "gigabytes_sent_per_gpu": {name: round(size / 1e9, 1) for name, size in moved.items()},
        "sampler": {
            "tokens_per_second": round(sampling.rate),
            "mean_running": round(sampling.running / sampling.steps, 1),
            "preempted": sampling.preempted,
            "prefilled_tokens": sampling.prefilled,
        },
        "gigabytes_pickled": round(pickled / 1e9, 2),
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "step_seconds": round(total, 1),
        "speedup_of_8": round(alone / total, 2),
    }


def main() -> None:
    """Count and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "scaling.json")
    args = parser.parse_args()
    result = {
        **about("a step of the papers' recipes on 8 H200 of one machine: counted, not measured"),
        "assumed": {"mean_response_tokens": TOKENS, "prompt_tokens": PROMPT, "link_bytes_per_second": LINK},
        "models": {name: count(shape) for name, shape in shapes().items()},
    }
    save(result, args.out)


if __name__ == "__main__":
    main()
