"""What a run shows: plain lines in logs and pipes; in a terminal progress, the main metrics, curves and a sample.

The run's thread only updates a `RunDisplay`; another thread draws it. So a slow or closed terminal cannot slow or stop
the run, and after an error while drawing, plain lines are printed instead.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trimtab.text import PrintLine, bars_for, clock, cut_middle, number, percent, printable, sparkline
from trimtab.trainer.train import Reporter, SampleText, time_words

FRAME_HEIGHT, FRAME_WIDTH = 12, 50  # a smaller terminal gets no frame
MAX_WIDTH = 110  # lines that are longer are hard to read
CTRL_C = len("^C^C")  # columns that the terminal's echo takes behind the last line
MESSAGES = 4  # the last ones that are shown
POINTS = 2000  # of a curve: four times a second they are sorted and averaged, which must not slow down a long run
LABEL = 10  # width of the first column
TALL, SAMPLE_LINES = 32, 4  # a terminal of so many lines shows that many of a long sample, a smaller one a line
SAMPLE_SECONDS = 2.0  # a sample is shown so long that it can be read
CURVES = (
    "reward/mean",
    "policy/entropy",
    "eval/accuracy",
    "eval/score",
    "conversation/called_share",
    "agent/requests_mean",
    "response/length_mean",
)
PLAIN_COLUMNS = {
    "reward/mean": "reward",
    "eval/accuracy": "held-out",
    "eval/score": "held-out score",
    "conversation/called_share": "calls",
    "agent/requests_mean": "requests",
    "agent/branches_mean": "branches",
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


def agent_figures(metrics: Mapping[str, float]) -> str:
    """Return a step's rollouts by an agent in words: branches, failures, and how long agents were waited for."""
    failures = {"failed": "agent/failed_share", "too late": "agent/timeout_share"}
    failed = [f"{percent(metrics[key])} {word}" for word, key in failures.items() if metrics.get(key)]
    parts = [
        f"{metrics.get('agent/branches_mean', 0.0):.2f} branches",
        f"{percent(metrics.get('agent/merged_share', 0.0))} of the requests go on",
        *failed,
        f"waited {percent(metrics.get('time/agents_wait_share', 0.0))}",
    ]
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
class PlainReporter(Reporter):
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
        shown = {key: f"{name} {metrics[key]:.4g}" for key, name in PLAIN_COLUMNS.items() if key in metrics}
        if "policy/entropy" in shown and (words := control_words(metrics, self.target_entropy)):
            shown["policy/entropy"] += f" ({words})"
        columns = list(shown.values())
        columns[1:1] = [f"{name} {value:.4g}" for name, value in reward_means(metrics).items()]
        self.print_line(f"step {step}/{steps}  " + "  ".join(columns))
        if samples:
            if self._printed % SAMPLE_EVERY == 0:
                self.print_line(f"  sample: {sample_words(samples[len(samples) // 2], SAMPLE_SPACE)}")
            self._printed += 1


# There is no lock between the two threads: a frame that is drawn while fields change is redrawn a quarter of a second
# later.
@dataclass
class RunDisplay:
    """What is displayed; rich renders it. Histories are by step, so steps that a resumed run repeats are overwritten.

    In a small terminal the last lines, which matter least, are left out.
    """

    title: str
    target_entropy: float | None = None
    phase: str = "loading"
    done: int = 0
    steps: int = 0
    loss: float = math.nan
    last: dict[str, float] = field(default_factory=dict)
    history: dict[str, dict[int, float]] = field(default_factory=lambda: {name: {} for name in CURVES})
    messages: deque[str] = field(default_factory=lambda: deque(maxlen=MESSAGES))
    sample: SampleText | None = None
    sample_time: float = -math.inf
    long_messages: deque[str] = field(default_factory=deque)  # to be printed above the display
    began: float = field(default_factory=time.monotonic)
    first: tuple[float, int] | None = None  # when the phase began and at which step

    def advance(self, phase: str, done: int, steps: int) -> None:
        """Set how far a phase has come."""
        if phase != self.phase or self.first is None:
            self.first = (time.monotonic(), done)
        self.phase = phase
        self.done = done
        self.steps = steps

    def set_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Set a step's metrics."""
        self.last = dict(metrics)  # not merged: once STARE's gate closes, boosted_share is gone
        for name in CURVES:
            if name in metrics:
                _add_point(self.history[name], step, metrics[name])

    def set_sample(self, samples: Sequence[SampleText]) -> None:
        """Show another sample if the last one has been there for long enough."""
        if samples and time.monotonic() - self.sample_time >= SAMPLE_SECONDS:
            self.sample, self.sample_time = samples[len(samples) // 2], time.monotonic()

    def seconds_left(self) -> float:
        """Extrapolate this phase's speed so far; NaN while there is none."""
        # From the first step that was seen, not from step 0: a resumed run did not spend time on those before.
        if self.first is None or self.done <= self.first[1]:
            return math.nan
        since, at = self.first
        return (time.monotonic() - since) / (self.done - at) * (self.steps - self.done)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        try:
            yield self._fitted(console, options)
        except Exception as error:  # the state may change while it is drawn; the next frame is whole again
            yield Text(f"step {self.done}/{self.steps} (display: {type(error).__name__})", no_wrap=True)

    def _fitted(self, console: Console, options: ConsoleOptions) -> RenderableType:
        width, height = min(options.max_width, MAX_WIDTH), console.size.height
        framed = width >= FRAME_WIDTH and height >= FRAME_HEIGHT
        if framed:  # an echo that does not fit wraps, and the next frame would be drawn a line too low
            width = min(width, options.max_width - CTRL_C)
        inside = width - 4 if framed else width
        # The frame takes two lines, and the cursor stays on the one below.
        lines = self._lines(inside, bars_for(console.encoding), SAMPLE_LINES if height >= TALL else 1)[
            : max(1, height - (3 if framed else 1))
        ]
        title = Text(printable(self.title))
        return Panel(Group(*lines), title=title, title_align="left", width=width) if framed else Group(*lines)

    def _lines(self, width: int, bars: str, sample_lines: int) -> list[RenderableType]:
        lines = [self._progress(width)]
        if self.phase == "warm start":
            lines.append(_row("loss", number(self.loss), "a short supervised start before RL"))
        if self.last:
            lines += self._numbers(max(width - LABEL - 22, 0), bars)
        if self.sample is not None:
            space = max(width - LABEL, 1)
            words = sample_words(self.sample, sample_lines * space)
            cut = [words[first : first + space] for first in range(0, len(words), space)]
            lines += [_row("sample" if n == 0 else "", "", part) for n, part in enumerate(cut[:sample_lines])]
        for message in self.messages:
            style = "yellow" if message.startswith("warning") else "dim"
            lines.append(Text(message, style=style, no_wrap=True, overflow="ellipsis"))
        return lines

    def _progress(self, width: int) -> RenderableType:
        elapsed, left = clock(time.monotonic() - self.began), clock(self.seconds_left())
        position = f"{self.phase} {self.done}/{self.steps}" if self.steps else f"{self.phase} ..."
        times = f"{elapsed} elapsed, {left} left" if self.steps else f"{elapsed} elapsed"
        space = width - len(position) - len(times) - 4
        if space < 5:  # no bar
            return Text(f"{position}  {left} left", no_wrap=True, overflow="ellipsis")
        grid = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(self.steps, 1), completed=self.done, width=space, pulse=not self.steps)
        grid.add_row(Text(position, style="bold"), bar, Text(times))
        return grid

    def _numbers(self, space: int, bars: str) -> list[Text]:
        last = self.last
        lines = [_row("reward", number(last.get("reward/mean")), _curve(self.history["reward/mean"], space, bars))]
        if several := reward_means(last):
            shown = ", ".join(f"{name} {number(value)}" for name, value in several.items())
            lines.append(_row("rewards", "", shown))
        if failed := last.get("reward/crashed_share"):
            lines.append(_row("failed", percent(failed), "of the responses: a rule failed, see rule_errors.jsonl"))
        for label, metric, form in (("held-out", "eval/accuracy", percent), ("score", "eval/score", number)):
            if held_out := self.history[metric]:
                start, now = min(held_out), max(held_out)
                note = f"at step {now} ({form(held_out[start])} at step {start})" if now else "before the first step"
                curve = _curve(held_out, space - len(note) - 2, bars) if now else ""
                lines.append(_row(label, form(held_out[now]), f"{note}  {curve}"))
        if "conversation/called_share" in last:
            called = percent(last["conversation/called_share"])
            lines.append(_row("calls", called, _curve(self.history["conversation/called_share"], space, bars)))
            lines.append(_row("tools", "", tool_figures(last)))
        if "agent/requests_mean" in last:
            curve = _curve(self.history["agent/requests_mean"], space, bars)
            lines.append(_row("requests", number(last["agent/requests_mean"]), curve))
            lines.append(_row("agent", "", agent_figures(last)))
        words = control_words(last, self.target_entropy)
        words += "  " if words else ""
        curve = _curve(self.history["policy/entropy"], space - len(words), bars)
        lines.append(_row("entropy", number(last.get("policy/entropy")), words + curve))
        if "response/length_mean" in last:
            length, truncated = length_words(last)
            curve = _curve(self.history["response/length_mean"], space - len(truncated) - 2, bars)
            lines.append(_row("length", length, f"{truncated}  {curve}"))
        lines.append(_row("tokens", "", _shares(last)))
        clipped, norm = percent(last.get("update/clip_share")), number(last.get("update/grad_norm"))
        speed = number(last.get("time/tokens_per_second"), 0)
        lines.append(_row("update", "", f"clipped {clipped}, gradient norm {norm}, {speed} tokens/s"))
        return [*lines, _row("time", "", spent)] if (spent := time_words([last])) else lines


def _add_point(curve: dict[int, float], step: int, value: float) -> None:
    """Add a point to a curve; of a long one every second step is kept, then every fourth, beside the first and last."""
    stride = 1 << (step // POINTS).bit_length()
    first, last = next(iter(curve), step), next(reversed(curve), step)
    if last % stride and last != first:
        del curve[last]
    curve[step] = value
    if len(curve) > POINTS:
        for other in [n for n in curve if n % stride and n not in (first, step)]:
            del curve[other]


def _shares(metrics: Mapping[str, float]) -> str:
    """Return the shares of tokens that the objective silences, boosts and so on, silenced first."""
    names = [key for key in metrics if key.startswith("tokens/") and key.endswith("_share")]
    names.sort(key=lambda key: (key != "tokens/silenced_share", key))
    shares = [f"{key.removeprefix('tokens/').removesuffix('_share')} {percent(metrics[key])}" for key in names]
    if metrics.get("stare/gate_open") == 0:
        shares.append("gate closed: the entropy is at or above its target")
    if metrics.get("trim/drive") == 0:
        shares.append("trim is off: the entropy is in its band")
    return ", ".join(shares) or "none silenced or reweighted"


def _row(label: str, value: str, note: str) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{label:<{LABEL}}", style="dim")
    if value:
        text.append(f"{value:<14}  ", style="bold")
    return text.append(note)


def _curve(history: Mapping[int, float], space: int, bars: str) -> str:
    return sparkline([history[step] for step in sorted(history)], min(space, 60), bars=bars)


class LiveReporter(Reporter):
    """The `Reporter` of a terminal; `close` leaves the last picture on the screen."""

    def __init__(
        self,
        title: str,
        target_entropy: float | None = None,
        console: Console | None = None,
        every: float = 0.25,
        earlier: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        self.display = RunDisplay(title, target_entropy)
        for record in earlier:  # a resumed run continues its curves
            self.display.set_metrics(int(record["step"]), record)
        # Its file is fixed: while a rule runs, sys.stdout is the file for what the rule prints.
        self.console = console or Console(file=sys.stdout)
        self._plain = PlainReporter(self._write, target_entropy=target_entropy)
        self._live: Live | None = Live(self.display, console=self.console, auto_refresh=False)
        self._over = threading.Event()
        # A daemon, so that a terminal that blocks cannot keep the process from ending.
        self._thread = threading.Thread(target=self._draw, args=(every,), name="display", daemon=True)
        self._guard(self._live.start)
        self._thread.start()

    def message(self, text: str) -> None:
        """Show a message."""
        if self._live is None:
            self._plain.message(text)
        else:
            lines = [line for line in printable(text).splitlines() if line.strip()]
            # A traceback is to be read in full: it stays above the display, which shows only the last lines.
            if len(lines) > MESSAGES:
                self.display.long_messages.append("\n".join(lines))
                lines = lines[:1]
            self.display.messages.extend(lines)

    def warm(self, step: int, steps: int, loss: float) -> None:
        """Show a step of the warm start."""
        self.display.loss = loss
        self.display.advance("warm start", step, steps)
        if self._live is None:
            self._plain.warm(step, steps, loss)

    def step(self, step: int, steps: int, metrics: Mapping[str, float], samples: Sequence[SampleText] = ()) -> None:
        """Show a step of RL."""
        self.display.set_metrics(step, metrics)
        self.display.set_sample(samples)
        self.display.advance("step", step, steps)
        if self._live is None:
            self._plain.step(step, steps, metrics, samples)

    def close(self) -> None:
        """Draw a last time and restore the terminal; a second call does nothing."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join(timeout=5)  # it may be blocked in a write, as after Ctrl-S
        self._guard(self._refresh)  # what was said since the last frame
        if self._live is not None:
            self._guard(self._live.stop)

    def _draw(self, every: float) -> None:
        while not self._over.wait(every) and self._live is not None:
            self._guard(self._refresh)

    def _refresh(self) -> None:
        while self.display.long_messages and self._live is not None:
            self._live.console.print(Text(self.display.long_messages.popleft()))
        if self._live is not None:
            self._live.refresh()

    def _guard(self, action: Callable[[], object]) -> None:
        """Do something with the terminal; an error ends the live display and nothing else."""
        try:
            action()
        except Exception:  # a terminal or rich may raise anything, and the run must not stop
            live, self._live = self._live, None
            if live is not None:
                self._guard(live.stop)

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # closed
            self.console.file.write(text + "\n")
            self.console.file.flush()
