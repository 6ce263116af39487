"""The tables of docs/agents.md: what the recipe `agent` learns, and what the endpoint costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks/results"


def learned() -> str:
    """What every seed could do before RL and after it, and how long that took."""
    path = RESULTS / "agent-recipe-cpu.json"
    if not path.exists():
        return "Not measured yet; `benchmarks/agent_recipe.py` does it."
    result = json.loads(path.read_text())
    steps = [at for at, _ in result["runs"][0]["held_out"]]
    shown = [steps[0], steps[len(steps) // 2], steps[-1]]
    lines = [
        "| seed | "
        + " | ".join(f"right after {step} steps" if step else "right before RL" for step in shown)
        + " | requests per rollout, first and last step | seconds | CPU seconds |",
        "|---" * (len(shown) + 4) + "|",
    ]
    for run in result["runs"]:
        held_out, requests = dict(run["held_out"]), [value for _, value in run["requests"]]
        cells = [f"{held_out[step]:.0%}" for step in shown]
        cells += [f"{requests[0]:.1f}, {requests[-1]:.1f}", f"{run['seconds']:.0f}", f"{run['cpu_seconds']:.0f}"]
        lines.append(f"| {run['seed']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Held-out games, greedy. {_where(result, 'agent_recipe.py')}"])


def overhead() -> str:
    """What a request through the endpoint takes beside the same answer without it."""
    path = RESULTS / "endpoint-cpu.json"
    if not path.exists():
        return "Not measured yet; `benchmarks/endpoint.py` does it."
    result = json.loads(path.read_text())
    lines = [
        "| agents at a time | client | CPU ms of the endpoint per request | CPU ms of sampling per request "
        "| the same without an endpoint | requests per second | without an endpoint | batch filled |",
        "|---" * 8 + "|",
    ]
    clients = {"socket": "bare socket", "openai": "`openai` package"}
    for run in result["runs"]:
        bare = run["bare"]
        cells = [
            str(run["agents"]), clients[run["client"]], f"{run['server_ms_per_request']:.2f}",
            f"{run['sampler_ms_per_request']:.2f}", f"{bare['sampler_ms_per_request']:.2f}",
            f"{run['requests_per_second']:.0f}", f"{bare['requests_per_second']:.0f}", f"{run['batch_filled']:.0%}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"The demo's model. {_where(result, 'endpoint.py')}"])


def _where(result: dict[str, Any], script: str) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if name != "trimtab")
    return (
        f"{result['machine']}, shared with other work (load {result['load']:g}); {versions}; "
        f"by `benchmarks/{script}`, {result['date']}."
    )
