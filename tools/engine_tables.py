"""The tables of docs/gpu.md about trimtab inside TRL and verl, from what the benchmarks wrote on a GPU.

As in gpu_tables.py, every function takes a result and gives lines of Markdown, none where it lacks what it needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gpu_tables import part, read, source, table, words

LEARNING = {"transformers": "trl-learning-transformers-h200.json", "vLLM": "trl-learning-vllm-h200.json"}
PHASES = {"gen": "sample", "old_log_prob": "score", "trimtab_plan": "plan", "update_actor": "update"}
PHASES |= {"update_weights": "new weights", "step": "step"}


def learning() -> str:
    """How far SmolLM2 got inside TRL, by sampler."""
    rows, sources = list[list[str]](), list[str]()
    for sampler, file in LEARNING.items():
        result = read(file)
        steps = result["steps"] if result else []
        if len(steps) < 2:
            continue
        first, last = steps[0], steps[-1]
        each = (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])
        rewards, entropies = (f"{first[key]:.2g} to {last[key]:.2g}" for key in ("reward", "entropy"))
        asked = re.search(r"--steps (\d+)", result["command"])  # a run may have been stopped before it got so far
        done = f"{last['step']} of {asked[1]}" if asked else str(last["step"])
        rows.append([sampler, done, rewards, entropies, f"{each:.1f}"])
        sources.append(source(result, "trl_learning"))
    if not rows:
        return "Not measured yet; `benchmarks/trl_learning.py` does it."
    return "\n".join([*table(["TRL samples with", "steps", "reward", "entropy", "s a step"], rows), "", sources[-1]])


def verl(result: Any) -> list[str]:
    """Seconds of verl's steps by phase, before the run was killed and after it was resumed."""
    rows = [
        [f"{step['training/global_step']:g}, {part}", *(f"{step.get(f'timing_s/{name}', 0):.2f}" for name in PHASES)]
        for part in ("killed", "resumed")
        for step in result.get(part, {}).get("steps", [])
    ]
    if not rows:
        return []
    failed = [part for part in ("killed", "resumed") if "error" in result.get(part, {})]
    said = words(f"The run that was {' and the one that was '.join(failed)} ended too early.") if failed else []
    return [*table(["step, of the run that was", *PHASES.values()], rows), *said]


PARTS: dict[str, Callable[[], str]] = {"trl-learning": learning, "verl": part("verl_gpu", verl, "verl-h200.json")}
