"""The tables of docs/gpu.md beside vLLM and TRL with vLLM, from what the benchmarks wrote on a GPU.

As in gpu_tables.py, every function takes a result and gives lines of Markdown, none where it lacks what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_tables import outcome, part, read, source, table, words

TIMES_VLLM = {"135M": 5.0, "1.7B": 1.3, "8B": 1.3}  # times vLLM's tokens per second with log-probs, at least
TIMES_TRL = {"135M": 3.0, "1.7B": 1.5}  # times as fast as TRL with vLLM, at least
LARGE = ("1.7B", "8B")  # shapes that are measured with the same loads
LIMIT = 0.65  # of the bandwidth-and-product limit with ragged responses, at least
ESTIMATE = 0.05  # of the measured peak of a long step, at most
BEST = "best with log-probs"
TRL_FILES = {"135M": "step-vllm-135m-h200.json", "1.7B": "step-vllm-1.7b-h200.json"}
ENGINES = {"vllm": "vLLM", "native": "native"}


def sampling(result: Any) -> list[str]:
    """Tokens per second beside vLLM's best setting, by shape and load."""
    rows, faster = list[list[str]](), list[tuple[str, str, bool]]()
    shapes = result.get("shapes", {})
    for shape, figures in shapes.items():
        for load, row in figures.items():
            if "lengths" not in row:
                continue
            best, without = row.get(BEST, {}), row.get("best without log-probs", {})
            if best:
                name, times = f"{shape}, {load}", best["times_faster"]
                faster.append((name, f"{times:.2f}", times >= TIMES_VLLM[shape]))
            rows.append(
                [
                    f"{shape}: {load}",
                    f"{row['trimtab']['tokens_per_second']:,}",
                    f"{best['tokens_per_second']:,} ({best['setting']})" if best else "failed",
                    f"{without['tokens_per_second']:,}" if without else "",
                    f"{best['times_faster']:.2f}" if best else "",
                    f"{row['share_of_limit']:.0%}" if "share_of_limit" in row else "",
                ]
            )
    rows += [[f"{shape}: {load}", "not measured", "", "", "", ""] for shape, load in _open(shapes)]
    if not rows:
        return []
    columns = ["tokens/s", "trimtab", "vLLM's best", "without log-probs", "times faster", "trimtab, of the limit"]
    aims = ", ".join(f"{times:g} times vLLM's best at {shape}" for shape, times in TIMES_VLLM.items())
    said = [f"Target: {aims}; {outcome(faster)}."] if faster else []
    return [*table(columns, rows), *words(*said, *_needed(result), *_failed(result)), *_weights(result)]


def _open(shapes: Any) -> list[tuple[str, str]]:
    """The loads of one large shape that another one lacks."""
    loads = {
        shape: [load for load, row in shapes[shape].items() if "lengths" in row] for shape in LARGE if shape in shapes
    }
    known = dict.fromkeys(load for each in loads.values() for load in each)
    return [(shape, load) for shape, each in loads.items() for load in known if load not in each]


def _needed(result: Any) -> list[str]:
    """Which share of the limit an aim that was missed would take."""
    return [
        f"To reach the target, {shape}, {load} would need {row['share_of_limit'] * TIMES_VLLM[shape] / times:.0%} of "
        "the limit."
        for shape, figures in result["shapes"].items()
        for load, row in figures.items()
        if "share_of_limit" in row and (times := row.get(BEST, {}).get("times_faster", 99)) < TIMES_VLLM[shape]
    ]


def _failed(result: Any) -> list[str]:
    return [
        f"vLLM at {shape}, {setting}, did not finish: {error.partition('. ')[0]}."
        for shape, figures in result["shapes"].items()
        for setting, error in figures.get("failed", {}).items()
    ]


def _weights(result: Any) -> list[str]:
    """How long new weights take, and how far log-probs are from the model's own forward."""
    rows = [
        [
            shape,
            *(f"{1e3 * figures['new_weights_seconds'][who]:,.1f}" for who in ("trimtab", "vLLM")),
            *(f"{figures['log_prob_distance'][who]['mean']:.2g}" for who in ("trimtab", "vLLM")),
        ]
        for shape, figures in result["shapes"].items()
        if "new_weights_seconds" in figures and "log_prob_distance" in figures
    ]
    columns = ["", "new weights, ms: trimtab", "vLLM", "mean distance of log-probs: trimtab", "vLLM"]
    return ["", *table(columns, rows)] if rows else []


def steps() -> str:
    """Whole steps beside TRL that samples with vLLM."""
    rows, faster, sources = list[list[str]](), list[tuple[str, str, bool]](), list[str]()
    for shape, file in TRL_FILES.items():
        result = read(file)
        if not result or "fixed" not in result:
            continue
        ours = result["fixed"]["trimtab"]
        for name, label in (("trl-vllm", "TRL + vLLM"), ("trl-vllm-sleep", "TRL + vLLM, sleeping")):
            theirs = result["fixed"].get(name)
            if theirs is None:
                continue
            times = "" if "error" in theirs else f"{theirs['seconds'] / ours['seconds']:.2f}"
            if times:
                faster.append((f"{shape} beside {label}", times, float(times) >= TIMES_TRL[shape]))
            took = theirs["error"] if "error" in theirs else f"{theirs['seconds']:.2f}"
            rows.append([shape, f"{ours['tokens']:,}", label, f"{ours['seconds']:.2f}", took, times])
        sources.append(source(result, "step"))
    if not rows:
        return "Not measured yet; `benchmarks/step.py --peer trl-vllm` does it."
    aims = ", ".join(f"{times:g} times as fast at {shape}" for shape, times in TIMES_TRL.items())
    said = words(f"Target: {aims}; {outcome(faster)}.") if faster else []
    columns = ["shape", "tokens", "beside", "trimtab, s", "peer, s", "times faster"]
    return "\n".join([*table(columns, rows), *said, "", sources[-1]])


def engine(result: Any) -> list[str]:
    """Training with vLLM as the sampler beside the native one."""
    rows = [
        [
            label,
            f"{row['rollout_seconds']:.2f}",
            f"{row['update_seconds']:.2f}",
            f"{row['start_seconds']:.0f}",
            f"{max(row['mismatch_mean']):.3f}" if row["mismatch_mean"] else "",
            f"{max(row['mismatch_max']):.2f}" if row["mismatch_max"] else "",
        ]
        for name, label in ENGINES.items()
        if "seconds" in (row := result.get(name, {}))
    ]
    if not rows:
        return []
    columns = ["sampler", "rollout, s", "update, s", "start, s", "mismatch, mean", "largest"]
    return [*table(columns, rows), *_memory(result)]


def _memory(result: Any) -> list[str]:
    found = {name: result[name] for name in ("engine", "engine, LoRA") if "gigabytes" in result.get(name, {})}
    if not found:
        return []
    states = ("before", "asleep", "awake")
    rows = [
        [
            name.replace("engine", "vLLM"),
            *(f"{row['gigabytes'][state]:.1f}" if row["gigabytes"][state] is not None else "" for state in states),
            f"{1e3 * row['wake_up_with_new_weights_seconds']:,.0f}",
            f"{1e3 * row['sleep_seconds']:,.0f}",
        ]
        for name, row in found.items()
    ]
    columns = ["GB of the GPU in use", "before", "asleep", "awake", "wake-up with new weights, ms", "sleep, ms"]
    eager = any(row.get("enforce_eager") for row in found.values())
    said = words("Without CUDA graphs, whose memory is not given back in sleep.") if eager else []
    return ["", *table(columns, rows), *said]


def long_step(result: Any) -> list[str]:
    """One step with long responses: phases, limits, memory."""
    seen = result.get("measured")
    if not seen or "limits" not in result:
        return []
    rows = [
        [
            phase,
            f"{row['ms'] / 1e3:.1f}",
            f"{row['share']:.0%}",
            f"{result['limits'][phase]['share']:.0%}" if phase in result["limits"] else "",
        ]
        for phase, row in seen["where"].items()
        if row["share"] >= 0.0005
    ]
    ratio, lengths = result["ratios"]["peak"], seen["lengths"]
    aim = outcome([(f"{abs(ratio - 1):.1%} off", f"{ratio:.2f}", abs(ratio - 1) <= ESTIMATE)])
    said = (
        f"{result['setting']['responses']} responses of up to {result['setting']['new_tokens']:,} tokens, "
        f"{lengths['mean']:,.0f} on average, the longest {lengths['longest']:,}: {seen['tokens']:,} tokens in "
        f"{seen['seconds']:.0f} s. Peak memory {max(seen['peaks'].values()) / 1e9:.1f} GB, estimated "
        f"{result['estimated']['peak'] / 1e9:.1f} GB for full length. Target: within {ESTIMATE:.0%}; {aim}."
    )
    return [*table(["phase", "seconds", "of the step", "limit, of the time taken"], rows), *words(said)]


PARTS: dict[str, Callable[[], str]] = {
    "vllm": part("vllm_sampling", sampling, "vllm-sampling-h200.json"),
    "trl-vllm": steps,
    "vllm-engine": part("vllm_engine", engine, "vllm-engine-h200.json"),
    "long": part("long_step", long_step, "long-step-h200.json"),
}
