"""The live display shows the main metrics in any terminal, and an error of the terminal never stops the run."""

from __future__ import annotations

import io
import math
import time
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from trimtab.cli.display import POINTS, LiveReporter, PlainReporter, RunDisplay
from trimtab.text import BARS, clock, number, percent, printable, sparkline
from trimtab.trainer.train import SampleText

METRICS = {
    "reward/mean": 0.515,
    "policy/entropy": 0.812,
    "tokens/silenced_share": 0.00012,
    "tokens/boosted_share": 0.05,
    "update/clip_share": 0.03,
    "update/grad_norm": 0.7,
    "time/tokens_per_second": 1234.0,
}


def shown(display: RunDisplay, width: int = 100, height: int = 30, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    console = Console(file=file, width=width, height=height, force_terminal=True, color_system=None)
    console.print(display)
    file.flush()
    return file.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


def display_after(steps: int, **metrics: float) -> RunDisplay:
    display = RunDisplay("a run", target_entropy=0.3)
    display.set_metrics(0, {"eval/accuracy": 0.25})
    for step in range(1, steps + 1):
        display.set_metrics(step, {**METRICS, **metrics, "reward/mean": step / steps})
        display.advance("step", step, 2 * steps)
    display.set_metrics(steps, {**METRICS, **metrics, "eval/accuracy": 0.75})
    return display


def terminal(file: io.StringIO) -> Console:
    return Console(file=file, width=100, height=30, force_terminal=True, color_system=None)


def test_the_display_shows_the_main_metrics() -> None:
    text = shown(display_after(20))
    for words in (
        "step 20/40",
        "reward    0.515",
        "held-out  75.0%",
        "25.0% at step 0",
        "entropy   0.812",
        "target 0.3",
        "silenced 0.012%",
        "boosted 5.0%",
        "clipped 3.0%",
        "gradient norm 0.700",
        "1234 tokens/s",
    ):
        assert words in text


def test_the_display_says_what_the_last_step_spent_its_time_on() -> None:
    assert "time      updates 75.0%, grading 25.0%" in shown(
        display_after(5, **{"time/update": 1.5, "time/grading": 0.5, "time/rollout": 0.6})
    )


def test_a_sample_is_shown_until_it_can_be_read() -> None:
    display = display_after(20)
    display.set_sample([SampleText("3 7 5=16 ", "3*7-5", "16", "correct", 1.0)])
    display.set_sample([SampleText("1 2 3=6 ", "1+2+3", "6", "correct", 1.0)])
    assert "sample    3 7 5=16  3*7-5  correct" in shown(display)
    display.sample_time -= 3
    display.set_sample([SampleText("a question\n" * 90, "\x1b[2Jso\n" + "it is " * 90 + "42", "42", "no_answer", 0.0)])
    (line,) = [line for line in shown(display).splitlines() if "sample" in line]
    assert "a question" in line and "\\x1b[2Jso it is" in line and line.rstrip("│ ").endswith("is 42  no answer")


def test_a_tall_terminal_shows_more_of_a_long_sample() -> None:
    display = display_after(20)
    response = "\x1b[2J" + "".join(f"<{n}>" for n in range(60)) + "\u202e" + "x" * 10_000
    display.set_sample([SampleText("a question", response, "42", "wrong", 0.25)])
    lines = [line[2:-2] for line in shown(display, height=40).splitlines()]
    first = next(n for n, line in enumerate(lines) if line.startswith("sample"))
    assert "a question  \\x1b[2J<0><1>" in lines[first] and "\x1b[2J" not in "".join(lines)
    assert not lines[first + 1][:10].strip() and "<30>" in lines[first + 1]
    assert lines[first + 3].rstrip().endswith("xxx  wrong, reward 0.25")
    assert sum("sample" in line or "xxx" in line for line in shown(display, height=31).splitlines()) == 1


def test_length_and_truncation_are_shown() -> None:
    lengths = {"response/length_mean": 181.25, "response/truncated_share": 0.031}
    assert "length    181.2 tokens    truncated 3.1%  " in shown(display_after(5, **lengths))
    lines: list[str] = []
    PlainReporter(lines.append).step(5, 5, METRICS | lengths)
    assert "  length 181.2  truncated 0.031  entropy 0.812  " in lines[0]


def test_held_out_scores_are_shown_beside_the_accuracy() -> None:
    display = display_after(20)
    display.set_metrics(0, {"eval/score": 0.25})
    display.set_metrics(20, METRICS | {"eval/score": 1.5})
    assert "score     1.500           at step 20 (0.250 at step 0)  " in shown(display)
    lines: list[str] = []
    PlainReporter(lines.append).step(0, 5, {"eval/accuracy": 0.25, "eval/score": 1.5})
    assert lines == ["step 0/5  held-out 0.25  held-out score 1.5"]


def test_plain_lines_have_a_sample_now_and_then() -> None:
    lines: list[str] = []
    reporter = PlainReporter(lines.append, lines=12)
    long = SampleText("3 7 5=16\n", "\x1b[2J\r3*7-5\n" + "so " * 10_000, "16", "no_answer", 0.0)
    for step in range(1, 13):
        reporter.step(step, 12, METRICS, [long])
    samples = [line for line in lines if "sample" in line]
    assert [lines.index(samples[0]), len(lines), len(samples)] == [1, 12 + 3, 3]
    assert samples[0].startswith("  sample: 3 7 5=16  \\x1b[2J 3*7-5 so so") and samples[0].endswith("so  no answer")
    assert len(samples[0]) < 320 and samples[0].isprintable()


def test_a_rising_reward_is_a_rising_curve() -> None:
    (line,) = [line for line in shown(display_after(20)).splitlines() if "reward" in line]
    curve = [BARS.index(c) for c in line if c in BARS][:-1]  # the last step is another one
    assert curve == sorted(curve)
    assert curve[0] == 0
    assert curve[-1] == len(BARS) - 1


@pytest.mark.parametrize("width", [1, 2, 5, 20, 49, 50, 80, 400])
@pytest.mark.parametrize("height", [1, 2, 5, 11, 12, 24, 200])
def test_the_display_fits_into_every_terminal(width: int, height: int) -> None:
    display = display_after(30)
    display.messages.append("a long message " * 30)
    lines = shown(display, width, height).splitlines()
    assert len(lines) <= max(height - 1, 1)
    assert all(len(line) <= width for line in lines)
    assert lines[0][:1] in {"s", "╭", "…"}


@pytest.mark.parametrize("width", [50, 80, 110, 111])
def test_ctrl_c_pressed_twice_fits_behind_the_frame(width: int) -> None:
    """An echo that wraps would move the next frame down by a line, and leave the top of the last one above it."""
    lines = shown(display_after(30), width).splitlines()
    assert lines[-1].startswith("╰") and len(lines[-1]) <= width - len("^C^C")


def test_a_terminal_without_unicode_gets_ascii_curves() -> None:
    assert "#" in shown(display_after(20), encoding="ascii")


def test_numbers_that_are_not_finite_are_dashes() -> None:
    text = shown(display_after(5, **{"update/grad_norm": math.nan, "policy/entropy": math.inf}))
    assert "gradient norm -" in text
    assert "entropy   - " in text


def test_no_boosted_share_is_shown_once_the_gate_is_closed() -> None:
    display = display_after(5)
    display.set_metrics(6, {"reward/mean": 0.5, "stare/gate_open": 0.0})
    text = shown(display)
    assert "gate closed" in text
    assert "boosted" not in text


TRIM = {"trim/target": 0.25, "trim/weight": 1.426, "trim/drive": 0.2}


def test_the_entropy_stands_beside_the_target_of_this_step_and_the_weight_in_use() -> None:
    assert "entropy   0.812           target 0.25, weight 1.43  " in shown(display_after(20, **TRIM))
    assert "target 0.3, weight 4  " in shown(display_after(20, **{"stare/weight": 4.0}))
    assert "trim is off" not in shown(display_after(20, **TRIM))
    assert "trim is off: the entropy is in its band" in shown(display_after(20, **{**TRIM, "trim/drive": 0.0}))


def test_plain_lines_have_the_same_words() -> None:
    lines: list[str] = []
    PlainReporter(lines.append).step(5, 5, {**METRICS, **TRIM})
    PlainReporter(lines.append, target_entropy=0.3).step(5, 5, METRICS)
    PlainReporter(lines.append).step(5, 5, METRICS)
    PlainReporter(lines.append, target_entropy=0.3).step(0, 5, {"eval/accuracy": 0.25})  # before the first rollout
    assert "  entropy 0.812 (target 0.25, weight 1.43)  silenced" in lines[0]
    assert "  entropy 0.812 (target 0.3)  silenced" in lines[1]
    assert "  entropy 0.812  silenced" in lines[2]
    assert lines[3] == "step 0/5  held-out 0.25"


def test_time_left_is_extrapolated_from_the_steps_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    display = RunDisplay("a run")
    display.advance("step", 10, 50)  # resumed at step 10
    assert math.isnan(display.seconds_left())
    now = 140.0
    display.advance("step", 20, 50)
    assert display.seconds_left() == pytest.approx(120.0)


def test_text_of_a_model_cannot_control_the_terminal() -> None:
    evil = "answer \x1b[2J\x1b]0;owned\x07 \u202egnp.exe [bold]markup[/bold]"
    file = io.StringIO()
    reporter = LiveReporter("run \x1b[31m", console=terminal(file), every=0.01)
    reporter.message(evil)
    reporter.close()
    written = file.getvalue()
    for sequence in ("\x1b[2J", "\x1b]0;", "\x07", "\u202e", "\x1b[31m"):
        assert sequence not in written
    assert "[bold]markup[/bold]" in written
    lines: list[str] = []
    PlainReporter(lines.append).message(evil)
    assert lines == [printable(evil)]
    assert lines[0].isprintable()


def test_closing_leaves_the_last_step_on_the_screen_and_shows_the_cursor_again() -> None:
    file = io.StringIO()
    reporter = LiveReporter("a run", console=terminal(file), every=60)
    reporter.warm(3, 3, 1.5)
    reporter.step(7, 9, METRICS)
    reporter.close()
    reporter.close()
    assert "step 7/9" in file.getvalue()
    assert file.getvalue().rstrip().endswith("\x1b[?25h")


class Broken(io.StringIO):
    """A terminal that goes away after a while."""

    def __init__(self, works_for: int) -> None:
        super().__init__()
        self.left = works_for

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError("the terminal is gone")
        return super().write(text)


@pytest.mark.parametrize("works_for", [0, 1, 5])
def test_a_terminal_that_goes_away_does_not_stop_the_run(works_for: int) -> None:
    reporter = LiveReporter("a run", console=terminal(Broken(works_for)), every=0.001)
    for step in range(20):
        reporter.step(step, 20, METRICS)
        reporter.message("going on")
        time.sleep(0.002)
    reporter.close()


def test_a_display_that_fails_becomes_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("cannot draw")

    monkeypatch.setattr("rich.live.Live.start", fail)
    file = io.StringIO()
    reporter = LiveReporter("a run", console=terminal(file))
    reporter.step(20, 20, METRICS)
    reporter.message("hello")
    reporter.close()
    assert "step 20/20  reward 0.515" in file.getvalue()
    assert file.getvalue().endswith("hello\n")


def test_a_display_that_cannot_be_drawn_still_shows_the_step() -> None:
    display = display_after(5)
    display.history = {}
    assert "step 5/10" in shown(display)


def test_the_curves_of_a_long_run_keep_their_shape_in_bounded_memory() -> None:
    display = RunDisplay("long")
    for step in range(1, 50_001):
        display.set_metrics(step, {"reward/mean": step / 50_000})
        assert len(display.history["reward/mean"]) <= POINTS + 2, "beside the first and the last"
    steps = sorted(display.history["reward/mean"])
    assert (steps[0], steps[-1]) == (1, 50_000)
    gaps = {later - earlier for earlier, later in pairwise(steps[1:-1])}
    assert len(gaps) == 1, "evenly over the run"


def test_a_resumed_run_continues_its_curves() -> None:
    earlier = [{"step": n, **METRICS} for n in range(1, 6)]
    reporter = LiveReporter("a run", console=terminal(io.StringIO()), earlier=earlier)
    reporter.step(4, 10, METRICS)  # done again after the checkpoint of step 3
    reporter.close()
    assert sorted(reporter.display.history["reward/mean"]) == [1, 2, 3, 4, 5]


def test_a_sparkline_has_the_shape_of_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == BARS
    assert sparkline([0, 0, 7, 7], 2) == BARS[0] + BARS[-1]
    assert sparkline([1.0, math.nan, 3.0], 3) == f"{BARS[0]} {BARS[-1]}"
    assert sparkline([], 5) == sparkline([math.nan], 5) == sparkline([1.0], 0) == ""
    assert sparkline([0.5], 1, low=0.0, high=1.0) == BARS[4]


def test_small_shares_keep_two_significant_digits() -> None:
    assert [percent(x) for x in (0.0, 0.5, 0.031, 0.00012, None, math.nan)] == [
        "0%",
        "50.0%",
        "3.1%",
        "0.012%",
        "-",
        "-",
    ]
    assert [number(x) for x in (0.5, None, math.inf)] == ["0.500", "-", "-"]
    assert [clock(x) for x in (5, 65, 3661, math.nan)] == ["0:05", "1:05", "1:01:01", "-"]
