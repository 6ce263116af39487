"""MFU of the update at the shape of Qwen3-1.7B with random weights, and how its cost grows with tokens.

Model FLOPs, forward and backward, causal attention counted half:
  6 x weights outside embedding and head x tokens
+ 6 x vocabulary x width x response tokens (the head)
+ 12 x layers x heads x head size x sum of length^2 / 2
Recomputation is not counted. Scoring is the forward pass, a third of it. The share is of the data sheet's peak and of
a large GEMM's measured rate. Then 1, 2, 4, 8 times the tokens: does the cost grow linearly?
Last, what the update with the largest micro-batches is made of (kernels by kind), and the GPU's clock and power while
it is repeated: the data sheet's peak is that of a clock which the power limit may not allow.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest.mock import patch

import torch

from kernel_times import clock_and_power, kernel_times
from result_file import about, save
from stopwatch import forget, seconds_of
from trimtab.data import Problem, Response, Sample
from trimtab.grading import Verdict
from trimtab.trainer.config import Config, load
from trimtab.trainer.model import Policy, Precision, load_policy, loading, make_optimizer, pick_device, score
from trimtab.trainer.model.loading import demo_tokenizer
from trimtab.trainer.train.build import build_sampler
from trimtab.trainer.train.loop import update_policy
from trimtab.trainer.train.rollouts import Rollouts
from trimtab.trainer.train.scoring import score_rollouts
from trimtab.trainer.train.trainer import Trainer

PEAK = 989e12  # bf16 without sparsity, H200 data sheet
PEAK_CLOCK = 1830  # MHz, at which the data sheet's peak is reached
PROMPT = 64  # tokens
KINDS = {"flash": "attention", "fmha": "attention", "rms_norm": "norm", "swiglu": "SwiGLU", "rope": "RoPE"}
KINDS |= {"softmax": "head, between its GEMMs", "logp_and_grad": "head, between its GEMMs"}
KINDS |= {"multi_tensor": "optimizer and gradient norm"}
BUSY_SECONDS = 8.0  # for a steady clock
SAMPLES = 8
NO_PROBLEM = Problem(prompt=(), answer="", rule="exact", source="made")


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes, and how many tokens are measured."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocabulary: int
    lengths: tuple[int, ...]  # of responses
    budgets: tuple[int, ...]  # tokens of one micro-batch
    tokens: int  # response tokens of an update

    @property
    def weights(self) -> int:
        """Return the number of weights in the layers' matrices, without embedding and head."""
        attention = self.width * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.inner)


# Budgets of 8, 16 and 32 sequences of the first length, so that micro-batches are full.
QWEN = Shape(28, 2048, 16, 8, 128, 6144, 151_936, (1024, 4096), (8704, 17_408, 34_816), 65_536)
TINY = Shape(2, 64, 4, 2, 32, 128, 997, (16, 64), (640, 1280), 512)


def flops(shape: Shape, prompts: Sequence[int], responses: Sequence[int]) -> dict[str, float]:
    """Return the model FLOPs of an update on sequences of these lengths, by part of the model."""
    lengths = [p + r for p, r in zip(prompts, responses, strict=True)]
    squares = sum(length**2 for length in lengths)
    return {
        "layers": 6.0 * shape.weights * sum(lengths),
        "head": 6.0 * shape.vocabulary * shape.width * sum(responses),
        "attention": 12.0 * shape.layers * shape.heads * shape.head_size * squares / 2,
    }


def fit_line(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """Fit y = start + slope * x; return it with the largest relative deviation and the exponent of y ~ x^e."""
    slope, start = _least_squares(x, y)
    fitted = [start + slope * value for value in x]
    off = max(abs(seen - guess) / seen for seen, guess in zip(y, fitted, strict=True))
    exponent, _ = _least_squares([math.log(value) for value in x], [math.log(value) for value in y])
    return {"slope": slope, "start": start, "largest_deviation": round(off, 4), "exponent": round(exponent, 4)}


def _least_squares(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return slope and intercept."""
    mean_x, mean_y = fmean(x), fmean(y)
    over = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    slope = over / sum((a - mean_x) ** 2 for a in x)
    return slope, mean_y - slope * mean_x


def gemm_rate(device: torch.device, size: int, rounds: int = 10) -> float:
    """Measure the FLOP/s of a large bf16 GEMM of random numbers."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    a @ b
    return 2 * size**3 / median([seconds_of(lambda: a @ b, device) for _ in range(rounds)])


def made_policy(shape: Shape, device: torch.device, precision: Precision) -> Policy:
    """Return a policy with a Qwen3 of this shape and random weights, loaded as from a folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=PROMPT + max(shape.lengths),
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with device:
        model = Qwen3ForCausalLM(config)
    assert sum(p.numel() for name, p in model.named_parameters() if "proj" in name) == shape.weights
    with patch.object(loading, "read_pretrained", return_value=(model, demo_tokenizer())):
        return load_policy("made", device=device.type, precision=precision)


def made_trainer(policy: Policy, config: Config) -> Trainer:
    """Return a trainer of the policy, as a run has it."""
    update = config.update
    return Trainer(
        config=config,
        policy=policy,
        sampler=build_sampler(policy),
        task=[],  # type: ignore[arg-type]
        test_task=None,
        objective=config.build_objective(),
        optimizer=make_optimizer(policy, update.lr, update.betas, update.weight_decay),
    )


def made_answers(shape: Shape, responses: int, length: int) -> list[Sample]:
    """Return random responses in groups; every second one is correct."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(2, shape.vocabulary, (responses, PROMPT + length), generator=rng).tolist()
    return [
        Sample(
            NO_PROBLEM,
            prompt=row[:PROMPT],
            response=Response(row[PROMPT:], [0.0] * length, True, sample=number % SAMPLES),
            group=number // SAMPLES,
            verdict=Verdict("correct" if number % 2 else "wrong"),
            reward=float(number % 2),
        )
        for number, row in enumerate(ids)
    ]


@dataclass(frozen=True)
class Case:
    """An update and a scoring of responses of one length."""

    trainer: Trainer
    shape: Shape
    length: int
    tokens: int
    budget: int

    def measure(self, rounds: int) -> dict[str, Any]:
        """Measure both: median seconds after one warm-up round, and FLOP/s."""
        responses, minibatch = self._minibatch()
        passes = (self.trainer.config.rollout.temperature, self.budget, self.trainer.config.update.head_chunk)
        work = sum(flops(self.shape, [PROMPT] * responses, [self.length] * responses).values())
        update = self._seconds(lambda: update_policy(self.trainer, minibatch, []), rounds)
        scoring = self._seconds(lambda: score(self.trainer.policy, minibatch.transcripts, *passes), rounds)
        return {
            "response": self.length,
            "responses": responses,
            "tokens": responses * (PROMPT + self.length),
            "budget": self.budget,
            "update_seconds": update,
            "update_flops_per_second": work / update,
            "score_seconds": scoring,
            "score_flops_per_second": work / 3 / scoring,
        }

    def update(self) -> Callable[[], object]:
        """Return a function that makes an update."""
        _, minibatch = self._minibatch()
        return lambda: update_policy(self.trainer, minibatch, [])

    def _minibatch(self) -> tuple[int, Any]:
        """Return how many responses there are and the mini-batch of all of them, scored."""
        responses, config = max(1, self.tokens // self.length), self.trainer.config
        settings = config.update.model_copy(update={"token_budget": self.budget})
        self.trainer.config = config.model_copy(update={"update": settings})
        answers = made_answers(self.shape, responses, self.length)
        experience = score_rollouts(self.trainer, Rollouts(answers, [responses]))
        (minibatch,) = experience.minibatches()
        return responses, minibatch

    def _seconds(self, run: Callable[[], object], rounds: int) -> float:
        device = self.trainer.policy.device
        return median([seconds_of(run, device) for _ in range(rounds + 1)][1:])


def explain(case: Case) -> dict[str, Any]:
    """Return the kernels of an update by kind, and clock and power while updates follow one another."""
    update, seen = case.update(), dict[str, Any]()
    update()
    seen["kernels_ms"] = kernel_times(update, KINDS)
    device, start = case.trainer.policy.device, time.perf_counter()
    with clock_and_power(seen):
        while time.perf_counter() - start < BUSY_SECONDS:
            seconds_of(update, device)
    if "clock_mhz" in seen:
        seen["peak_at_this_clock_tflops"] = round(PEAK / 1e12 * seen["clock_mhz"] / PEAK_CLOCK, 1)
    return seen


def rated(row: dict[str, Any], gemm: float) -> dict[str, Any]:
    """Return a case with its shares of the peak, rounded."""
    result = {key: value for key, value in row.items() if not key.endswith("_per_second")}
    for what in ("update", "score"):
        rate = row[f"{what}_flops_per_second"]
        result[f"{what}_seconds"] = round(row[f"{what}_seconds"], 4)
        result[f"{what}_tflops"] = round(rate / 1e12, 3)
        result[f"{what}_share_of_peak"] = round(rate / PEAK, 4)
        result[f"{what}_share_of_gemm"] = round(rate / gemm, 4)
    return result


def attempt(case: Case, rounds: int, gemm: float) -> dict[str, Any]:
    """Measure a case; running out of memory is part of the result."""
    forget(case.trainer.policy.device)
    try:
        return rated(case.measure(rounds), gemm)
    except torch.OutOfMemoryError:
        case.trainer.optimizer.zero_grad(set_to_none=True)
        return {"response": case.length, "budget": case.budget, "error": "out of memory"}


def growth(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Fit lines to the cost of an update and of scoring by tokens."""
    fine = [row for row in rows if "error" not in row]
    tokens = [float(row["tokens"]) for row in fine]
    return {
        "rows": list(rows),
        **{f"{what}_line": fit_line(tokens, [row[f"{what}_seconds"] for row in fine]) for what in ("update", "score")},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="a tiny model on a CPU, to try the script")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budgets", type=int, nargs="+", help="tokens of one micro-batch")
    parser.add_argument("--set", action="append", default=[], help="overrides of recipe keys")
    args = parser.parse_args(arguments)
    shape, device = (TINY, pick_device("cpu")) if args.small else (QWEN, pick_device("cuda"))
    precision: Precision = "fp32" if args.small else "bf16"
    config = load("addition", ["objective.name=grpo", "update.per_step=1", "update.lr=1e-9", *args.set])
    if args.small:
        torch.set_num_threads(1)
    gemm = gemm_rate(device, 256 if args.small else 8192)
    result = about(
        f"update and scoring of a Qwen3 of {shape.layers} layers, width {shape.width}, vocabulary {shape.vocabulary}, "
        f"random weights, {precision}; medians",
        device,
    )
    result |= {"peak_tflops_data_sheet": PEAK / 1e12, "measured_gemm_tflops": round(gemm / 1e12, 3)}
    result["weights_outside_embedding"] = shape.weights
    trainer = made_trainer(made_policy(shape, device, precision), config)
    result["share_of_peak"] = rows = []
    budgets = args.budgets or shape.budgets
    for length in shape.lengths:
        for budget in budgets:
            rows.append(attempt(Case(trainer, shape, length, shape.tokens, budget), args.rounds, gemm))
            save(result, args.out)
            print(rows[-1])
    fitting = [row["budget"] for row in rows if "error" not in row]
    if not fitting:
        sys.exit("nothing fits into the memory of this GPU: try smaller --budgets")
    many = [shape.tokens // 8 * times for times in (1, 2, 4, 8)]
    cases = [Case(trainer, shape, shape.lengths[0], tokens, min(fitting)) for tokens in many]
    result["growth"] = growth([attempt(case, args.rounds, gemm) for case in cases])
    save(result, args.out)
    print(result["growth"])
    if device.type == "cuda":
        forget(device)
        result["largest_micro_batches"] = explain(Case(trainer, shape, shape.lengths[0], shape.tokens, max(fitting)))
        save(result, args.out)
        print(result["largest_micro_batches"])


if __name__ == "__main__":
    main()
