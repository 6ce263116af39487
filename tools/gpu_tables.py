"""What docs/gpu.md says in figures, from what the benchmarks wrote on a GPU: tables, and the aims held against them.

Every function takes a result and gives lines of Markdown, none where the result lacks what it needs; `PARTS` says
which files each may come from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks/results"

HEAD = 1.10  # times the floor, at most
SAMPLER = 300_000  # tokens per second, at least
STEP = 8  # times as fast as TRL, at least
OBJECTIVE, RECORDER = 0.01, 0.03  # shares of a step, at most
SLOW_TOOL = 0.8  # of the tokens per second with an instant tool, at least
ESTIMATE_ERROR = 0.15  # of the measured peak, at most

SCORING = "trimtab, scoring"
AGREEMENT = "log-probabilities, sampler against training forward"
FORCED = {"free": "responses end by themselves", "fixed": "every response has 256 tokens"}
PHASES = {"sampling": "sampling", "scoring": "scoring", "update": "update", "optimizer_step": "optimizer step"}
DECODING = {"GEMMs": ("GEMM",), "attention": ("attention",), "norms, SwiGLU": ("norm", "swiglu")}
DECODING |= {"sampling": ("sampling",)}
NOISE = "GRPO against itself"
ADDED = {"grpo again": NOISE, "stapo": "STAPO", "stare": "STARE", "sspo": "SSPO"}


def read(name: str) -> Any:
    """A result; None where it has not been measured."""
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def words(*sentences: str) -> list[str]:
    """A paragraph, after an empty line."""
    return ["", *wrap(" ".join(sentences), 120, break_long_words=False, break_on_hyphens=False)]


def outcome(figures: Iterable[tuple[str, str, bool]]) -> str:
    """Where an aim is reached and where it is missed, of (what, figure, whether it is good enough)."""
    parts = []
    for good, word in ((True, "reached"), (False, "missed")):
        these = [f"{what} ({figure})" for what, figure, enough in figures if enough is good]
        parts += [f"{word}: {', '.join(these)}"] if these else []
    return "; ".join(parts)


def source(result: Any, script: str) -> str:
    """Where figures come from."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if name != "python")
    return f"{result['machine']}, {versions}; by `benchmarks/{script}.py`, {result['date']}."


def part(script: str, lines: Callable[[Any], list[str]], *files: str) -> Callable[[], str]:
    """What makes a part of the page: from the first file that has what it needs; a sentence where none has."""

    def make() -> str:
        for result in filter(None, map(read, files)):
            if made := lines(result):
                return "\n".join([*made, "", source(result, script)])
        return f"Not measured yet; `benchmarks/{script}.py` does it."

    return make


def head(result: Any) -> list[str]:
    """Every way to take the head's loss and gradients, beside the floor."""
    shapes = {key: value for key, value in result.items() if " x " in key}
    if not shapes:
        return []
    ways = [way for way in next(iter(shapes.values())) if way != SCORING]
    rows = [[way, *(_head_cell(shape[way]) for shape in shapes.values())] for way in ways]
    ours = {name: shape["trimtab"] for name, shape in shapes.items()}
    rested = {name: row["to_floor_rested"] for name, row in ours.items() if "to_floor_rested" in row}
    if rested:
        rows.insert(1, ["trimtab, each run after a pause", *(_fixed(rested.get(name)) for name in shapes)])
    scoring = [f"{shape[SCORING]['to_one_gemm']:.2f} of one GEMM" for shape in shapes.values()]
    aims = [f"Target: at most {HEAD:.2f} times the floor. One run after the other, {_head_outcome(ours, 'to_floor')}."]
    aims += [f"After a pause, {_head_outcome(ours, 'to_floor_rested')}."] if rested else []
    return [
        *table(["times the floor, and memory", *shapes], [*rows, [SCORING, *scoring]]),
        *words(*aims),
        *_distances(result.get("distance_to_fp64")),
    ]


def _head_cell(row: Any) -> str:
    return "failed" if "error" in row else f"{row['to_floor']:.2f}, +{row['gigabytes']:.1f} GB"


def _fixed(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _head_outcome(ours: Mapping[str, Any], key: str) -> str:
    return outcome([(name, f"{row[key]:.3f}", row[key] <= HEAD) for name, row in ours.items() if key in row])


def _distances(distances: Any) -> list[str]:
    """How far loss and gradients are from fp64, and which way is nearer."""
    if not distances:
        return []
    keys = ("loss", "hidden", "weight")
    rows = [[way, *(f"{row[key]:.2%}" for key in keys)] for way, row in distances.items()]
    ours, full = distances["trimtab"], distances["torch, full logits"]
    nearer = sum(ours[key] < full[key] for key in keys[1:])
    verdict = f"{('Neither gradient is', 'One of our two gradients is', 'Both gradients are')[nearer]} nearer to fp64"
    return [
        "",
        *table(["distance to fp64", "loss", "gradient of hidden states", "of the head"], rows),
        *words(f"{verdict} than with full logits."),
    ]


def sampler(result: Any) -> list[str]:
    """Tokens per second beside transformers."""
    key = next((key for key in result if key.startswith("135M")), None)
    if key is None:
        return []
    speeds = {way: row["tokens_per_second"] for way, row in result[key].items() if "error" not in row}
    plain = {way: speed for way, speed in speeds.items() if way.startswith("trimtab") and "top-" not in way}
    aim = outcome([(way.removeprefix("trimtab, "), f"{speed:,}", speed >= SAMPLER) for way, speed in plain.items()])
    return [
        *table([key, "tokens/s"], [[way, f"{speed:,}"] for way, speed in speeds.items()]),
        *words(f"Target: {SAMPLER:,} tokens/s; {aim}."),
    ]


def limit(result: Any) -> list[str]:
    """The share of what memory bandwidth allows, at larger shapes."""
    rows = [
        [
            key.replace(" shape", ""),
            f"{row['new_tokens']['mean']:,.0f}",
            f"{row['tokens_per_second']:,}",
            f"{row['seconds']:.1f}",
            f"{row['share_of_limit']:.0%}",
            f"{row['share_of_limit_with_products']:.0%}" if "share_of_limit_with_products" in row else "",
        ]
        for key, row in result.items()
        if key.startswith("Qwen3-")
    ]
    if not rows:
        return []
    columns = ["", "mean length", "tokens/s", "seconds", "of the limit", "of the limit with GEMMs"]
    timed = [row.get("first_seconds", 0) - row["seconds"] for key, row in result.items() if key.startswith("Qwen3-")]
    made = (
        f"First calls, which capture CUDA graphs and took up to {max(timed):.1f} s longer, do not count."
        if max(timed) > 0
        else "Graphs were made in the call that was timed, one for each number of remaining responses."
    )
    copied = f"A copy reads and writes {result['copy_bytes_per_second'] / 1e12:.2f} TB/s."
    return [*table(columns, rows), *words(f"{copied} {made}")]


def agreement(result: Any) -> list[str]:
    """The sampler's log-probabilities beside those of the training forward."""
    found = result.get(AGREEMENT)
    if not found:
        return []
    rows = {"bf16, trimtab": found} if "tokens" in found else found
    cells = [
        [way, f"{row['tokens']:,}", *(f"{row[key]:.2g}" for key in ("mean", "largest", "mean_entropy"))]
        for way, row in rows.items()
    ]
    return table(["distance of log-probabilities", "tokens", "mean", "largest", "mean entropy"], cells)


def step(result: Any) -> list[str]:
    """A whole step beside TRL, and where both spend their time."""
    measured = {way: result[way] for way in FORCED if "times_faster" in result.get(way, {})}
    if not measured:
        return []
    times = {FORCED[way]: row["times_faster"]["step"] for way, row in measured.items()}
    rows = [
        [FORCED[way], f"{row['trimtab']['seconds']:.2f}", f"{row['trl']['seconds']:.1f}", f"{times[FORCED[way]]:.2f}"]
        for way, row in measured.items()
    ]
    first = next(iter(measured.values()))
    where = first["trimtab"]["where"], first["trl"]["where"]
    parts = [[name, f"{where[0][name]['ms']:,.0f}", f"{where[1][name]['ms']:,.0f}"] for name in where[0]]
    aim = outcome([(way, f"{ratio:.2f}", ratio >= STEP) for way, ratio in times.items()])
    least = {way: min(row[way]["steps"] for row in measured.values()) for way in ("trimtab", "trl")}
    return [
        *table(["a step of 64 prompts x 8", "trimtab, s", "TRL, s", "times faster"], rows),
        *words(
            f"Target: {STEP} times as fast as TRL; {aim}.",
            f"Number of timed steps, at least: ours {least['trimtab']}, TRL's {least['trl']}.",
        ),
        "",
        *table([f"ms, where {FORCED[next(iter(measured))]}", "trimtab", "TRL"], parts),
    ]


def overhead(result: Any) -> list[str]:
    """What objectives and the recorder add to a step of plain GRPO."""
    made, recorder = result.get("objectives"), result.get("recorder")
    if not made:
        return []
    rows = {label: made["added"][name] for name, label in ADDED.items()}
    shares = [(label, row["share_of_step"]) for label, row in rows.items() if label != NOISE]
    aim = outcome([(label, f"{share:.2%}", share <= OBJECTIVE) for label, share in shares])
    aims = [f"Target: an objective adds at most {OBJECTIVE:.0%}; {aim}."]
    how = (
        f"A whole step takes {made['whole_step_seconds']:.2f} s, {made['sampling_seconds']:.2f} s of it sampling, for "
        f"{made['tokens']:,} tokens. Rewards differ within {made['groups_mixed_share']:.0%} of the groups. "
        f"{made['rounds']} rounds."
    )
    if recorder:
        rows["the recorder"], share = recorder, recorder["share_of_step"]
        aims.append(
            f"Target: the recorder adds at most {RECORDER:.0%}; "
            f"{outcome([('the recorder', f'{share:.2%}', share <= RECORDER)])}."
        )
        how += f" The recorder: {recorder['steps']} pairs of steps, {recorder['kilobytes_per_step']:,.0f} kB each."
    cells = [
        [label, f"{row['ms_added']:+.1f}", f"{row['ms_added_spread']:.1f}", f"{row['share_of_step']:+.2%}"]
        for label, row in rows.items()
    ]
    return [*table(["beside GRPO", "ms", "spread, ms", "of the step"], cells), *words(*aims), *words(how)]


def mfu(result: Any) -> list[str]:
    """The share of the GPU's arithmetic that update and scoring use, and how their cost grows."""
    if not result.get("share_of_peak"):
        return []
    rows = [
        [f"{row['response']:,}", f"{row['budget']:,}", *_mfu_cells(row, "update"), *_mfu_cells(row, "score")]
        for row in result["share_of_peak"]
    ]
    columns = ["tokens of a response", "of a pass", "update, TFLOP/s", "of peak", "of a GEMM"]
    columns += ["scoring, TFLOP/s", "of peak", "of a GEMM"]
    rates = (
        f"Peak: {result['peak_tflops_data_sheet']:,.0f} TFLOP/s by the data sheet; "
        f"a large GEMM: {result['measured_gemm_tflops']:,.0f}, measured."
    )
    return [*table(columns, rows), *words(rates, *_growth(result.get("growth")))]


def _mfu_cells(row: Any, what: str) -> list[str]:
    if "error" in row:
        return [row["error"], "", ""]
    shares = (row[f"{what}_share_of_peak"], row[f"{what}_share_of_gemm"])
    return [f"{row[f'{what}_tflops']:,.0f}", *(f"{share:.1%}" for share in shares)]


def _growth(growth: Any) -> list[str]:
    """Whether cost is a line in tokens."""
    if not growth:
        return []
    tokens = [row["tokens"] for row in growth["rows"] if "error" not in row]
    lines = [
        f"{name} grows with tokens^{line['exponent']:.2f}, at most {line['largest_deviation']:.1%} off a line"
        for name, line in (("an update", growth["update_line"]), ("scoring", growth["score_line"]))
    ]
    return [f"From {min(tokens):,} to {max(tokens):,} tokens the cost of {'; that of '.join(lines)}."]


def memory(result: Any) -> list[str]:
    """Peaks as estimated and as measured."""
    settings = {row["setting"]["name"]: row for row in result["settings"] if "ratios" in row}
    if not settings:
        return []
    rows = [
        [
            name,
            f"{row['estimated']['peak'] / 1e9:.1f}",
            f"{max(row['measured']['peaks'].values()) / 1e9:.1f}",
            *(f"{row['ratios'][key]:.2f}" for key in ("peak", *PHASES)),
        ]
        for name, row in settings.items()
    ]
    failed = [row["setting"]["name"] for row in result["settings"] if "ratios" not in row]
    rows += [[name, "failed", *[""] * (2 + len(PHASES))] for name in failed]
    columns = ["", "peak estimated, GB", "measured, GB", "ratio", *PHASES.values()]
    worst = max(settings, key=lambda name: _off(settings[name]["ratios"]["peak"]))
    error = _off(settings[worst]["ratios"]["peak"])
    aim = outcome([(f"the farthest is {error:.1%} off", worst, error <= ESTIMATE_ERROR)])
    return [
        *table(columns, rows),
        *words(f"Target: a peak within {ESTIMATE_ERROR:.0%}; {aim}.", *_phases_off(settings)),
    ]


def _off(ratio: float) -> float:
    return abs(ratio - 1)


def _phases_off(settings: Mapping[str, Any]) -> list[str]:
    """The phases whose estimate is farther off than a peak's may be."""
    return [
        f"Outside that: {PHASES[phase]} of {name} ({row['ratios'][phase]:.2f}), though its peak, in the "
        f"{PHASES[row['estimated']['worst_phase']]}, is within ({row['ratios']['peak']:.2f})."
        for name, row in settings.items()
        for phase in PHASES
        if _off(row["ratios"][phase]) > ESTIMATE_ERROR >= _off(row["ratios"]["peak"])
    ]


def latency(result: Any) -> list[str]:
    """Steps of conversations by how long a call of a tool takes."""
    rows = [
        [
            f"{1000 * row['delay_seconds']:.0f} ms" if row["delay_seconds"] else "nothing",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['of_the_first']:.1%}",
            f"{row['time/rollout'] + row['time/update']:.2f}",
            f"{row['time/tools_wait_share']:.1%}",
        ]
        for row in result["rows"]
    ]
    slow = result["rows"][1:]
    aim = outcome([(rows[n][0], rows[n][2], row["of_the_first"] >= SLOW_TOOL) for n, row in enumerate(slow, 1)])
    return [
        *table(["added to each call", "tokens/s", "of the first", "seconds of a step", "sampling waits"], rows),
        *words(f"Target: at least {SLOW_TOOL:.0%} of the tokens/s with nothing added; {aim}."),
    ]


def evaluated() -> str:
    """SmolLM2 on two benchmarks."""
    result = read("evaluate-smollm2-h200.json")
    if result is None:
        return ""
    rows = [
        [
            name,
            f"{row['problems']:,} x {row['samples']}",
            f"{row['average']['mean']:.1%} ({row['average']['low']:.1%} to {row['average']['high']:.1%})",
            f"{row['no_answer']['mean']:.1%}",
            f"{row['truncated']['mean']:.1%}",
        ]
        for name, row in result["metrics"].items()
    ]
    took = result["this_process"]
    speed = f"{took['tokens']:,} tokens in {took['seconds']:.0f} s. {source(result, 'evaluate_smollm2')}"
    return "\n".join([*table(["", "samples", "right", "no answer", "cut off"], rows), "", speed])


slow_tools = part("tool_latency", latency, "tool-latency-h200.json")  # of docs/tools.md


def decoding(result: Any) -> list[str]:
    """A decoding step, kernel by kernel, for batches of so many sequences of so many tokens."""
    rows = [
        [
            shape.removesuffix(" shape"),
            f"{row['rows']} x {row['length']:,}",
            *(f"{row[key]:.2f}" for key in ("ms", "limit_ms")),
            f"{row['of_limit']:.0%}",
            *(f"{sum(row['kernels_ms'].get(kind, 0) for kind in kinds):.2f}" for kinds in DECODING.values()),
        ]
        for shape, batches in result.items()
        if shape.endswith(" shape")
        for row in batches
        if "kernels_ms" in row
    ]
    head = ["shape", "sequences x tokens", "step, ms", "limit, ms", "of the limit", *DECODING]
    return table(head, rows) if rows else []


PARTS: dict[str, Callable[[], str]] = {
    "decoding": part("decoding", decoding, "decoding-h200.json"),
    "head": part("head", head, "head-h200.json"),
    "sampler": part("sampler", sampler, "sampler-h200.json"),
    "limit": part("sampler", limit, "sampler-h200.json"),
    "agreement": part("sampler", agreement, "sampler-h200.json", "sampler-agreement-h200.json"),
    "step": part("step", step, "step-h200.json"),
    "mfu": part("mfu", mfu, "mfu-h200.json"),
    "overhead": part("overhead", overhead, "overhead-h200.json"),
    "memory": part("memory", memory, "memory-h200.json"),
}
