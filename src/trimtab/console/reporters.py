"""The reporter for logs and pipes: plain lines. The live display of a terminal is in `display.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab.text import PrintLine, cut_middle, number, percent, printable
from trimtab.trainer.train import SampleText

COLUMNS = {
    "reward/mean": "reward",
    "eval/accuracy": "held-out",
    "eval/score": "held-out score",
    "conversation/called_share": "calls",
    "response/length_mean": "length",
    "response/truncated_share": "truncated",
    "policy/entropy": "entropy",
    "tokens/silenced_share": "silenced",
    "tokens/boosted_share": "boosted",
    "update/clip_share": "clipped",
    "update/grad_norm": "grad",
}

SAMPLE_EVERY = 5  # lines of steps from one sample to the next
SAMPLE_SPACE = 300  # characters of a sample


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


def length_words(metrics: Mapping[str, float]) -> tuple[str, str]:
    """Return the mean length of a step's responses, and in words how many of them were truncated."""
    length, truncated = metrics.get("response/length_mean"), percent(metrics.get("response/truncated_share"))
    return f"{number(length, 1)} tokens", f"truncated {truncated}"


def sample_words(sample: SampleText, space: int) -> str:
    """Return prompt, response and verdict on one line; what is too long keeps its beginning and its end.

    A reward that the verdict does not say, as that of a rule which returns numbers, stands behind it.
    """
    # Cut before anything else: a text may be of any length, and the live display draws it four times a second.
    texts = (cut_middle(text, 4 * space, "...") for text in (sample.prompt, sample.response))
    prompt, response = (printable(" ".join(text.split())) for text in texts)
    verdict = sample.verdict.replace("_", " ")
    verdict += "" if sample.reward in (0.0, 1.0) else f", reward {sample.reward:.3g}"
    kept = max(space - len(verdict) - 10, 0)  # the dots, and the blanks between
    prompt = cut_middle(prompt, kept // 3, "...")
    return f"{prompt}  {cut_middle(response, kept - len(prompt), '...')}  {verdict}"


@dataclass
class PlainReporter:
    """Prints about `lines` lines over a whole run, one at every evaluation, and now and then a sample."""

    print_line: PrintLine
    lines: int = 20
    target_entropy: float | None = None
    _printed: int = 0  # lines of steps with samples

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
        if samples:
            if self._printed % SAMPLE_EVERY == 0:
                self.print_line(f"  sample: {sample_words(samples[len(samples) // 2], SAMPLE_SPACE)}")
            self._printed += 1

    def close(self) -> None:
        """Do nothing: there is nothing to close."""
