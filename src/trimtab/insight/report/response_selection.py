"""Which responses the microscope holds: something of every kind worth a look, until the budget is spent.

Kinds take turns, so that no kind crowds out another. A response comes whole unless it would take a quarter of what is
left; then the stretch around the token that made it worth a look comes alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trimtab.insight.report.survey import Candidate

# In the order in which they take turns, and what the page calls them.
KINDS = {
    "asked": "step asked for",
    "alarm": "at an alarm",
    "silenced": "most silenced",
    "gradient": "largest gradient",
    "ends": "first or last step",
    "clipped": "most clipped",
    "longest": "longest",
    "random": "at random",
}
MOST_RESPONSES = 400
EXCERPT = 512  # tokens
_FAIR_SHARE = 4  # a whole response may take one part in so many of what is left


@dataclass
class Item:
    """A response of the microscope, or the stretch of it from `start` up to `stop`, and why it is there."""

    step: int
    response: int
    start: int
    stop: int
    kinds: list[str] = field(default_factory=list)


def choose(candidates: Mapping[str, Sequence[Candidate]], tokens: int, most: int = MOST_RESPONSES) -> list[Item]:
    """The items, by step and response, of at most so many tokens."""
    queues = {kind: sorted(candidates.get(kind, ())) for kind in KINDS}  # the best last
    items: dict[tuple[int, int], list[Item]] = {}
    left, count = tokens, 0
    while any(queues.values()) and count < most:
        for kind, queue in queues.items():
            if not queue or count >= most:
                continue
            candidate = queue.pop()
            held = items.setdefault((candidate.step, candidate.response), [])
            inside = [item for item in held if item.start <= candidate.position < item.stop]
            if inside:
                inside[0].kinds += [kind] if kind not in inside[0].kinds else []
                continue
            item = _cut(candidate, kind, left)
            if item.stop - item.start <= left:
                held.append(item)
                left, count = left - (item.stop - item.start), count + 1
    found = [item for held in items.values() for item in held]
    return sorted(found, key=lambda item: (item.step, item.response, item.start))


def _cut(candidate: Candidate, kind: str, left: int) -> Item:
    length = candidate.length
    if length <= max(left // _FAIR_SHARE, EXCERPT):
        return Item(candidate.step, candidate.response, 0, length, [kind])
    start = min(max(candidate.position - EXCERPT // 2, 0), length - EXCERPT)
    return Item(candidate.step, candidate.response, start, start + EXCERPT, [kind])
