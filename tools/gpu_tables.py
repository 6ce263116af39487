"""The tables of docs/gpu.md, from what the benchmarks wrote on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks/results"


def read(name: str) -> Any:
    """A result; None where it has not been measured."""
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def source(result: Any, script: str) -> str:
    """Where figures come from."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if name != "python")
    return f"{result['machine']}, {versions}; by `benchmarks/{script}.py`, {result['date']}."


def head() -> str:
    """Every way to take the head's loss and gradients, beside the floor."""
    result = read("head-h200.json")
    if result is None:
        return ""
    shapes = [key for key in result if " x " in key]
    ways = [way for way in result[shapes[0]] if "to_floor" in result[shapes[0]][way]]
    rows = [[way, *(_head_cell(result[shape][way]) for shape in shapes)] for way in ways]
    scoring = [f"{result[shape]['trimtab, scoring']['to_one_gemm']:.2f} of one GEMM" for shape in shapes]
    lines = table(["times the floor, and memory", *shapes], [*rows, ["trimtab, scoring alone", *scoring]])
    return "\n".join([*lines, "", source(result, "head")])


def _head_cell(row: Any) -> str:
    return "failed" if "error" in row else f"{row['to_floor']:.2f}, +{row['gigabytes']:.1f} GB"


def sampler() -> str:
    """Tokens per second beside transformers."""
    result = read("sampler-h200.json")
    if result is None:
        return ""
    (key,) = [key for key in result if key.startswith("135M")]
    rows = [[way, f"{row['tokens_per_second']:,}"] for way, row in result[key].items() if "error" not in row]
    return "\n".join([*table([key, "tokens/s"], rows), "", source(result, "sampler")])


def step() -> str:
    """A whole step beside TRL, and where ours spends its time."""
    result = read("step-h200.json")
    if result is None:
        return ""
    words = {"free": "responses end by themselves", "fixed": "every response has 256 tokens"}
    measured = {way: result[way] for way in words if "times_faster" in result.get(way, {})}
    rows = [
        [
            words[way],
            f"{row['trimtab']['seconds']:.2f}",
            f"{row['trl']['seconds']:.1f}",
            f"{row['times_faster']['step']}",
        ]
        for way, row in measured.items()
    ]
    where = result["free"]["trimtab"]["where"], result["free"]["trl"]["where"]
    parts = [[part, f"{where[0][part]['ms']:,.0f}", f"{where[1][part]['ms']:,.0f}"] for part in where[0]]
    return "\n".join(
        [
            *table(["a step of 64 prompts x 8", "trimtab, s", "TRL, s", "times faster"], rows),
            "",
            *table(["where the time goes, ms", "trimtab", "TRL"], parts),
            "",
            source(result, "step"),
        ]
    )


def evaluated() -> str:
    """SmolLM2 on two benchmarks."""
    result = read("evaluate-smollm2-h200.json")
    if result is None:
        return ""
    rows = [
        [
            name,
            f"{row['questions']:,} x {row['samples']}",
            f"{row['average']['mean']:.1%} ({row['average']['low']:.1%} to {row['average']['high']:.1%})",
            f"{row['no_answer']['mean']:.1%}",
            f"{row['truncated']['mean']:.1%}",
        ]
        for name, row in result["figures"].items()
    ]
    took = result["this_process"]
    speed = f"{took['tokens']:,} tokens in {took['seconds']:.0f} s. {source(result, 'evaluate_smollm2')}"
    return "\n".join([*table(["", "samples", "right", "no answer", "cut off"], rows), "", speed])
