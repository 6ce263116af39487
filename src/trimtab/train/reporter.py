"""What a run tells whoever shows it: messages, steps of the warm start, steps of RL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Reporter(Protocol):
    """Where a run tells what it does."""

    def message(self, text: str) -> None:
        """Something a person should read."""
        ...

    def warm(self, step: int, steps: int, loss: float) -> None:
        """A step of the warm start."""
        ...

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """A step of RL."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...
