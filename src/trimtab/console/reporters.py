"""The reporter for logs and pipes: plain lines. The live display of a terminal is in `display.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab.text import PrintLine, percent, printable
from trimtab.train import SampleText

COLUMNS = {
    "reward/mean": "reward",
    "eval/accuracy": "held-out",
    "conversation/called_share": "calls",
    "policy/entropy": "entropy",
    "tokens/silenced_share": "silenced",
    "tokens/boosted_share": "boosted",
    "update/clip_share": "clipped",
    "update/grad_norm": "grad",
}


def reward_means(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the mean of each of several rewards by its name in the recipe."""
    names = [key for key in metrics if key.startswith("rewards/") and not key.endswith("_spread")]
    return {key.removeprefix("rewards/"): metrics[key] for key in names}


def tool_figures(metrics: Mapping[str, float]) -> str:
    """Return a step's conversations in words: turns, calls that failed by kind, and how long tools were waited for."""
    turns = metrics.get("conversation/turns_mean", 0.0)
    known = [key for key in metrics if key.startswith("tools/") and key not in ("tools/calls", "tools/ok")]
    failed = [f"{metrics[key]:.0f} {key.removeprefix('tools/').replace('_', ' ')}" for key in known if metrics[key]]
    waited = metrics.get("time/tools_wait_share", 0.0)
    parts = [f"{turns:.2f} turns", f"{metrics.get('tools/calls', 0):.0f} calls", *failed, f"waited {percent(waited)}"]
    return ", ".join(parts)


def control_words(metrics: Mapping[str, float], target: float | None) -> str:
    """Return the target of the entropy and the weight in use; `target` is that of an objective which logs none."""
    target = metrics.get("trim/target", target)
    weight = metrics.get("trim/weight", metrics.get("stare/weight"))
    words = [] if target is None else [f"target {target:.3g}"]
    return ", ".join(words if weight is None else [*words, f"weight {weight:.3g}"])


@dataclass
class PlainReporter:
    """Prints about `lines` lines over a whole run, and one at every evaluation."""

    print_line: PrintLine
    lines: int = 20
    target_entropy: float | None = None

    def message(self, text: str) -> None:
        """Print a message."""
        self.print_line(printable(text))

    def warm(self, step: int, steps: int, loss: float) -> None:
        """Print about five lines over the warm start."""
        if step == steps or step % max(1, steps // 5) == 0:
            self.print_line(f"warm start {step}/{steps}  loss {loss:.3f}")

    def step(self, step: int, steps: int, metrics: Mapping[str, float], samples: Sequence[SampleText] = ()) -> None:
        """Print a step's main metrics if its turn has come."""
        # A log of thousands of steps stays readable with `lines` lines.
        if step != steps and step % max(1, steps // self.lines) and "eval/accuracy" not in metrics:
            return
        shown = {key: f"{name} {metrics[key]:.4g}" for key, name in COLUMNS.items() if key in metrics}
        if "policy/entropy" in shown and (words := control_words(metrics, self.target_entropy)):
            shown["policy/entropy"] += f" ({words})"
        columns = list(shown.values())
        columns[1:1] = [f"{name} {value:.4g}" for name, value in reward_means(metrics).items()]
        self.print_line(f"step {step}/{steps}  " + "  ".join(columns))

    def close(self) -> None:
        """Do nothing: there is nothing to close."""
