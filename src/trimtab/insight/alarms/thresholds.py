"""Every threshold of the alarms in one table, each with its reason.

`benchmarks/alarms.py` measures detection and false alarms on faulty and healthy runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


def _threshold(value: float, why: str) -> Any:
    # The reason is metadata instead of a comment: docs/alarms.md prints it.
    return field(default=value, metadata={"why": why})


@dataclass(frozen=True)
class Thresholds:
    """When alarms ring. Shares and accuracies are between 0 and 1, entropies and log-probabilities in nats."""

    start_steps: int = _threshold(
        10, "steps whose median is the start of the run; fewer are noisy, more delay the alarms"
    )
    recent_steps: int = _threshold(5, "steps whose median is now: one odd step cannot ring an alarm, nor two")
    trend_steps: int = _threshold(20, "steps over which a trend is taken: a slope over fewer is mostly noise")
    min_spreads: float = _threshold(6.0, "spreads (scaled MAD of the start) by which now must differ from the start")
    forecast_steps: int = _threshold(30, "steps that the trend of the entropy is extrapolated: time enough to act")
    hold_steps: int = _threshold(3, "steps in a row for which a finding must hold before the alarm rings")
    quiet_steps: int = _threshold(25, "steps without the finding after which the alarm may ring again")

    learned_gain: float = _threshold(
        0.2, "rise of accuracy since the start that explains a policy which is more certain"
    )

    # Entropy
    collapse_level: float = _threshold(0.25, "of the entropy at the start: healthy runs keep more while they learn")
    collapse_floor: float = _threshold(0.1, "of the entropy at the start: where a falling trend must not lead")
    collapse_target: float = _threshold(0.5, "of the objective's own target entropy, where it has one")
    explosion_level: float = _threshold(1.5, "times the entropy at the start (or the target, if that is more)")
    explosion_ceiling: float = _threshold(2.0, "times that entropy: where a rising trend must not lead")
    explosion_min_rise: float = _threshold(0.1, "nats above it too: a run that starts near 0 may move a little")

    # Tokens that weigh too much
    spurious_growth: float = _threshold(3.0, "times the share at the start")
    spurious_min_share: float = _threshold(0.002, "share of tokens below which growth is ignored")
    gradient_growth: float = _threshold(2.0, "times the share of gradient that few tokens held at the start")
    gradient_min_share: float = _threshold(0.2, "share of all gradient below which concentration is harmless")

    # How far an update moves the policy, and the sampler from the trainer
    ratio_kl: float = _threshold(0.02, "nats that the policy moves within a step; trust regions aim at 0.01 or less")
    ratio_growth: float = _threshold(5.0, "times what it moved at the start")
    ratio_kl_min: float = _threshold(0.01, "nats within a step below which growth is ignored")
    ratio_kl_once: float = _threshold(0.5, "nats within a single step, even if only once")
    ratio_max: float = _threshold(20.0, "largest ratio: a token 20 times more probable than when it was sampled")
    clip_growth: float = _threshold(3.0, "times the clip share at the start; methods differ too much for one level")
    clip_min_share: float = _threshold(0.03, "share of tokens below which growth is ignored")
    mismatch_level: float = _threshold(0.05, "mean difference of log-probabilities: bf16 engines are below 0.02")
    mismatch_growth: float = _threshold(5.0, "times the mismatch at the start")
    mismatch_min: float = _threshold(0.01, "nats below which growth is rounding")

    # Responses
    signal_min_share: float = _threshold(0.1, "share of groups with spread: below it 90 % of the sampling is wasted")
    signal_fall: float = _threshold(0.5, "of the share of such groups at the start, while no more responses are right")
    signal_right: float = _threshold(0.5, "accuracy above which such groups are few because their problems are solved")
    truncated_level: float = _threshold(0.5, "share of responses cut off: most never get to their answer")
    truncated_growth: float = _threshold(0.1, "change of that share since the start that counts")
    repetition_growth: float = _threshold(0.15, "rise of the share of repeated 4-grams since the start")
    length_factor: float = _threshold(1.5, "times as long, or as short, as at the start")
    length_gain: float = _threshold(0.05, "rise of held-out accuracy since the start that pays for another length")

    # Conversations with tools
    failing_level: float = _threshold(0.5, "share of calls that fail: most of what the policy asks for is not done")
    failing_growth: float = _threshold(0.15, "change of that share since the start that counts")
    void_level: float = _threshold(0.5, "share of conversations with a void turn: most lead nowhere")
    void_growth: float = _threshold(0.1, "change of that share since the start that counts")
    vanish_level: float = _threshold(0.25, "of the share of conversations with a successful call at the start")
    vanish_min_start: float = _threshold(0.1, "share at the start below which the policy has not begun to call")
    tool_wait_share: float = _threshold(0.5, "share of the sampling time: the sampler waits longer than it samples")

    # Rewards
    crashed_share: float = _threshold(0.01, "share of responses on which rules failed: a bad row or two in a data set")
    hacking_rise: float = _threshold(0.1, "rise of accuracy by the verifier since the start")
    hacking_follow: float = _threshold(0.3, "share of that rise which held-out accuracy must follow")
    jump_rise: float = _threshold(0.15, "rise of accuracy within a trend's window")
    jump_length: float = _threshold(0.25, "change of length in the same window, as a share")
    jump_entropy: float = _threshold(0.4, "fall of the entropy in the same window, as a share")
    drop_share: float = _threshold(0.7, "of its best: reward or held-out accuracy below it has dropped")
    drop_noise: float = _threshold(2.5, "times its noise from one value to the next: accuracy on 30 problems is noisy")
    drop_min: float = _threshold(0.08, "fall in accuracy that counts at all")


def threshold_reasons() -> dict[str, tuple[float, str]]:
    """Return every threshold's value and reason by name."""
    values = Thresholds()
    return {each.name: (float(getattr(values, each.name)), each.metadata["why"]) for each in fields(Thresholds)}
