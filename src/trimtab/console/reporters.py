"""How a run is shown while it goes on. `PlainReporter` prints lines; the live display is in `display.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trimtab.text import printable

COLUMNS = {
    "reward/mean": "reward",
    "eval/accuracy": "held-out",
    "policy/entropy": "entropy",
    "tokens/silenced_share": "silenced",
    "tokens/boosted_share": "boosted",
    "update/clip_share": "clipped",
    "update/grad_norm": "grad",
}


@dataclass
class PlainReporter:
    """Lines for logs and pipes, one every few steps."""

    write: Callable[[str], object]
    lines: int = 20

    def message(self, text: str) -> None:
        """Something a person should read."""
        self.write(printable(text))

    def warm(self, step: int, steps: int, loss: float) -> None:
        """A line now and then."""
        if step == steps or step % max(1, steps // 5) == 0:
            self.write(f"warm start {step}/{steps}  loss {loss:.3f}")

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """A line now and then, and at every evaluation."""
        if step != steps and step % max(1, steps // self.lines) and "eval/accuracy" not in metrics:
            return
        shown = [f"{name} {metrics[key]:.4g}" for key, name in COLUMNS.items() if key in metrics]
        self.write(f"step {step}/{steps}  " + "  ".join(shown))

    def close(self) -> None:
        """Nothing is open."""
