"""Dynamic loss scaling: what fp16 needs so that small gradients are not rounded to zero.

The loss is multiplied by a power of two before the backward pass, and gradients are divided by it before they are
clipped. If a gradient overflows, the scale is halved and the update computed again, so no mini-batch is lost. After
many updates in a row the scale is doubled. Every process decides by the same summed gradient norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

START = 2.0**16
SMALLEST, LARGEST = 1.0, 2.0**24
# A scale that turns out too large costs one more pass: at most once in so many updates. torch's GradScaler has 2,000,
# but an RL run may have fewer updates than that.
GROWTH_INTERVAL = 200


@dataclass
class LossScale:
    """The scale, and the number of updates since it last changed."""

    value: float = START
    updates: int = 0

    def lower(self) -> bool:
        """Halve the scale after an overflow; return False if it is the smallest, so that the scale is not the cause."""
        if self.value <= SMALLEST:
            return False
        self.value /= 2
        self.updates = 0
        return True

    def keep(self) -> None:
        """Count an update without an overflow, and double the scale after many."""
        self.updates += 1
        if self.updates >= GROWTH_INTERVAL:
            self.value = min(2 * self.value, LARGEST)
            self.updates = 0

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs."""
        return {"value": self.value, "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a state; one that is not valid raises ValueError."""
        value, updates = state["value"], state["updates"]
        power = type(value) is float and SMALLEST <= value <= LARGEST and value.hex().startswith("0x1.0000000000000p")
        if not power or type(updates) is not int or not 0 <= updates < GROWTH_INTERVAL:
            raise ValueError(f"the loss scale is {value!r:.40} after {updates!r:.40} updates")
        self.value, self.updates = value, updates
