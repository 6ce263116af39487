"""How far a run has come: all that a resumed one has to know besides weights, optimizer and controllers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Progress:
    """`step` counts finished steps, `position` prompts drawn; the rest counts troubles."""

    step: int = 0
    position: int = 0
    steps_without_signal: int = 0
    updates_skipped: int = 0

    def state(self) -> dict[str, int]:
        """As plain numbers."""
        return asdict(self)

    def restore(self, state: dict[str, Any]) -> None:
        """What `state` gave."""
        for name in self.state():
            setattr(self, name, int(state[name]))
