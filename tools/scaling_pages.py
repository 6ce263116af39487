"""Tables of what is counted without a GPU, for docs/scaling.md and docs/more-signal.md, and of several processes."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import quantiles
from typing import Any

from trimtab.text import markdown_table

RESULTS = Path(__file__).parent.parent / "benchmarks/results"
PARTS = ("sampling", "scoring", "updates", "collectives", "responses, pickled")


def _read(name: str) -> Any:
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def steps() -> str:
    """Bytes and seconds of a step of each model."""
    result = _read("scaling.json")
    head = ["model", "weights", "GB that each GPU sends", *(f"{part}, s" for part in PARTS)]
    head += ["step, s", "times one GPU", "responses at once", "tokens/s of a GPU"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, model in result["models"].items():
        sent = sum(model["gigabytes_sent_per_gpu"].values())
        seconds = " | ".join(f"{model['seconds'][part]:.1f}" for part in PARTS)
        weights = f"{model['weights'] / 1e9:.1f}e9{', sharded' if model['sharded'] else ''}"
        sampler = model["sampler"]
        rate = f"{sampler['mean_running']:.0f} | {sampler['tokens_per_second']:,}"
        total = f"{model['step_seconds']:.0f} | {model['speedup_of_8']} | {rate}"
        lines.append(f"| {name} | {weights} | {sent:,.0f} | {seconds} | {total} |")
    assumed = result["assumed"]
    given = f"{assumed['mean_response_tokens']:,} tokens per response and {assumed['prompt_tokens']} per prompt"
    link = f"{assumed['link_bytes_per_second'] / 1e9:.0f} GB/s per GPU (NVLink 4)"
    sentences = (
        f"Assumed: {given} on average, log-normal and cut at the recipe's limit; collectives at {link}; the shares of "
        "the peak and of the memory bandwidth on the [GPU page](gpu.md). Exchanges are not overlapped with computing. "
        "By `benchmarks/scaling.py`, which runs the sampler's scheduler with the recipe's settings on GPUs of 141 GB. "
        "*Responses at once* is the mean over the decoding steps, the slow ones at the end included."
    )
    return "\n".join([*lines, "", sentences])


def measured() -> str:
    """What the parallel path costs with one process, and how two ranks on one GPU agree with one."""
    result = _read("several-gpus-h200.json")
    if result is None:
        return "Not measured yet; `benchmarks/several_gpus.py` does it."
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if name != "python")
    lines = [f"SmolLM2-135M, recipe `smollm2-zero`; {result['machine']}, {versions}; {result['date']}."]
    if "overhead" in result:
        pairs = [ratio - 1 for ratio in result["overhead"]["ratio_of_pairs"]]
        low, middle, high = quantiles(pairs, n=4)
        lines += [
            "",
            f"- **Cost of the parallel path with one process:** {middle:+.1%} of a step, the median over {len(pairs)} "
            f"pairs of steps; half of the pairs lie between {low:+.1%} and {high:+.1%}.",
        ]
    for name, layers in (("ranks", "whole"), ("ranks_shard", "split")):
        if name in result:
            found = result[name]
            one, several = found["metrics"][1]["update/grad_norm"]
            lines += [
                f"- **Two ranks on the GPU, beside one, with {layers} layers:** "
                f"{found['equal_responses_of_step_1']:.0%} of the responses of the first step are the same. The "
                "gradient norms of the first step with a reward differ by "
                f"{abs(one - several) / one:.0e} of themselves."
            ]
    if "ranks" in result:
        lines += ["", "Later a sampled token changes with the last bits of the weights, and the runs go apart."]
    if "memory" in result:
        rows = [
            [
                f"{each['ranks']}, {'split' if each['shard'] else 'whole'} layers",
                f"{each['forecast_gb']:.1f}",
                f"{max(each['peak_gb']):.1f}",
                f"{each['forecast_gb'] / max(each['peak_gb']):.3f}",
            ]
            for each in result["memory"]
        ]
        lines += ["", "Memory of a rank, for the same model with random weights and responses of full length:", ""]
        lines += [markdown_table(["ranks", "forecast, GB", "measured, GB", "ratio"], rows)]
    return "\n".join(lines)


def lag() -> str:
    """Decoding passes by `rollout.max_lag`."""
    result = _read("partial-rollouts.json")
    if result is None:
        return "Not counted yet; `benchmarks/partial_rollouts.py` does it."
    runs, assumed = result["runs"], result["assumed"]
    whole = runs[0]
    rows = [
        (
            str(each["max_lag"]),
            str(each["slots"]),
            f"{each['passes']:,}",
            str(each["running"]),
            f"{each['prefilled'] / 1000:,.0f}",
            f"{each['seconds']:.0f}",
            f"{(each['tokens'] / each['seconds']) / (whole['tokens'] / whole['seconds']):.2f}",
            f"{each['lag_mean']:.2f}, {each['lag_max']:.0f}",
            f"{each['spans_mean']:.2f}",
        )
        for each in runs
    ]
    head = ["`max_lag`", "slots", "passes", "responses at once", "thousand tokens prefilled", "seconds"]
    head += ["tokens/s, relative", "lag of tokens: mean, most", "versions per response"]
    given = (
        f"Means over {assumed['steps']} steps of {assumed['prompts']} x {assumed['samples']} responses. Lengths are "
        f"log-normal: half have up to {assumed['median_tokens']} tokens, and {assumed['longest']:,} is the limit. The "
        f"trainer's own code begins and halts them and the sampler's schedules them; seconds are modelled for an H200 "
        f"with {assumed['weights'] / 1e9:.1f}e9 weights, measured rates of reading and prefilling, and no other time. "
        "By `benchmarks/partial_rollouts.py`."
    )
    return "\n".join([markdown_table(head, rows), "", given])
