"""Every number that alarms depend on, in one table, each with its reason.

`benchmarks/alarms.py` measures what they give on runs that go wrong and on healthy ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


def _number(value: float, why: str) -> Any:
    return field(default=value, metadata={"why": why})


@dataclass(frozen=True)
class Thresholds:
    """When alarms ring. Shares and accuracies are between 0 and 1, entropies and log-probabilities in nats."""

    start: int = _number(10, "steps whose median is the run's own start; fewer would be noise, more would wait longer")
    recent: int = _number(5, "steps whose median is now: one odd step cannot ring an alarm, nor two")
    trend: int = _number(20, "steps over which a trend is taken: a slope over fewer is mostly noise")
    sure: float = _number(6.0, "spreads (scaled MAD of the start) by which now must differ from the start")
    ahead: int = _number(30, "steps that a trend of the entropy is drawn out: time enough to do something")
    hold: int = _number(3, "steps in a row for which a finding must hold before the alarm rings")
    quiet: int = _number(25, "steps without the finding after which an episode is over and the alarm may ring again")

    collapse_level: float = _number(0.25, "of the entropy at the start: healthy runs keep more while they still learn")
    collapse_floor: float = _number(0.1, "of the entropy at the start: where a falling trend must not lead")
    collapse_target: float = _number(0.5, "of the objective's own target entropy, where it has one")
    explosion_level: float = _number(1.5, "times the entropy at the start (or the target, if that is more)")
    explosion_ceiling: float = _number(2.0, "times that entropy: where a rising trend must not lead")
    explosion_least: float = _number(0.1, "nats above it too: a run that starts near 0 may move a little")

    spurious_growth: float = _number(3.0, "times the share at the start")
    spurious_least: float = _number(0.002, "share of tokens below which growth from nothing is no news")
    gradient_growth: float = _number(2.0, "times the share of gradient that few tokens held at the start")
    gradient_least: float = _number(0.2, "share of all gradient below which few tokens do no harm")

    ratio_kl: float = _number(0.02, "nats that the policy moves within a step; trust regions aim at 0.01 or less")
    ratio_growth: float = _number(5.0, "times what it moved at the start")
    ratio_least: float = _number(0.01, "nats within a step below which moving more than at the start is no news")
    ratio_kl_once: float = _number(0.5, "nats within a single step: whatever it was, it was no small step")
    ratio_high: float = _number(20.0, "largest ratio: a token 20 times more probable than when it was drawn")
    clip_growth: float = _number(3.0, "times the clip share at the start; methods differ too much for one level")
    clip_least: float = _number(0.03, "share of tokens below which clipping more is no news")
    mismatch_level: float = _number(0.05, "mean difference of log-probabilities: bf16 engines are below 0.02")
    mismatch_growth: float = _number(5.0, "times the mismatch at the start")
    mismatch_least: float = _number(0.01, "nats below which growth is rounding")

    signal_least: float = _number(0.1, "share of groups with spread: below it nine tenths of the sampling is wasted")
    signal_fall: float = _number(0.5, "of the share of such groups at the start, while no more responses are right")
    truncated_level: float = _number(0.5, "share of responses cut off: most never get to their answer")
    truncated_growth: float = _number(0.1, "rise of that share since the start")
    repetition_growth: float = _number(0.05, "rise of the share of repeated 4-grams since the start")
    length_factor: float = _number(1.5, "times as long, or as short, as at the start")
    length_gain: float = _number(0.05, "rise of held-out accuracy since the start that pays for another length")

    hacking_rise: float = _number(0.1, "rise of accuracy by the verifier since the start")
    hacking_follow: float = _number(0.3, "share of that rise which held-out accuracy must follow")
    jump_rise: float = _number(0.15, "rise of accuracy within a trend's window")
    jump_length: float = _number(0.25, "change of length in the same window, as a share")
    jump_entropy: float = _number(0.4, "fall of the entropy in the same window, as a share")
    drop_share: float = _number(0.7, "of its best, below which reward or held-out accuracy has dropped")
    drop_sure: float = _number(2.5, "times its noise from one value to the next: 30 problems wander by themselves")
    drop_least: float = _number(0.08, "fall in accuracy that counts at all")


def reasons() -> dict[str, tuple[float, str]]:
    """Every threshold with its reason."""
    values = Thresholds()
    return {each.name: (float(getattr(values, each.name)), each.metadata["why"]) for each in fields(Thresholds)}
