"""Sampling on a GPU: throughput compared with transformers, and the share of what memory bandwidth allows.

Throughput: a 135M Llama (30 layers, vocabulary 49,152) samples 128 tokens for each of 512 prompts of 64 tokens, with
transformers' `generate` (dynamic cache; static cache and compile), with its `generate_batch`, and with the paged
sampler. Bandwidth: Qwen3's shapes with random weights; the limit is the time to read weights and KV cache at the copy
speed measured in the same run. With many sequences the matrix products take longer than reading the weights, and a
second figure counts that. Agreement: log-probabilities of the sampler against those of the training forward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PretrainedConfig, Qwen3Config

from result_file import about, added_to, save
from stopwatch import forget, seconds_of
from trimtab.data import PromptTokens, Response, Sampler, SamplingOptions
from trimtab.trainer.memory.estimate import SMOLLM2
from trimtab.trainer.model import Policy, Transcript, load_policy, score
from trimtab.trainer.sampling import NativeSampler, PagedSampler
from trimtab.trainer.train.build import build_sampler

PROMPT, NEW, SEQUENCES = 64, 128, 512
PEAK = 989e12  # dense bf16 operations per second of an H200, by its datasheet


@dataclass(frozen=True)
class Setting:
    """How many sequences to sample, and what share of the vocabulary are end tokens, for responses of mixed lengths."""

    sequences: int
    new_tokens: int
    eos_share: float = 0.0


def llama_135m(small: bool) -> LlamaConfig:
    """Return SmolLM2-135M's config."""
    smaller = {"num_hidden_layers": 2, "vocab_size": 512} if small else {}
    return LlamaConfig(**(SMOLLM2 | {"max_position_embeddings": 8192} | smaller))


def qwen3(name: str, small: bool) -> Qwen3Config:
    """Return the config of Qwen3-1.7B or 8B."""
    layers, width, inner, heads, tied = {"1.7B": (28, 2048, 6144, 16, True), "8B": (36, 4096, 12288, 32, False)}[name]
    return Qwen3Config(
        num_hidden_layers=2 if small else layers,
        hidden_size=width // (16 if small else 1),
        intermediate_size=inner // (16 if small else 1),
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=32 if small else 128,
        vocab_size=512 if small else 151_936,
        max_position_embeddings=40_960,
        tie_word_embeddings=tied,
    )


def random_model(config: PretrainedConfig, device: torch.device) -> Any:
    """Build a model with random bf16 weights, on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def random_prompts(count: int, length: int, vocab_size: int) -> list[PromptTokens]:
    """Return prompts of random tokens."""
    ids = torch.randint(0, vocab_size, (count, length), generator=torch.Generator().manual_seed(1))
    return [PromptTokens(row.tolist(), number) for number, row in enumerate(ids)]


def with_generate(model: Any, ids: torch.Tensor, new: int, **settings: Any) -> Callable[[], object]:
    """Return a call of transformers' `generate`, sampling without top-k and top-p."""
    config = GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, max_new_tokens=new, min_new_tokens=new, pad_token_id=0, **settings
    )
    mask = torch.ones_like(ids)
    return lambda: model.generate(input_ids=ids, attention_mask=mask, generation_config=config)


def with_generate_batch(model: Any, ids: torch.Tensor, new: int) -> Callable[[], object]:
    """Return a call of `generate_batch`, transformers' continuous batching."""
    config = GenerationConfig(do_sample=True, max_new_tokens=new, pad_token_id=0, eos_token_id=-1)
    return lambda: model.generate_batch(inputs=ids.tolist(), generation_config=config, progress_bar=False)


def compare_throughput(device: torch.device, small: bool, peers: bool, rounds: int) -> dict[str, Any]:
    """Measure tokens per second of each way of sampling, with the same weights and prompts."""
    config = llama_135m(small)
    sequences, new = (8, 8) if small else (SEQUENCES, NEW)
    model = random_model(config, device)
    prompts = random_prompts(sequences, PROMPT, config.vocab_size)
    ids = torch.tensor([prompt.ids for prompt in prompts], device=device)
    sampler = PagedSampler(model, frozenset({config.vocab_size}), torch.bfloat16)
    alone = SamplingOptions(samples=1, max_new_tokens=new)
    groups = SamplingOptions(samples=8, max_new_tokens=new)
    ways: dict[str, tuple[Callable[[], object], int]] = {
        "trimtab, a prompt for each": (lambda: sampler.sample(prompts, 0, alone), rounds),
        "trimtab, 8 samples of a prompt": (lambda: sampler.sample(prompts[: sequences // 8], 0, groups), rounds),
        "trimtab, top-p 0.9 and top-k 50": (
            lambda: sampler.sample(prompts, 0, SamplingOptions(1, new, top_p=0.9, top_k=50)),
            rounds,
        ),
    }
    if peers:
        ways["transformers generate, dynamic cache"] = with_generate(model, ids, new), 0
        ways["transformers generate, static cache and compile"] = (
            with_generate(model, ids, new, cache_implementation="static"),
            2,
        )
        ways["transformers generate_batch"] = with_generate_batch(model, ids, new), 0
    result = {}
    for name, (run, repeats) in ways.items():
        result[name] = time_throughput(run, sequences * new, repeats, device)
        print(name, result[name], flush=True)
    return result


def time_throughput(run: Callable[[], object], tokens: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Return tokens per second by the median of some rounds, after a warm-up, which counts only where rounds is 0."""
    try:
        first = seconds_of(run, device)
        took = statistics.median([seconds_of(run, device) for _ in range(rounds)] or [first])
    except Exception as error:  # a peer that fails is a result too
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    return {"tokens_per_second": round(tokens / took), "seconds": round(took, 4), "first_seconds": round(first, 2)}


def copy_speed(device: torch.device, size: int) -> float:
    """Return bytes per second of reading and writing a large tensor."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    took = min(seconds_of(lambda: target.copy_(source), device) for _ in range(5))
    return 2 * size / took


def bandwidth_share(name: str, setting: Setting, speed: float, device: torch.device, small: bool) -> dict[str, Any]:
    """Return the time that reading weights and KV cache alone would take, as a share of the time measured."""
    config = qwen3(name, small)
    model = random_model(config, device)
    eos_token_ids = frozenset(range(int(setting.eos_share * config.vocab_size))) or frozenset({config.vocab_size})
    sampler = PagedSampler(model, eos_token_ids, torch.bfloat16, kv_cache_memory=0.6)
    prompts = random_prompts(setting.sequences, PROMPT, config.vocab_size)
    options = SamplingOptions(1, setting.new_tokens, batch_size=setting.sequences)
    sampler.sample(prompts, 0, replace(options, max_new_tokens=16))  # compiles kernels; graphs are captured again below
    took, responses = list[float](), list[Response]()
    # With mixed lengths twice: the first time includes capturing a graph for every batch size, once per training run.
    for number in range(2 if setting.eos_share else 1):
        start = time.perf_counter()
        responses = [group[0] for group in sampler.sample(prompts, 1 + number, options)]
        took.append(time.perf_counter() - start)
    lengths = [len(response.tokens) for response in responses]
    weights, cache = min_bytes_read(config, lengths)
    limit = (max(lengths) * weights + cache) / speed
    computed = sum(max(weights / speed, weights * rows / PEAK) for rows in active_rows(lengths)) + cache / speed
    return {
        "sequences": setting.sequences,
        "new_tokens": {"mean": round(statistics.fmean(lengths), 1), "longest": max(lengths)},
        "first_seconds": round(took[0], 2),
        "seconds": round(took[-1], 2),
        "tokens_per_second": round(sum(lengths) / took[-1]),
        "limit_seconds": round(limit, 2),
        "share_of_limit": round(limit / took[-1], 3),
        "share_of_limit_with_products": round(computed / took[-1], 3),
        "gigabytes": round(torch.cuda.max_memory_allocated(device) / 1e9, 1) if device.type == "cuda" else None,
    }


def min_bytes_read(config: Any, lengths: list[int]) -> tuple[float, float]:
    """Return the bytes of the weights, which every step reads, and of all KV cache reads together."""
    head, width, inner = config.head_dim, config.hidden_size, config.intermediate_size
    attention = width * head * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    weights = config.num_hidden_layers * (attention + 3 * width * inner) + config.vocab_size * width
    token = config.num_hidden_layers * 2 * config.num_key_value_heads * head
    read = sum(length * PROMPT + length * (length - 1) // 2 for length in lengths)
    return 2.0 * weights, 2.0 * token * read


def active_rows(lengths: list[int]) -> list[int]:
    """Return how many responses each step adds a token to; each costs as many operations as the weights have bytes."""
    return [sum(length > step for length in lengths) for step in range(max(lengths))]


def agreement(policy: Policy, sampler: Sampler, sequences: int, new: int) -> dict[str, Any]:
    """Compare a sampler's log-probabilities of its tokens with the training forward's."""
    questions = [
        f"Tom has {n} apples and buys {3 * n + 1} more. How many apples has Tom now?" for n in range(sequences // 8)
    ]
    prompts = [PromptTokens(policy.encode([{"role": "user", "content": text}]), n) for n, text in enumerate(questions)]
    groups = sampler.sample(prompts, 0, SamplingOptions(samples=8, max_new_tokens=new))
    pairs = [(prompt, response) for prompt, group in zip(prompts, groups, strict=True) for response in group]
    scored = score(policy, [Transcript(p.ids, r.tokens) for p, r in pairs], 1.0, 16_384, 2048)
    sampled = torch.tensor([value for _, r in pairs for value in r.logp], device=policy.device)
    off = (scored.logp - sampled).abs()
    return {
        "tokens": len(off),
        "mean": float(off.mean()),
        "largest": float(off.max()),
        "mean_signed": float((scored.logp - sampled).mean()),
        "mean_entropy": float(scored.entropy.mean()),
    }


def agreements(device: torch.device, small: bool) -> dict[str, Any]:
    """Measure agreement in bf16 and fp32, of the paged sampler and of the native one (transformers' forward)."""
    result: dict[str, Any] = {}
    sizes = (16, 16) if small else (256, 128)
    for precision in ("bf16", "fp32"):
        policy = load_policy("demo" if small else "smollm2", precision=precision, device=device.type)
        native = NativeSampler(policy.model, policy.eos_token_ids, policy.pad_token_id, policy.autocast)
        for name, sampler in (("trimtab", build_sampler(policy)), ("transformers forward", native)):
            result[f"{precision}, {name}"] = agreement(policy, sampler, *sizes)
            print(precision, name, result[f"{precision}, {name}"], flush=True)
    return result


def main() -> None:
    """Run the measurements and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--measure", nargs="+", default=["throughput", "bandwidth", "agreement"])
    parser.add_argument("--shapes", nargs="+", default=["1.7B", "8B"])
    parser.add_argument("--longest", type=int, default=4096, help="new tokens of the longest responses")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script on a CPU")
    args = parser.parse_args()
    device = torch.device("cpu" if args.small else "cuda")
    head = about("sampling: tokens per second, share of the bandwidth limit, log-probabilities", device)
    result = added_to(args.out, head)
    if "throughput" in args.measure:
        result["135M Llama, 512 x (64 + 128)"] = compare_throughput(device, args.small, not args.no_peers, args.rounds)
        save(result, args.out)
    if "bandwidth" in args.measure:
        speed = copy_speed(device, 2**24 if args.small else 2**32)
        result["copy_bytes_per_second"] = speed
        settings = [Setting(64, args.longest), Setting(512, args.longest, 2e-3)]
        for name in args.shapes:
            for setting in [Setting(4, 20, 0.1)] if args.small else settings:
                key = f"Qwen3-{name} shape, {setting.sequences} sequences, up to {setting.new_tokens}"
                forget(device)
                result[key] = bandwidth_share(name, setting, speed, device, args.small)
                print(key, result[key], flush=True)
                save(result, args.out)
    if "agreement" in args.measure:
        forget(device)
        result["log-probabilities, sampler against training forward"] = agreements(device, args.small)
    save(result, args.out)


if __name__ == "__main__":
    main()
