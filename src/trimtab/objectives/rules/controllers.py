"""Controllers: the state that an objective carries from one rollout batch to the next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

# Bounds of the adaptive weights, so that a target out of reach cannot drive them on and on.
BOOST_LIMIT = 1.5
DAMP_LIMIT = 0.5


@dataclass
class EntropyGate:
    """STARE's gate: open while the rollout's token-mean entropy is strictly below the target. It starts open.

    With `rate` > 0 the two weights adapt: each rollout moves `boost` up and `damp` down by `rate` while the entropy is
    below the target, and back while it is above.
    """

    target: float
    boost: float
    damp: float
    rate: float = 0.0
    is_open: bool = True
    entropy: float = math.nan

    def observe(self, entropy: float) -> None:
        """Update the gate with a rollout's token-mean entropy; one that is not finite changes nothing."""
        if not math.isfinite(entropy):
            return
        self.entropy = entropy
        self.is_open = entropy < self.target
        if self.rate:
            step = self.rate * ((self.target > entropy) - (self.target < entropy))
            self.boost = min(max(self.boost + step, 1.0), BOOST_LIMIT)
            self.damp = min(max(self.damp - step, DAMP_LIMIT), 1.0)

    def state_dict(self) -> dict[str, float]:
        """Return gate and weights, and `entropy` once one has been observed."""
        state = {"is_open": float(self.is_open), "boost": self.boost, "damp": self.damp}
        return state | ({"entropy": self.entropy} if math.isfinite(self.entropy) else {})

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a state that `state_dict` returned; a missing or non-finite value raises and changes nothing."""
        known = {"is_open", "boost", "damp"}
        if not known <= set(state) <= known | {"entropy"}:
            raise ValueError(f"an entropy gate's state has the keys {sorted(known)}, got {sorted(state)}")
        if not all(math.isfinite(float(value)) for value in state.values()):
            raise ValueError(f"an entropy gate's state must be finite numbers, got {dict(state)}")
        self.is_open = bool(state["is_open"])
        self.boost, self.damp = float(state["boost"]), float(state["damp"])
        self.entropy = float(state.get("entropy", math.nan))
