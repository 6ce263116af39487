"""The table and the picture of docs/tools.md: SmolLM2-135M learns to call Python on an H200, one run for each seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks/results"
SEEDS = ("smollm2-tools-h200.json", "smollm2-tools-h200-seed1.json", "smollm2-tools-h200-seed2.json")
PANELS = (  # metric, title, whether it is a share
    ("eval/accuracy", "held-out accuracy, greedy", True),
    ("conversation/called_share", "samples with a successful call", True),
    ("response/length_mean", "sampled tokens per response", False),
)
COLOURS = ("#2166ac", "#d6604d", "#4d9221")  # of the seeds
FEW = 15  # points of a line that get a dot each
WIDTH, HEIGHT, LEFT, TOP, GAP, BOTTOM = 230, 150, 56, 44, 72, 66  # pixels of a panel, and around it


def runs() -> list[Any]:
    """The result of every seed; none where nothing has been measured."""
    return [json.loads((RESULTS / name).read_text()) for name in SEEDS if (RESULTS / name).exists()]


def learned() -> str:
    """What every seed could do before RL and after it, and how long that took."""
    found = runs()
    if not found:
        return "Not measured yet; `benchmarks/smollm2_rl.py` does it."
    lines = [
        "| seed | right before RL | after 3 steps | after 30 | samples with a successful call, first and last step "
        "| tokens per response, first and last step | seconds of RL |",
        "|---" * 7 + "|",
    ]
    for seed, run in enumerate(found):
        held_out, curves = dict(run["curves"]["eval/accuracy"]), run["curves"]
        called, length = ([value for _, value in curves[name]] for name, _, _ in PANELS[1:])
        lines.append(
            f"| {seed} | {held_out[0]:.1%} | {held_out[3]:.1%} | {held_out[30]:.1%} "
            f"| {called[0]:.1%}, {called[-1]:.1%} | {length[0]:.0f}, {length[-1]:.0f} | {run['rl_seconds']:.0f} |"
        )
    versions = ", ".join(f"{name} {version}" for name, version in found[0]["versions"].items() if name != "python")
    where = f"{found[0]['machine']}, {versions}; by `benchmarks/smollm2_rl.py`, {found[0]['date']}."
    return "\n".join([*lines, "", where])


def curves() -> str:
    """The picture: one panel for each metric, one line for each seed."""
    found = runs()
    width, height = LEFT + len(PANELS) * (WIDTH + GAP) - GAP + 24, TOP + HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12" role="img" aria-label="Accuracy, calls and lengths of three runs with tools, by step">',
        # A background of its own, so that the picture reads on a dark page too.
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, (metric, title, share) in enumerate(PANELS):
        parts += _panel([run["curves"][metric] for run in found], title, share, LEFT + number * (WIDTH + GAP))
    for seed in range(len(found)):
        x = LEFT + 90 * seed
        parts.append(f'<path d="M{x} {height - 16}h20" stroke="{COLOURS[seed]}" stroke-width="2.5"/>')
        parts.append(f'<text x="{x + 26}" y="{height - 12}" fill="#222">seed {seed}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(lines: list[list[tuple[int, float]]], title: str, share: bool, left: float) -> list[str]:
    points = [point for line in lines for point in line]
    last = max((step for step, _ in points), default=1)
    top = 1.0 if share else 50.0 * (int(max((value for _, value in points), default=0.0) / 50) + 1)

    def place(step: float, value: float) -> tuple[float, float]:
        return round(left + WIDTH * step / last, 1), round(TOP + HEIGHT * (1 - value / top), 1)

    parts = [f'<text x="{left}" y="22" font-weight="bold" fill="#222">{title}</text>']
    for mark in (0.0, top / 2, top):
        y = place(0, mark)[1]
        parts.append(f'<path d="M{left} {y}h{WIDTH}" stroke="#ddd"/>')
        text = f"{mark:.0%}" if share else f"{mark:.0f}"
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end" fill="#555">{text}</text>')
    for step in range(0, last + 1, 10):
        x = place(step, 0)[0]
        parts.append(f'<text x="{x}" y="{TOP + HEIGHT + 18}" text-anchor="middle" fill="#555">{step}</text>')
    parts.append(f'<text x="{left + WIDTH}" y="{TOP + HEIGHT + 34}" text-anchor="end" fill="#555">step of RL</text>')
    for seed, line in enumerate(lines):
        at, colour = [place(*point) for point in line], COLOURS[seed]
        path = "L".join(f"{x} {y}" for x, y in at)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2" opacity="0.85"/>')
        if len(line) <= FEW:  # evaluations: a dot shows that nothing was measured in between
            parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in at]
    return parts
