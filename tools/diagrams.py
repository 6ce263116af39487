"""Draws the diagrams of docs/architecture.md and docs/plan-then-loss.md: boxes on a grid, and arrows between them.

As pictures they need no script, which the site would have to load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

WIDTH, HEIGHT, GAP_X, GAP_Y = 196, 50, 44, 34  # of a box, and between boxes
MARGIN, SIDE = 12, 116  # around all, and for an arrow that goes back
HEAD = "M0 0L8 4L0 8z"


class Box(NamedTuple):
    """Where a box is on the grid, and its two lines of text."""

    column: float
    row: float
    title: str
    text: str

    def centre(self, left: int) -> tuple[float, float]:
        """Return the middle of the box in the picture."""
        return left + self.column * (WIDTH + GAP_X) + WIDTH / 2, MARGIN + self.row * (HEIGHT + GAP_Y) + HEIGHT / 2


class Diagram(NamedTuple):
    """A description for those who do not see it, boxes, arrows from box to box, and an arrow back with its label."""

    description: str
    boxes: Mapping[str, Box]
    arrows: Sequence[tuple[str, str]]
    back: tuple[str, str, str] | None = None

    def svg(self) -> str:
        """Return the picture."""
        left = SIDE if self.back else MARGIN
        width = max(box.centre(left)[0] for box in self.boxes.values()) + WIDTH / 2 + MARGIN
        height = max(box.centre(left)[1] for box in self.boxes.values()) + HEIGHT / 2 + MARGIN
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'font-family="sans-serif" font-size="13" role="img" aria-label="{self.description}">',
            # A background of its own, so that the picture reads on a dark page too.
            f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
            f'<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            f'<path d="{HEAD}" fill="#555"/></marker>',
        ]
        lines = [_line(self.boxes[a].centre(left), self.boxes[b].centre(left)) for a, b in self.arrows]
        if self.back:
            start, end, label = self.back
            (x, y), (_, top) = self.boxes[start].centre(left), self.boxes[end].centre(left)
            edge, far = x - WIDTH / 2, x - WIDTH / 2 - 24
            lines.append(f"M{edge:g} {y:g}H{far:g}V{top:g}H{edge:g}")
            middle = (y + top) / 2
            parts.append(f'<text x="{far - 6:g}" y="{middle:g}" text-anchor="end" fill="#555">{label}</text>')
        parts += [
            f'<path d="{d}" fill="none" stroke="#555" stroke-width="1.3" marker-end="url(#head)"/>' for d in lines
        ]
        for box in self.boxes.values():
            x, y = box.centre(left)
            parts += [
                f'<rect x="{x - WIDTH / 2:g}" y="{y - HEIGHT / 2:g}" width="{WIDTH}" height="{HEIGHT}" rx="5" '
                'fill="#eef2f5" stroke="#7c93a3"/>',
                f'<text x="{x:g}" y="{y - 5:g}" text-anchor="middle" font-weight="bold" fill="#222">{box.title}</text>',
                f'<text x="{x:g}" y="{y + 14:g}" text-anchor="middle" font-size="12" fill="#333">{box.text}</text>',
            ]
        return "\n".join([*parts, "</svg>", ""])


def _line(start: tuple[float, float], end: tuple[float, float]) -> str:
    """Return a path between two boxes: straight along a row or a column, else with two corners."""
    (x1, y1), (x2, y2) = start, end
    if y1 == y2:
        return f"M{x1 + WIDTH / 2:g} {y1:g}H{x2 - WIDTH / 2:g}"
    if y2 < y1 and x1 == x2:
        return f"M{x1:g} {y1 - HEIGHT / 2:g}V{y2 + HEIGHT / 2:g}"
    if y2 < y1:  # into the box above, from the side
        return f"M{x1 + WIDTH / 2:g} {y1:g}H{x1 + (WIDTH + GAP_X) / 2:g}V{y2 + 12:g}H{x2 - WIDTH / 2:g}"
    middle = y2 - HEIGHT / 2 - GAP_Y / 2
    return f"M{x1:g} {y1 + HEIGHT / 2:g}V{middle:g}H{x2:g}V{y2 - HEIGHT / 2:g}"


PLAN = Diagram(
    "A plan is made from the rollout batch; the losses of all micro-batches follow it and add up to one optimizer "
    "step; the plan is also recorded",
    {
        "batch": Box(1, 0, "rollout batch", "log-probs, entropies, rewards"),
        "plan": Box(1, 1, "plan", "weight, clip range, reason"),
        "one": Box(0, 2, "loss", "of micro-batch 1"),
        "two": Box(1, 2, "loss", "of micro-batch 2"),
        "record": Box(2, 2, "records", "report, replay"),
        "update": Box(0.5, 3, "optimizer step", "one for all micro-batches"),
    },
    [("batch", "plan"), ("plan", "one"), ("plan", "two"), ("plan", "record"), ("one", "update"), ("two", "update")],
)

BATCH = Diagram(
    "A batch moves from tasks through rollout, rewards, scoring, observing and planning to the update, which gives the "
    "rollout new weights; plan and update are recorded, and metrics go to the alarms",
    {
        "tasks": Box(0, 0, "tasks", "prompts and answers"),
        "rollout": Box(0, 1, "rollout", "responses, sampler log-probs"),
        "rewards": Box(0, 2, "rewards", "verdicts"),
        "score": Box(0, 3, "policy.score", "log-probs, entropies, moments"),
        "batch": Box(0, 4, "objectives.TokenBatch", "response tokens, end to end"),
        "observe": Box(0, 5, "objective.observe", "controllers: STARE's gate"),
        "plan": Box(0, 6, "objective.plan", "every decision, no gradient"),
        "update": Box(0, 7, "policy.update", "micro-batches, loss, step"),
        "record": Box(1, 6, "record", "tokens, plan, reasons"),
        "insight": Box(1, 5, "insight", "replay, report"),
        "metrics": Box(1, 7, "train.metrics", "metrics.jsonl"),
        "alarms": Box(1, 8, "insight.alarms", "warn, save or stop"),
    },
    [
        ("tasks", "rollout"),
        ("rollout", "rewards"),
        ("rewards", "score"),
        ("score", "batch"),
        ("batch", "observe"),
        ("observe", "plan"),
        ("plan", "update"),
        ("plan", "record"),
        ("update", "record"),
        ("update", "metrics"),
        ("record", "insight"),
        ("metrics", "alarms"),
    ],
    back=("update", "rollout", "new weights"),
)

REASON = Diagram(
    "A token rule marks tokens in the PlanBuilder; the reason's bits go into the loss, the records and the metrics; "
    "replay and microscope read the records",
    {
        "rule": Box(1, 0, "objectives/rules", "a token rule marks tokens"),
        "builder": Box(1, 1, "PlanBuilder.mark", "objectives/plan_builder.py"),
        "bits": Box(1, 2, "Plan.reason", "bits of Reason per token"),
        "loss": Box(0, 3, "Objective.loss", "weight, scale, clip range"),
        "column": Box(1, 3, "column reason", "record/schema.py"),
        "metric": Box(2, 3, "metrics", "tokens/silenced_share, ..."),
        "replay": Box(0.5, 4, "insight/replay", "planned again under others"),
        "microscope": Box(1.5, 4, "insight/report", "token microscope"),
    },
    [
        ("rule", "builder"),
        ("builder", "bits"),
        ("bits", "loss"),
        ("bits", "column"),
        ("bits", "metric"),
        ("column", "replay"),
        ("column", "microscope"),
    ],
)

DIAGRAMS = {"plan": PLAN, "batch": BATCH, "reason": REASON}
